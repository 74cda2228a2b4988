"""``finetune``: data and a model in, a trained model and its folder out.

Puts together what others decide: the task (`data` and the task's file), the training (`flodl.train`), the folder
(`flodl_hf.export`) and the papers that go with it (`card`). The order of things here is what a user waits for:
everything that can be wrong is looked at before anything is computed.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flodl.data import LengthGroupedBatches, RandomSampler, TokenBudgetBatches
from flodl.data.batches import FixedBatches
from flodl.errors import ConfigError, ExportError, TrainError
from flodl.train import EvalDone, RunDone, StepDone, Trainer, adamw, parameter_groups, sgd
from flodl.train.keeper import list_checkpoints, read_checkpoint
from flodl.train.optimizers import layerwise_decay
from flodl.train.state import load_model
from flodl_hf.finetuning.card import papers
from flodl_hf.finetuning.data import Known, Tables, choose_task, read_tables
from flodl_hf.finetuning.evaluation import Evaluation
from flodl_hf.finetuning.factory import Given, ModelFactory, checkpoint_layers, restore_layers, set_dropout
from flodl_hf.finetuning.options import Options, make_options
from flodl_hf.finetuning.rates import make_schedule
from flodl_hf.finetuning.rows import CollateRows, EncodedRows, Masking
from flodl_hf.finetuning.step import Objective
from flodl_hf.finetuning.task import Room, Task

if TYPE_CHECKING:
    from flodl_hf.model import EncoderModel

__all__ = ["FinetuneResult", "Job", "finetune", "plan_job"]

NO_DECAY = ("*bias", "*norm.weight", "*norm*.weight")


@dataclass(frozen=True)
class FinetuneResult:
    """A finished run.

    Attributes:
        model: the trained model, ready to predict.
        folder: where it was written; None without ``out``.
        task: the head's name.
        metrics: figures of the model on the held-out data; empty without any.
        history: one record for each evaluation: ``step``, ``epoch`` and its figures.
        losses: mean training loss of every optimiser step.
        steps: optimiser steps taken.
        best_step: the step that ``model`` is from.
        seconds: wall clock of the training.
        recipe: the options that reproduce the run, as written to ``recipe.yaml``.
    """

    model: EncoderModel
    folder: Path | None
    task: str
    metrics: dict[str, float]
    history: list[dict[str, Any]]
    losses: list[float] = field(repr=False)
    steps: int
    best_step: int
    seconds: float
    recipe: dict[str, Any] = field(repr=False)


@dataclass
class Job:
    """All that is known before the first step; made by `plan_job`.

    Attributes:
        options: the choices, with what was inferred filled in.
        task: what is learned.
        tables: the rows as read.
        model: the model, on the CPU, with its new head.
        factory: opens the same model again, for ranks in other processes.
        rows: training data as tokens.
        batches: which rows come together.
        collate: makes a batch.
        objective: the loss.
        evaluation: judges a model; None without held-out data.
        steps: optimiser steps of the whole run.
    """

    options: Options
    task: Task
    tables: Tables
    model: EncoderModel
    factory: ModelFactory | Given
    rows: EncodedRows
    batches: Any
    collate: CollateRows
    objective: Objective
    evaluation: Evaluation | None
    steps: int
    name: str

    @property
    def metric(self) -> str | None:
        """The figure that says which model is better, ``-`` before it where less is; None without evaluation."""
        if self.evaluation is None:
            return None
        return self.evaluation.check_metric(self.options.metric or self.task.main_metric)

    @property
    def schedule(self) -> Any:
        """The learning rates."""
        options = self.options
        # Without held-out data a plateau is one of the training loss.
        lower = self.metric is None or self.metric.startswith("-")
        return make_schedule(options.schedule, options.lr, options.warmup, self.steps, lower_is_better=lower)


def plan_job(
    model: str | Path | EncoderModel, train: Any, held_out: Any, options: Options, *, where: str = "finetune"
) -> Job:
    """Return a job with everything checked and tokenized, and nothing trained.

    Raises:
        DataError, ConfigError, CheckpointError, HubError, TokenizerError: as in `finetune`.
    """
    tables = read_tables(train, held_out)
    task = choose_task(tables, options, _known(model, options))
    torch.manual_seed(options.seed)  # a new head is drawn at random
    opened, factory = _open(model, task, options)
    tokenizer = opened.tokenizer
    if tokenizer is None:
        raise ConfigError(
            f"{where}: the model has no tokenizer; put its tokenizer files beside the weights, or set model.tokenizer",
            problems=["tokenizer"],
        )
    usual = 384 if task.kind == "spans" else None
    bounds = [n for n in (opened.max_tokens, options.max_length or usual) if n]
    config = opened.config
    types = config.family.uses_token_types and getattr(config.encoder, "type_vocab_size", 2) > 1
    room = Room(min(bounds, default=None), options.stride, types)
    rows = task.prepare(tables.train, tokenizer, room, training=True).rows
    masking = None
    if task.kind == "words":
        if tokenizer.mask_token_id is None:
            raise ConfigError(f"{where}: the tokenizer has no mask token, so nothing can be masked", problems=["mask"])
        masking = Masking(tokenizer.mask_token_id, tokenizer.vocab_size, options.mask_probability, options.whole_words)
    collate = CollateRows(tokenizer.pad_token_id or 0, options.layout, masking)  # type: ignore[arg-type]
    objective = Objective(task.kind, _weights(options, task, rows), options.label_smoothing)
    evaluation = None
    if tables.eval is not None:
        prepared = task.prepare(tables.eval, tokenizer, room, training=False)
        size = options.eval_batch_size or options.micro_batch_size or options.batch_size
        evaluation = Evaluation(task, prepared, collate, Objective(task.kind), size, options.precision, options.seed)
    _need_evaluation(options, evaluation)
    batches = _batches(options, rows)
    filled = replace(options, task=task.head, labels=task.labels, problem_type=task.problem_type)
    return Job(
        filled, task, tables, opened, factory, rows, batches, collate, objective, evaluation,
        _count_steps(options, batches), str(getattr(opened.source, "name", None) or "a model in memory"),
    )  # fmt: skip


def _known(model: Any, options: Options) -> Known:
    """Return the head and labels that the starting model has."""
    if not isinstance(model, (str, os.PathLike)):
        return Known(model.head, tuple(model.config.labels))
    from flodl_hf.auto import read_config
    from flodl_hf.loading import head_of

    config = read_config(os.fspath(model), **_hub(options))
    head = head_of(config.family, config.source.get("architectures"))
    unnamed = all(name == f"LABEL_{i}" for i, name in enumerate(config.labels))
    return Known(head, () if unnamed else tuple(config.labels))


def _hub(options: Options) -> dict[str, Any]:
    return {"revision": options.revision, "local_files_only": options.local_files_only}


def _open(model: Any, task: Task, options: Options) -> tuple[EncoderModel, ModelFactory | Given]:
    if isinstance(model, (str, os.PathLike)):
        factory = ModelFactory(
            model, task.head, task.labels, task.problem_type, options.freeze, options.dropout,
            {"attention": options.attention, **_hub(options)},
        )  # fmt: skip
        return factory.open(), factory
    wrong = []
    if model.head != task.head:
        wrong.append(f"its head is {model.head}, the task is {task.head}")
    elif task.labels is not None and tuple(model.config.labels) != task.labels:
        wrong.append(f"its labels are {list(model.config.labels)[:8]}, those of the run {list(task.labels)[:8]}")
    if wrong:
        raise ConfigError(
            f"finetune: the model does not fit the data: {'; '.join(wrong)}. Give its folder or name instead, so that "
            "a new head is made, or load it with the right labels",
            problems=wrong,
        )
    if task.problem_type is not None:
        model.config = model.config.changed(problem_type=task.problem_type)
    model.set_attention(options.attention)
    return model, Given(model)


def _weights(options: Options, task: Task, rows: EncodedRows) -> tuple[float, ...] | None:
    """Return a weight for each label; ``"balanced"`` is ``rows / (labels x count)``, as in King and Zeng 2001."""
    asked = options.class_weights
    if asked is None:
        if options.label_smoothing and task.kind not in ("single_label", "tokens", "words"):
            raise ConfigError(
                f"label_smoothing: {task.kind} has no single right label to take a share from; expected 0",
                problems=["label_smoothing"],
            )
        return None
    names, counts = task.labels, task.label_counts(rows)
    if names is None or counts is None or (task.kind == "multi_label" and options.label_smoothing):
        raise ConfigError(f"class_weights: {task.kind} takes none here", problems=["class_weights"])
    if asked == "balanced":
        return tuple(sum(counts) / (len(counts) * n) if n else 0.0 for n in counts)
    if isinstance(asked, Mapping):
        strange = [str(name) for name in asked if str(name) not in names]
        if strange:
            raise ConfigError(f"class_weights: {strange} are no labels; there are {list(names)[:20]}", problems=strange)
        asked = [asked.get(name, 1.0) for name in names]
    if isinstance(asked, str) or len(asked) != len(names) or any(float(w) < 0 for w in asked):
        raise ConfigError(
            f"class_weights: found {asked!r}; expected 'balanced', a weight for each of {list(names)[:20]}, or weights "
            "by name; none below 0",
            problems=["class_weights"],
        )
    return tuple(float(w) for w in asked)


def _need_evaluation(options: Options, evaluation: Evaluation | None) -> None:
    if evaluation is not None:
        if options.metric:
            evaluation.check_metric(options.metric)
        return
    for name in ("early_stopping", "eval_every", "metric"):
        if getattr(options, name):
            raise ConfigError(f"{name}: there is no held-out data to judge by; give eval=", problems=[name])


def _batches(options: Options, rows: EncodedRows) -> Any:
    sampler, lengths = RandomSampler(len(rows), options.seed), rows.lengths
    if options.tokens_per_batch is not None:
        return TokenBudgetBatches(
            sampler,
            lengths,
            options.tokens_per_batch,
            layout="packed" if options.layout == "packed" else "padded",
            seed=options.seed,
        )
    if options.group_by_length:
        return LengthGroupedBatches(sampler, lengths, options.batch_size, seed=options.seed)
    return FixedBatches(sampler, options.batch_size)


def _count_steps(options: Options, batches: Any) -> int:
    steps = 0
    for epoch in range(options.epochs):
        steps += -(-len(batches.plan(epoch)) // options.accumulate)
        if options.max_steps is not None and steps >= options.max_steps:
            return options.max_steps
    return steps


# ---- training -------------------------------------------------------------------------------------------


def finetune(
    model: str | Path | EncoderModel,
    *,
    train: Any,
    eval: Any = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    on_event: Callable[[Any], Any] | None = None,
    **options: Any,
) -> FinetuneResult:
    """Return ``model`` trained on ``train``, written to ``out`` as a Hugging Face folder if that is given.

    ::

        result = finetune("bert-base-uncased", train="train.csv", eval="dev.csv", out="my-classifier")
        result.metrics["accuracy"]
        result.model.predict(["I love this"])

    The columns of the data say what is learned: a text and a label, words and tags, a text and spans, a question,
    a context and answers, or a text alone (masked words). Labels, and what kind they are, are read off the data.

    Args:
        model: a folder or Hub name, which gets a new head where its own does not fit, or a model.
        train: a file (CSV, TSV, JSON lines, JSON, Parquet, Arrow, CoNLL, SQuAD, text), a list of dicts, a dict of
            columns, a Hugging Face data set, or a data frame.
        eval: held-out data of the same kind, judged after each epoch; the best model is kept.
        out: folder to write; holds the model, its tokenizer, ``README.md`` (the model card), ``recipe.yaml``
            (which reproduces the run) and ``training.json`` (every figure).
        overwrite: replace a folder that holds a model.
        on_event: called with the events of training (`flodl.train.events`) as they come.
        **options: fields of `flodl_hf.finetuning.Options`; their defaults are those of transformers.

    Raises:
        ConfigError: an option does not exist or does not fit; all are listed.
        DataError: the data cannot be read or understood.
        TrainError: the training failed, or checkpoints of another run are in the way.
        ExportError: ``out`` is in use, or cannot be written.
        HubError, CheckpointError, TokenizerError: the model cannot be opened.

    Torch's and Python's global random generators are seeded by this call.
    """
    chosen = make_options(options)
    target = None if out is None else Path(out)
    if target is not None:
        _check_free(target, overwrite)
    job = plan_job(model, train, eval, chosen)
    recipe = {"model": _named(model), "train": _named(train), "eval": _named(eval), **_recipe(job)}
    with ExitStack() as stack:
        stack.enter_context(_settings_of_torch())
        folder = _checkpoint_folder(job, target, stack)
        notes = _Notes(on_event)
        began = time.perf_counter()
        trained = _train(job, folder, notes, stack)
        seconds = time.perf_counter() - began
        best_step, metrics = _take_best(job, trained, folder, notes)
    trained.eval()
    result = FinetuneResult(
        trained, None, job.task.head, metrics, notes.history, notes.losses, notes.steps, best_step, seconds, recipe
    )
    if target is not None and _is_first_rank():
        written = _write(job, result, target, overwrite)
        result = replace(result, folder=written)
        if folder is not None and not chosen.keep_checkpoints and chosen.checkpoints is None:
            shutil.rmtree(folder, ignore_errors=True)
    return result


class _Notes:
    """Keeps what the result reports, and hands events on."""

    def __init__(self, on_event: Callable[[Any], Any] | None) -> None:
        self.on_event = on_event
        self.losses: list[float] = []
        self.history: list[dict[str, Any]] = []
        self.steps = 0

    def __call__(self, event: Any) -> None:
        if isinstance(event, StepDone):
            self.losses.append(event.loss)
            self.steps = event.step + 1
        elif isinstance(event, EvalDone):
            self.history.append({"step": event.step, "epoch": event.epoch, **event.metrics})
        elif isinstance(event, RunDone):
            self.steps = event.step
        if self.on_event is not None:
            self.on_event(event)


@dataclass(frozen=True)
class _Groups:
    """The optimiser's groups: no decay on biases and norms, and falling rates towards the input if asked for."""

    lr: float
    layerwise: float | None

    def __call__(self, model: Any) -> list[dict[str, Any]]:
        if self.layerwise is None:
            return parameter_groups(model, no_decay=NO_DECAY)
        return layerwise_decay(
            model, self.lr, self.layerwise, layers="graph.encoder.layers", lowest=("graph.encoder.embeddings",),
            no_decay=NO_DECAY,
        )  # fmt: skip


def _train(job: Job, folder: Path | None, notes: _Notes, stack: ExitStack) -> EncoderModel:
    options = job.options
    factory = _factory(job, stack)
    if options.optimizer == "adamw":
        optimizer = adamw(
            options.lr, weight_decay=options.weight_decay, betas=(options.beta1, options.beta2), eps=options.eps
        )
    else:
        optimizer = sgd(options.lr, momentum=options.beta1, weight_decay=options.weight_decay)
    builder = (
        Trainer.builder(factory, optimizer, job.objective)
        .dataset(job.rows, collate=job.collate, batches=job.batches)
        .set(
            num_epochs=options.epochs,
            max_steps=options.max_steps,
            accumulate=options.accumulate,
            micro_batch_size=options.micro_batch_size,
            seed=options.seed,
            precision=options.precision,
            max_grad_norm=options.max_grad_norm or None,
            on_nan=options.on_nan,
            compat=options.compat,
            deterministic=options.deterministic,
            schedule=job.schedule,
            schedule_metric=job.metric.lstrip("-") if job.metric else "loss",
            parameter_groups=_Groups(options.lr, options.layerwise_decay),
            checkpoint_activations=checkpoint_layers if options.gradient_checkpointing else None,
        )
        .subscribe(notes)
    )
    if job.evaluation is not None:
        builder.eval_fn(job.evaluation).set(eval_every=options.eval_every)
    if options.early_stopping is not None:
        builder.set(early_stopping=(job.metric, options.early_stopping))
    if folder is not None:
        builder.checkpoints(
            str(folder),
            # every evaluation needs its weights, or the best could not be gone back to
            every=options.save_every or options.eval_every,
            keep_last=1,
            keep_best=job.metric if options.keep_best else None,
            resume=options.resume,
        )
    if options.devices is not None:
        builder.devices(options.devices)
    if options.policy is not None:
        builder.policy(options.policy)
    if options.backend is not None:
        builder.backend(options.backend)
    handle = builder.run()
    state = handle.join()
    if handle.model is not None:
        trained: Any = handle.model
        restore_layers(trained)
        return trained
    state.load_into(job.model)
    return job.model


def _factory(job: Job, stack: ExitStack) -> Any:
    """Return what gives each rank its model: the one at hand where ranks are this process."""
    devices = job.options.devices
    several = devices > 1 if isinstance(devices, int) else isinstance(devices, (list, tuple)) and len(devices) > 1
    if not several:
        job_model = job.model
        _ready(job, job_model, stack)
        return Given(job_model)
    if isinstance(job.factory, ModelFactory):
        return job.factory
    # A model cannot be sent to other processes, its folder can.
    place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flodl-hf-"))) / "model"
    job.model.save_pretrained(place)
    return ModelFactory(
        place, job.task.head, None, None, job.options.freeze, job.options.dropout, {"attention": job.options.attention}
    )


def _ready(job: Job, model: EncoderModel, stack: ExitStack) -> None:
    """Freeze and set dropout, and have both put back when the training is over."""
    factory = ModelFactory("", "", None, None, job.options.freeze, None, {})
    learned = [p for p in model.parameters() if p.requires_grad]
    factory.ready(model)
    stack.callback(lambda: [p.requires_grad_(True) for p in learned])
    if job.options.dropout is not None:
        before = set_dropout(model, job.options.dropout)
        stack.callback(lambda: [setattr(module, name, value) for module, name, value in before])


@contextmanager
def _settings_of_torch() -> Iterator[None]:
    """Put torch's global switches back to what they were."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    products = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.set_float32_matmul_precision(products)


# ---- checkpoints and the folder -------------------------------------------------------------------------


def _checkpoint_folder(job: Job, target: Path | None, stack: ExitStack) -> Path | None:
    """Return where checkpoints go; a temporary folder where they only serve to find the best model again.

    Raises:
        TrainError: checkpoints are there already, and the run was not asked to go on from them.
    """
    options = job.options
    if options.checkpoints is not None:
        folder = Path(options.checkpoints)
    elif target is not None:
        folder = target.with_name(target.name + ".checkpoints")
    elif job.evaluation is not None and options.keep_best and not _under_torchrun():
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flodl-hf-")))
    else:
        return None
    if not options.resume and folder.is_dir() and list_checkpoints(folder):
        raise TrainError(
            f"finetune: {folder} holds the checkpoints of a run that did not end. Go on from them with resume=True "
            "(--resume), or remove the folder.",
            folder=str(folder),
        )
    return folder


def _take_best(job: Job, model: EncoderModel, folder: Path | None, notes: _Notes) -> tuple[int, dict[str, float]]:
    """Load the weights of the best evaluation into ``model``; return its step and figures."""
    last = {k: v for k, v in notes.history[-1].items() if k not in ("step", "epoch")} if notes.history else {}
    if folder is None or job.metric is None or not job.options.keep_best:
        return notes.steps, last
    name, sign = job.metric.lstrip("-"), -1.0 if job.metric.startswith("-") else 1.0
    found: list[tuple[float, int, Path, dict[str, float]]] = []
    for path in list_checkpoints(folder):
        manifest = json.loads((path / "manifest.json").read_bytes())
        value = manifest["metrics"].get(name)
        if value is not None and value == value:
            found.append((sign * value, -manifest["step"], path, manifest["metrics"]))
    if not found:
        return notes.steps, last
    _, step, path, metrics = max(found, key=lambda entry: entry[:2])
    if -step != notes.steps:
        load_model(model, dict(read_checkpoint(path).tensors["model"]))
    return -step, dict(metrics)


def _under_torchrun() -> bool:
    from flodl.distributed.group import under_torchrun

    return under_torchrun()


def _is_first_rank() -> bool:
    return not _under_torchrun() or os.environ["RANK"] == "0"


PAPERS = ("README.md", "recipe.yaml", "training.json")


def _check_free(target: Path, overwrite: bool) -> None:
    """Refuse before the training what would be refused after it.

    Raises:
        ExportError: the folder is not empty and may not be replaced, or is a file.
    """
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise ExportError(
            f"{target} is not empty; expected a new folder. Give another, or overwrite=True (--overwrite) to replace "
            "the model there.",
            path=str(target),
        )
    if target.exists() and not target.is_dir():
        raise ExportError(f"{target} is a file; expected a folder to write", path=str(target))


def _write(job: Job, result: FinetuneResult, target: Path, overwrite: bool) -> Path:
    files = papers(job, result)
    if overwrite and target.is_dir():
        # The exporter replaces folders that hold a model and nothing strange; these two are ours.
        for name in PAPERS[1:]:
            (target / name).unlink(missing_ok=True)
    return result.model.save_pretrained(target, overwrite=overwrite, extra_files=files)


def _named(source: Any) -> str | None:
    return os.fspath(source) if isinstance(source, (str, os.PathLike)) else None


def _recipe(job: Job) -> dict[str, Any]:
    """Return the choices that make the run again: all that are set, without where files go on this machine."""
    left_out = ("checkpoints", "keep_checkpoints", "resume", "local_files_only")
    values = {k: v for k, v in job.options.to_dict().items() if k not in left_out and v is not None}
    if not isinstance(values["schedule"], str):
        values["schedule"] = repr(job.options.schedule)
    commit = getattr(job.model.source, "commit", None)
    if commit:
        values["revision"] = commit
    return values

"""Everything that a run needs to know before its first step, checked and tokenized.

Decides how options, data and model become a task, rows, batches, a loss and a judge. Nothing is trained here, so
a mistake shows before it has cost anything.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from flodl.data import LengthGroupedBatches, RandomSampler, TokenBudgetBatches
from flodl.data.batches import FixedBatches
from flodl.errors import ConfigError
from flodl_hf.finetuning.choices import ChoiceTask
from flodl_hf.finetuning.data import HEADED, Known, Tables, choose_task, guessed_columns, read_tables
from flodl_hf.finetuning.evaluation import Evaluation, Evaluations
from flodl_hf.finetuning.factory import FixedModel, ModelFactory
from flodl_hf.finetuning.generator.task import GeneratorTask
from flodl_hf.finetuning.options import Options
from flodl_hf.finetuning.pairs import PretrainingObjective
from flodl_hf.finetuning.ranking import RankTask
from flodl_hf.finetuning.rates import make_schedule
from flodl_hf.finetuning.replaced import ReplacedTask
from flodl_hf.finetuning.rows import CollateRows, EncodedRows, Masking
from flodl_hf.finetuning.shapes import choose_shapes, choose_widths
from flodl_hf.finetuning.step import Objective
from flodl_hf.finetuning.task import LengthLimits, Prepared, Task, name_of
from flodl_hf.finetuning.thresholds import check_tunable
from flodl_hf.finetuning.user_code import Own
from flodl_hf.finetuning.vectors.rows import Laid
from flodl_hf.finetuning.vectors.step import VectorObjective
from flodl_hf.finetuning.vectors.task import EmbeddingTask

if TYPE_CHECKING:
    from flodl_hf.model.encoder_model import EncoderModel

__all__ = ["BESIDE", "Job", "plan_job"]

ONE_ROW = (
    *("embedding", "rank", "sparse", "multivector"),
    *("multiple_choice", "next_sentence", "pretraining"),
)
"""Tasks whose texts are one row each, however long."""
BESIDE = (EmbeddingTask, GeneratorTask)
"""Tasks that put what learns besides beside a model, and take it away when the run is over."""
LONG_EPOCH = 256
"""Batches from which rows of similar length come together unasked: what that saves is time, which short runs have, and
in few steps batches of one length each weigh more than in many (`docs/training-measured.md`)."""


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
        name: what the start is called.
        own: what the user brought.
        named: whether the start was given by name, and not as a model.
        notes: what the user should know of how all this was understood.
        unrecorded: why steps on CUDA are not recorded; None where they are.
    """

    options: Options
    task: Task
    tables: Tables
    model: EncoderModel
    factory: ModelFactory | FixedModel
    rows: EncodedRows
    batches: Any
    collate: CollateRows
    objective: Objective | VectorObjective
    evaluation: Evaluation | Evaluations | None
    steps: int
    name: str
    own: Own
    named: bool = True
    notes: list[str] = field(default_factory=list)
    unrecorded: str | None = None

    @property
    def metric(self) -> str | None:
        """The figure that says which model is better, ``-`` before it where less is; None without evaluation."""
        if self.evaluation is None:
            return None
        return self.evaluation.check_metric(self.options.metric or self.task.main_metric)

    def conclude(self, model: EncoderModel) -> Any:
        """Put what was learned beside the graph where the model has it; return a generator, which is one of its own."""
        return self.task.conclude(model) if isinstance(self.task, BESIDE) else None

    @property
    def schedule(self) -> Any:
        """The learning rates."""
        options = self.options
        # Without held-out data a plateau is one of the training loss.
        lower = self.metric is None or self.metric.startswith("-")
        return make_schedule(
            options.schedule, options.lr, options.warmup, self.steps,
            lower_is_better=lower, options=options.schedule_options,
        )  # fmt: skip


def plan_job(
    model: str | Path | EncoderModel,
    train: Any,
    held_out: Any,
    options: Options,
    *,
    where: str = "finetune",
    own: Own | None = None,
) -> Job:
    """Return a job with everything checked and tokenized, and nothing trained.

    Raises:
        DataError, ConfigError, CheckpointError, HubError, TokenizerError: as in `finetune`.
    """
    own = own or Own()
    tables = read_tables(train, held_out, seed=options.seed)
    known = _known(model, options)
    task, options = choose_task(tables, options, known, own.loss)
    if options.long_texts == "windows" and name_of(task) in ONE_ROW:
        raise ConfigError(
            f"long_texts: found 'windows'; expected 'cut' for {name_of(task)}, where each text is one row; a greater "
            "max_length keeps more of it",
            problems=["long_texts"],
        )
    notes: list[str] = []
    if isinstance(model, (str, os.PathLike)):
        options, notes = _settle_head(known, task, options)
    torch.manual_seed(options.seed)  # a new head is drawn at random
    opened, factory = _open(model, task, options)
    tokenizer = opened.tokenizer
    if tokenizer is None:
        raise ConfigError(
            f"{where}: the model has no tokenizer; put its tokenizer files beside the weights, or set model.tokenizer",
            problems=["tokenizer"],
        )
    vectors = task if isinstance(task, EmbeddingTask) else None
    if isinstance(task, BESIDE):
        notes = [*notes, *task.settle(opened)]
    limits = _limits(task, opened, tokenizer, options)
    prepared = {"train": task.prepare(tables.train, tokenizer, limits, training=True)}
    rows = prepared["train"].rows
    layout, unrecorded = _batch_layout(options, own, vectors)
    if unrecorded and options.capture and _on_cuda(options):
        notes = [*notes, f"steps are launched one operation at a time, with the same numbers, because {unrecorded}"]
    texts: Any = rows
    # examples of several rows: vectors, and lists of a question's candidates
    listed = isinstance(task, ChoiceTask) or (isinstance(task, RankTask) and task.loss is not None)
    several: Any = vectors or (task if listed else None)
    batches = _batches(options, rows, layout) if vectors is None else vectors.batches(texts)
    masking = _masking(task, tokenizer, options, where)
    collate = CollateRows(tokenizer.pad_token_id or 0, layout, masking, noise=bool(options.neftune))
    if several is None:
        laid = Laid(rows.lengths, rows.lengths)
    else:
        laid = texts.laid if vectors is None else vectors.laid(texts)
    if layout == "bucketed":
        collate = _shaped(collate, options, laid, batches, opened.max_tokens)
    elif layout == "padded" and unrecorded is None and _has_widths(options, task):
        cut: Any = {"micro_batch_size": _micro(options), "accumulate": options.accumulate}
        collate = replace(collate, widths=choose_widths(laid.lengths, laid.widest, batches, **cut))
    weights = _weights(options, task, rows)
    own.check(task, weights, options.label_smoothing)
    make = PretrainingObjective if task.kind == "pairs" else Objective
    objective: Any = make(
        task.kind, weights, options.label_smoothing, options.mask_padding, own.loss, options.neftune or None
    )
    if several is not None:
        objective, collate = several.objective(), several.collate(collate, texts)
    elif isinstance(task, GeneratorTask):
        objective, collate = task.objective(), task.collate(collate, rows, batches)
    for name, examples in tables.evals.items():
        prepared[f"eval {name}".strip()] = task.prepare(examples, tokenizer, limits, training=False)
    judging = replace(collate, layout="packed" if layout == "bucketed" else layout, noise=False, widths=())
    evaluations: dict[str, Evaluation] = {}
    for name in tables.evals:
        part = prepared[f"eval {name}".strip()]
        # how wide a batch is padded says nothing of a model
        judge = make(task.kind, mask_padding=True, own=own.loss) if several is None else several.of_held_out(part)
        made = judging
        if isinstance(task, GeneratorTask):
            judge, made = objective, task.judging(judging, part)
        size = options.eval_batch_size or _micro(options) or options.batch_size
        evaluations[name] = Evaluation(
            task, part, made, judge, size, options.precision, options.seed, own.metrics
        )  # fmt: skip
    evaluation = evaluations.get("") or (Evaluations(evaluations) if evaluations else None)
    _need_evaluation(options, evaluation)
    if options.tune_thresholds:
        check_tunable(task)
    if isinstance(task, HEADED):
        notes = [*notes, *guessed_columns(task.columns, options.columns)]
    notes = [*notes, *_cut_texts(prepared, limits, task)]
    filled = replace(options, task=name_of(task), labels=task.labels, problem_type=task.problem_type)
    job = Job(
        filled, task, tables, opened, factory, rows, batches, collate, objective, evaluation,
        _count_steps(options, batches), str(getattr(opened.source, "name", None) or "a model in memory"), own,
        isinstance(model, (str, os.PathLike)), notes, unrecorded,
    )  # fmt: skip
    _ = job.schedule  # values that it cannot have are refused now
    return job


def _limits(task: Task, opened: EncoderModel, tokenizer: Any, options: Options) -> LengthLimits:
    usual = 384 if task.kind == "spans" else None
    bounds = [n for n in (opened.max_tokens, options.max_length or usual) if n]
    if isinstance(task, BESIDE):
        bounds += task.bounds(opened)
    types = opened.config.uses_token_types and tokenizer.settings.type_ids
    return LengthLimits(min(bounds, default=None), options.stride, types, options.long_texts == "windows")


def _masking(task: Task, tokenizer: Any, options: Options, where: str) -> Any:
    """Return what replaces tokens of a batch before it is learned from; None where nothing does."""
    if isinstance(task, ReplacedTask):
        return task.drawing(tokenizer)
    if task.kind not in ("words", "pairs") and not isinstance(task, GeneratorTask):
        return None
    if tokenizer.mask_token_id is None:
        raise ConfigError(f"{where}: the tokenizer has no mask token, so nothing can be masked", problems=["mask"])
    if isinstance(task, GeneratorTask):
        return task.masking(tokenizer)
    return Masking(tokenizer.mask_token_id, tokenizer.vocab_size, options.mask_probability, options.whole_words)


def _batch_layout(options: Options, own: Own, vectors: EmbeddingTask | None) -> tuple[Any, str | None]:
    """Return how batches lie in memory, and why steps are not recorded; None where they are."""
    layout = _layout(options)
    unrecorded = None if vectors is None else vectors.unrecorded
    if own.loss is not None and vectors is None:
        unrecorded = "a loss of your own does not know of what batches are filled up with, so they are not"
    if layout == "bucketed" and (options.cache_tokens is not None or (unrecorded and vectors is None)):
        layout = "packed"  # parts of a batch have shapes of their own
    return layout, unrecorded


def _shaped(collate: CollateRows, options: Options, laid: Laid, batches: Any, most: int | None) -> CollateRows:
    """Return the collate function with the shapes that its batches are filled up to."""
    ranks = options.ranks if options.policy in (None, "sync") else 1  # others take whole batches
    longest = _most(int(laid.widest.max()), most)
    shapes = partial(
        choose_shapes, laid.lengths, batches, longest,
        accumulate=options.accumulate, texts_per_row=laid.texts, ranks=ranks,
    )  # fmt: skip
    collate = replace(collate, shapes=shapes(micro_batch_size=_micro(options)))
    return replace(collate, shapes_for=shapes) if options.micro_batch_size == "auto" else collate


def _micro(options: Options) -> int | None:
    """Return the rows that are computed at once where that is stated as a number."""
    return None if isinstance(options.micro_batch_size, str) else options.micro_batch_size


def _cut_texts(prepared: Mapping[str, Prepared], limits: LengthLimits, task: Task) -> list[str]:
    """Return what is to be said of texts that are longer than a row."""
    counts = [f"{part.cut:,} of {len(part.rows):,} texts of {name}" for name, part in prepared.items() if part.cut]
    if not counts:
        return []
    advice = "a greater max_length keeps more" if name_of(task) in ONE_ROW else "long_texts='windows' reads them whole"
    return [f"{' and '.join(counts)} are longer than {limits.max_tokens} tokens and are cut at their end; {advice}"]


def _known(model: Any, options: Options) -> Known:
    """Return the head and labels that the starting model has."""
    if not isinstance(model, (str, os.PathLike)):
        return Known(model.head, tuple(model.config.labels), _ordered(model.config.family))
    from flodl_hf.config.model_config import read_config
    from flodl_hf.weights.loading import head_of

    config = read_config(os.fspath(model), **_hub(options))
    head = head_of(config.family, config.source.get("architectures"))
    unnamed = all(name == f"LABEL_{i}" for i, name in enumerate(config.labels))
    return Known(head, () if unnamed else tuple(config.labels), _ordered(config.family))


def _ordered(family: Any) -> bool:
    """Return whether a family's pairs are learned by their order, as ALBERT's are."""
    return "pretraining" in family.heads and family.heads["pretraining"].relation_output == "sop_logits"


def _hub(options: Options) -> dict[str, Any]:
    return {"revision": options.revision, "local_files_only": options.local_files_only}


def _settle_head(known: Known, task: Task, options: Options) -> tuple[Options, list[str]]:
    """Return the options with ``new_head`` decided, and what is to be said of it.

    A classifier that was trained to tell others apart would go on under names that mean something else; so it is drawn
    anew where the names differ, or stand in another order, unless the caller wants the old one.
    """
    old, new = known.labels, task.labels
    if new is None or known.head != task.head or len(old) != len(new) or old == new:
        return options, []
    kept = options.new_head is False
    pairs = ", ".join(f"{a} -> {b}" for a, b in list(zip(old, new, strict=True))[:8])
    what = (
        "goes on under these names (new_head=False)"
        if kept
        else "is drawn anew (new_head=False or --no-new-head keeps it)"
    )
    return replace(options, new_head=not kept), [f"the start was trained with other labels ({pairs}); its head {what}"]


def _open(model: Any, task: Task, options: Options) -> tuple[EncoderModel, ModelFactory | FixedModel]:
    if isinstance(model, (str, os.PathLike)):
        # Ranks that keep a part look at the file, whose pages they share, rather than read a whole model each.
        shown = {"mapped": True} if options.shard and options.ranks > 1 else {}
        factory = ModelFactory(
            os.fspath(model), task.head, task.labels, task.problem_type, options.freeze, options.dropout,
            {**shown, "attention": options.attention, **_hub(options)}, bool(options.new_head), options.adapter,
            options.seed,
            task.start if isinstance(task, BESIDE) else None,
        )  # fmt: skip
        return factory.open(), factory
    wrong = ["a new head is made of a folder or name alone"] if options.new_head else []
    if options.adapter is not None and model.active_adapter is not None:
        wrong.append(f"it computes with the adapter {model.active_adapter!r}, and lora= asks for a new one")
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
    if options.adapter is not None:
        model.add_adapter(options.adapter)
    return model, FixedModel(model)


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


def _need_evaluation(options: Options, evaluation: Evaluation | Evaluations | None) -> None:
    if evaluation is not None:
        if options.metric:
            evaluation.check_metric(options.metric)
        return
    for name in ("early_stopping", "eval_every", "eval_start", "eval_delay", "metric", "tune_thresholds"):
        if getattr(options, name):
            raise ConfigError(f"{name}: there is no held-out data to judge by; give eval=", problems=[name])


def _layout(options: Options) -> Literal["padded", "packed", "bucketed"]:
    """Return how rows lie in training: on CUDA packed ones are filled up to shapes that come again."""
    cuda = _on_cuda(options)
    if options.layout == "auto":
        return "bucketed" if cuda and options.precision in ("bf16", "fp16") else "padded"
    if options.layout == "packed":
        return "bucketed" if cuda else "packed"
    return "padded"


def _has_widths(options: Options, task: Task) -> bool:
    """Return whether padded batches are filled up to widths that come again, for steps that are recorded."""
    # transformers' loss of spans depends on the width of a batch, which stays its own
    return options.capture and _on_cuda(options) and (task.kind != "spans" or options.mask_padding)


def _on_cuda(options: Options) -> bool:
    """Return whether training is on CUDA devices."""
    devices = options.places
    named = [devices] if isinstance(devices, str) else devices if isinstance(devices, (list, tuple)) else []
    return torch.cuda.is_available() and not any(str(name).startswith("cpu") for name in named)


def _most(longest: int, bound: int | None) -> int:
    """Return the most tokens of a row, rounded up so that other data have the same; no more than the model takes."""
    return max(longest, min(-(-longest // 16) * 16, bound or longest))


def _batches(options: Options, rows: EncodedRows, layout: str) -> Any:
    sampler, lengths = RandomSampler(len(rows), options.seed), rows.lengths
    if options.tokens_per_batch is not None:
        return TokenBudgetBatches(
            sampler,
            lengths,
            options.tokens_per_batch,
            layout="padded" if layout == "padded" else "packed",
            seed=options.seed,
        )
    grouped = options.group_by_length
    if grouped is None:
        grouped = layout == "padded" and len(rows) >= LONG_EPOCH * options.batch_size
    elif grouped and layout != "padded":
        warnings.warn(
            "group_by_length: rows are packed, without padding that grouping could save; they are mixed freely",
            UserWarning,
            stacklevel=4,
        )
    if grouped and layout == "padded":
        return LengthGroupedBatches(sampler, lengths, options.batch_size, seed=options.seed)
    return FixedBatches(sampler, options.batch_size)


def _count_steps(options: Options, batches: Any) -> int:
    if isinstance(batches, (FixedBatches, LengthGroupedBatches)):  # as many in each epoch, whatever its order
        steps = options.epochs * -(-len(batches.plan(0)) // options.accumulate)
        return steps if options.max_steps is None else min(steps, options.max_steps)
    steps = 0
    for epoch in range(options.epochs):
        steps += -(-len(batches.plan(epoch)) // options.accumulate)
        if options.max_steps is not None and steps >= options.max_steps:
            return options.max_steps
    return steps

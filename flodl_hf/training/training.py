"""A planned job as a run of `flodl.train`: optimiser, parameter groups, settings, changes of the model, and identity.

The exit stack of the caller undoes temporary changes after the training. The identity of a run is compared with a
checkpoint: options as values, data and the starting model as hashes. An option is compared unless a table in this
module states that the trainer compares it, or why it changes no number.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from flodl.errors import CheckpointError, TrainError, TrainInterrupted, nearest
from flodl.train import Callback, Ema, Profiler, Trainer, adamw, layerwise_decay, parameter_groups, sgd
from flodl.train.events import Event
from flodl.train.optim.ema import averaged_state
from flodl.train.saving.reading import ranked, read_checkpoint, signed
from flodl.train.saving.state import copy_in_background, load_model
from flodl_hf.inference.graph_model import GraphModel
from flodl_hf.models.adapters.settings import recorded_adapter
from flodl_hf.models.transformers_methods import freeze
from flodl_hf.training.evaluation import EvalPredictions
from flodl_hf.training.job import Job
from flodl_hf.training.observation import Rules, Watch, observed_of
from flodl_hf.training.options import Options
from flodl_hf.training.result import figures_in
from flodl_hf.training.rows import EncodedRows
from flodl_hf.training.start import ModelFactory, checkpoint_layers, restore_layers, set_dropout, take
from flodl_hf.training.vectors.tsdae import DenoisingTask

if TYPE_CHECKING:
    from flodl.train.builder import TrainerBuilder
    from flodl_hf.models.encoder_model import EncoderModel

BY_THE_TRAINER = (
    *("batch_size", "accumulate", "micro_batch_size", "tokens_per_batch", "group_by_length", "devices", "policy"),
    *("lr", "schedule", "schedule_options", "warmup", "optimizer", "weight_decay", "beta1", "beta2", "eps"),
    *("max_grad_norm", "layerwise_decay", "precision", "seed", "on_nan", "compat", "ema"),
)
BY_HASH = ("columns", "revision")
CHANGES_NO_NUMBER = frozenset((
    "epochs", "max_steps", "gradient_checkpointing", "deterministic", "compile", "save_every", "checkpoints",
    "keep_checkpoints", "keep_last", "trackers", "log_dir", "profile", "report", "resume", "eval_batch_size",
    "local_files_only",
))  # fmt: skip
"""Options that determine length, checkpoints and reports of a run, or change numbers by rounding only."""
FORMER = {"adaptive_layers": False, "eval_delay": 0}
"""Options that no longer exist, which checkpoints contain with these values."""


def fingerprint_of(job: Job) -> dict[str, Any]:
    """Return the values that define the numbers of a planned run, without the values of the trainer; JSON values."""
    passed = {*BY_THE_TRAINER, *BY_HASH, *CHANGES_NO_NUMBER, "class_weights", "metric", "lora", "adapter"}
    asked = {name: _json(value) for name, value in job.options.to_dict().items() if name not in passed}
    asked["long_texts"] = {"truncate": "cut"}.get(job.options.long_texts, job.options.long_texts)  # its former word
    judged = {
        f"eval rows{name and f' of {name}'}": _digest(one.prepared.rows, _answers(job.task, job.tables.evals[name]))
        for name, one in (job.evaluation.sets.items() if job.evaluation is not None else ())
    }
    return {
        **asked,
        **FORMER,
        **_json(recorded_adapter(job.options.adapter)),
        "loss": _json(job.own.loss),
        "class_weights": getattr(job.objective, "weights", None),
        "metric": job.metric,
        "model": _hash_of_start(job),
        "train rows": _digest(job.rows, None),
        **judged,
    }


def _hash_of_start(job: Job) -> str:
    """Return a hash of the starting model: its config, and its weights if it was given as a name."""
    start = hashlib.sha256(repr(job.model.config.encoder).encode())
    if job.named:
        beside = job.model.beside
        for name, tensor in [*job.model.graph.state_dict().items(), *(beside.state_dict().items() if beside else ())]:
            start.update(name.encode())
            tensor = tensor.to(job.model.dtype_in_shards or tensor.dtype)  # a run's start is one, in shards or not
            start.update(memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()))
    return start.hexdigest()[:16]


def _digest(rows: EncodedRows, further: Any) -> str:
    """Return a hash of tokens, labels and windows, and of further evaluation values."""
    digest = hashlib.sha256()
    for part in ({**rows.columns, "lengths": rows.lengths}, {**rows.values, "owners": rows.owners}):
        for name in sorted(part):
            array = np.ascontiguousarray(part[name])
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(array.tobytes())
    if further is not None:
        digest.update(json.dumps(further, default=str, ensure_ascii=True).encode())
    return digest.hexdigest()[:16]


def _answers(task: Any, rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    columns = task.columns
    found = [getattr(columns, role) for role in columns.__dataclass_fields__ if role != "task"]
    names = [name for part in found for name in (part if isinstance(part, tuple) else (part,))]
    return [[row.get(name) for name in names if name is not None] for row in rows]


def _json(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(name): _json(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json(part) for part in value]
    return getattr(value, "__qualname__", type(value).__qualname__)


CHECKPOINTS = ".checkpoints"  # after the name of the folder that a run writes
LOG_EVERY = 20
"""Steps between reads of metrics from a CUDA device."""
SETTINGS = (
    *("max_steps", "accumulate", "micro_batch_size", "seed", "precision", "on_nan", "deterministic", "compile"),
    *("eval_every", "policy", "shard"),
)
"""Settings of the Trainer that are options of the same name."""
NO_DECAY = ("*bias", "*norm.weight", "*norm*.weight")


UNSAVED_S = 30.0
"""Seconds of work that a run may lose if its model cannot be written; longer runs save a checkpoint first."""


def train_job(
    job: Job,
    on_event: Callable[[Any], Any],
    stack: ExitStack,
    folder: Path | None = None,
    best: Best | None = None,
    *,
    progress: bool | None = False,
    trackers: Sequence[Callable[[Any], Any]] = (),
    monitor: Any = None,
) -> EncoderModel | None:
    """Return the model of a planned job after its last step; None on ranks that have only a part of it.

    Args:
        job: from `plan_job`.
        on_event: called with the events of training.
        stack: undoes temporary changes when it is closed.
        folder: where checkpoints go.
        best: loads the best weights into the model at the end; None does not.
        progress: as for `finetune`.
        trackers: called with events; their errors are logged and training continues.
        monitor: looks on.
    """
    builder = make_builder(job, on_event, stack, folder, best, monitor).progress(progress, total=job.steps)
    for tracker in trackers:
        builder.subscribe(tracker)
    try:
        trained = builder.run()
    except TrainInterrupted as stop:
        if stop.trained is not None and stop.trained.whole:
            take(job.model, stop.trained.state_dict())
        raise
    if not trained.whole:
        return None
    if not trained.in_place:
        take(job.model, trained.state_dict())
    return job.model


def make_builder(
    job: Job,
    on_event: Callable[[Any], Any],
    stack: ExitStack,
    folder: Path | None = None,
    best: Best | None = None,
    monitor: Any = None,
) -> TrainerBuilder:
    """Return the run of a planned job, not begun yet; arguments as for `train_job`."""
    options = job.options
    factory = _factory(job, stack)
    if options.optimizer == "adamw":
        optimizer = adamw(
            options.lr, weight_decay=options.weight_decay, betas=(options.beta1, options.beta2), eps=options.eps
        )
    else:
        optimizer = sgd(options.lr, momentum=options.beta1, weight_decay=options.weight_decay)
    groups = partial(parameter_groups, no_decay=NO_DECAY)
    if options.layerwise_decay is not None:  # lower rates towards the input
        groups = partial(
            layerwise_decay, lr=options.lr, decay=options.layerwise_decay, layers="network.encoder.layers",
            lowest=("network.encoder.embeddings",), no_decay=NO_DECAY,
        )  # fmt: skip
    # Watch and Rules are settings of the Trainer.
    hooks = [callback for callback in job.own.callbacks if not isinstance(callback, (Watch, Rules))]
    saving: dict[str, Any] = {}
    if folder is not None:
        is_kept = options.checkpoints is not None or folder.name.endswith(CHECKPOINTS)  # for a resume
        always = options.keep_checkpoints or options.checkpoints is not None
        saving = {
            "folder": str(folder),
            # every evaluation needs a checkpoint to restore the best weights
            "save_every": options.save_every or options.eval_every,
            "keep_last": options.keep_last,
            "keep_best": job.metric if options.keep_best else None,
            "resume": bool(options.resume),
            "allow_change": () if isinstance(options.resume, bool) else tuple(options.resume),
            "save_epochs": "idle",
            "save_end": True if always else UNSAVED_S if is_kept else False,
            "identity": fingerprint_of(job) if is_kept else {},
        }
    return (
        Trainer.builder(factory, optimizer, job.objective)
        .dataset(job.rows, collate=job.collate, batches=job.batches)
        .set(
            **{name: getattr(options, name) for name in SETTINGS},
            num_epochs=options.epochs,
            max_grad_norm=options.max_grad_norm or None,
            sum_of_means=options.compat is not None,
            capture="auto" if job.unrecorded is None else False,
            log_every=LOG_EVERY,
            schedule=job.schedule,
            parameter_groups=groups,
            prepare_model=_arrangement(job),
            callbacks=(
                *hooks,
                *([Profiler(options.profile)] if options.profile else []),
                Notes(job.notes, job.metric),
                *([] if best is None else [best]),
            ),
            ema=None if options.ema is None else Ema(options.ema),
            early_stopping=None if options.early_stopping is None else (job.metric, options.early_stopping),
            devices=options.places,
            monitor=monitor,
            **saving,
            **(observed_of(job) if len(hooks) < len(job.own.callbacks) else {}),
        )
        .eval_fn(job.evaluation)
        .subscribe(on_event)
    )


@dataclass(frozen=True, kw_only=True)
class BestPredictions(Event):
    """The predictions of the best evaluation of a run; ``seen`` is None if they are not collected."""

    is_shown = False

    seen: EvalPredictions | None

    def to_dict(self) -> dict[str, Any]:
        """Return the event without the predictions, which are too large for a record."""
        return {"event": type(self).__name__, "at_s": self.at_s, "rank": self.rank}


class Best(Callback):
    """Keeps the weights of the best evaluation in host memory, and loads them into the model when the run ends.

    Args:
        metric: name of a figure, ``-`` before it where less is better.
        last: the predictions of the last evaluation, if they are collected.
    """

    keeps_best = True

    def __init__(self, metric: str, last: EvalPredictions | None = None) -> None:
        self.metric, self.last = metric, last
        self.row: dict[str, Any] = {}  # of the best evaluation
        self.seen, self._state = last, None

    def on_evaluate(self, trainer: Any, metrics: Mapping[str, Any]) -> None:
        """Keep the weights if they are the best so far."""
        row = {"step": trainer.policy.steps, **metrics}
        self.row = best_row(self.metric, [self.row, row]) or {}
        # Processes that another one started are not needed after the run, except for the first.
        if self.row is row and (trainer.ranks.rank == 0 or trainer.ranks.pipe is None):
            worker = ThreadPoolExecutor(1)
            with trainer.averaged_weights():
                self._state = copy_in_background(trainer.model, worker)
            worker.shutdown(wait=False)  # its thread ends after the copy
            self.seen = None if self.last is None else replace(self.last)

    def on_train_end(self, trainer: Any) -> None:
        """Load the best weights, and emit their predictions."""
        if self._state is not None and self.row["step"] != trainer.policy.steps:
            load_model(trainer.model, self._state.result())
        if trainer.ranks.rank == 0:
            trainer.events.emit(BestPredictions(seen=self.seen))


def best_row(metric: str, rows: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the first row with the best value of a metric; None without one.

    Evaluations before the first step are not considered.
    """
    valued = [row for row in rows if row.get("step") and signed(metric, row) is not None]
    return max(valued, key=lambda row: signed(metric, row) or 0.0, default=None)


def take_best(
    metric: str, folder: Path | None, model: nn.Module, history: list[dict[str, Any]], step: int
) -> tuple[int, dict[str, float]] | None:
    """Load the weights of the best evaluation; return its step and metrics, None without an evaluation.

    A warning reports a better evaluation whose checkpoint is damaged or missing.

    Args:
        metric: name of a figure, ``-`` before it where less is better.
        folder: the folder of checkpoints; None if there is none.
        model: receives the weights.
        history: all evaluations, also those before a resume.
        step: the step of the weights in the model.
    """
    best, fault = best_row(metric, history), ""
    taken = best_row(metric, [row for row in history if row["step"] == step])
    least = -math.inf if taken is None else signed(metric, taken) or 0.0
    for value, saved_at, path in [] if folder is None or (best and taken is best) else ranked(folder, metric):
        if value < least:
            break
        try:
            saved = read_checkpoint(path, weights_only=True)
        except CheckpointError as error:
            fault = fault or error.message
            continue
        if saved_at != step:
            load_model(model, averaged_state(saved.tensors))
        taken = {"step": saved_at, **saved.metrics}
        break
    if best is not None and best_row(metric, [taken or {}, best]) is best and taken is not best:
        name, kept_at = metric.lstrip("-"), step if taken is None else taken["step"]
        warnings.warn(
            f"finetune: the best evaluation was that of step {best['step']} ({name} {abs(best[name]):.6g}), whose "
            f"checkpoint is damaged or was not kept; the model is from step {kept_at}. {fault}".strip(),
            RuntimeWarning,
            stacklevel=3,
        )
    return None if taken is None else (taken["step"], figures_in(taken))


class Notes(Callback):
    """Reports notes about the data and the options when the run begins, and a metric that does not exist.

    Args:
        notes: notes for the user.
        metric: the metric that selects the best model.
    """

    def __init__(self, notes: Sequence[str], metric: str | None) -> None:
        self.notes, self.metric = tuple(notes), (metric or "").removeprefix("-")

    def on_train_begin(self, trainer: Any) -> None:
        """Report them, on the first rank."""
        for note in self.notes if trainer.ranks.rank == 0 else ():
            trainer.warn(note)

    def on_evaluate(self, trainer: Any, metrics: Mapping[str, Any]) -> None:
        """Raise a `TrainError` if the evaluation has no such metric, which functions of the user may define."""
        if self.metric and self.metric not in metrics:
            near = nearest(self.metric, metrics)
            raise TrainError(f"metric: found no {self.metric!r}{near}; expected one of {', '.join(metrics)}")


def _arrangement(job: Job) -> Callable[[Any], Any] | None:
    """Return the change of layers before training: recomputed activations, or fused kernels in half precision."""
    options = job.options
    if options.gradient_checkpointing:
        return checkpoint_layers
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(options.precision)
    reads_layers = isinstance(job.task, DenoisingTask) or getattr(job.objective, "layers", False)
    return None if half is None or options.compile or reads_layers else _Fuse(half)


@dataclass(frozen=True)
class _Fuse:
    """Makes layers use fused kernels of ``dtype``; returns a function that reverts it."""

    dtype: torch.dtype
    needs_float32 = True

    def __call__(self, model: Any) -> Callable[[], None]:
        from flodl_hf.nn.backends.choose import arrange_training

        # A model may have an attached model, such as a generator.
        graphs = [part.graph for part in (model, model.beside) if isinstance(part, GraphModel)]
        each = [arrange_training(graph, self.dtype)[0] for graph in graphs]

        def undo() -> None:
            for one in each:
                one()

        return undo


def trains_here(options: Options) -> bool:
    """Return whether this process trains the model of the job itself.

    Ranks that this process starts open the model again, as do ranks with shards, whose whole model stays in memory.
    """
    started = not isinstance(options.places, str | None)  # here, rather than by a launcher
    return options.ranks == 1 or (not started and not options.shard)


def _factory(job: Job, stack: ExitStack) -> Any:
    """Return what gives each rank its model: the one at hand where ranks are this process."""
    if trains_here(job.options):
        _ready(job, job.model, stack)
        return lambda device: job.model
    if job.factory is not None:
        return job.factory
    # A model cannot be sent to other processes, its folder can.
    room = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flodl-hf-")))
    opening: dict[str, Any] = {"attention": job.options.attention}
    if job.options.shard and job.options.ranks > 1:
        opening["mapped"] = True  # pages that ranks share
    if job.model.active_adapter is not None:
        opening["adapter"] = job.model.save_adapter(room / "adapter")
    with job.model.disable_adapter() as base:
        base.save_pretrained(room / "model")
    return ModelFactory(
        room / "model", job.task.head, None, None, job.options.freeze, job.options.dropout, opening,
        start=job.task.start,
    )  # fmt: skip


def _ready(job: Job, model: EncoderModel, stack: ExitStack) -> None:
    """Freeze and set dropout, and have both put back when the training is over."""
    learned = [p for p in model.parameters() if p.requires_grad]
    freeze(model, job.options.freeze)
    stack.callback(lambda: [p.requires_grad_(True) for p in learned])
    if job.options.gradient_checkpointing:
        stack.callback(restore_layers, model)
    if job.options.dropout is not None:
        before = set_dropout(model, job.options.dropout)
        stack.callback(lambda: [setattr(module, name, value) for module, name, value in before])


@contextmanager
def settings_of_torch() -> Iterator[None]:
    """Restore torch's global settings at the end."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    products = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        now = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        if now != (deterministic, warn_only):  # the call imports torch's compiler
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.set_float32_matmul_precision(products)

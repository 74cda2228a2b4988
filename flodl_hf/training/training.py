"""A planned job as a run of `flodl.train`: optimiser, parameter groups, settings, and changes of the model.

The exit stack of the caller undoes temporary changes after the training.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flodl.errors import ConfigError, TrainInterrupted
from flodl.train import Callback, Ema, Profiler, Trainer, adamw, layerwise_decay, parameter_groups, sgd
from flodl_hf.inference.graph_model.model import GraphModel
from flodl_hf.training.factory import FixedModel, ModelFactory, checkpoint_layers, restore_layers, set_dropout, take
from flodl_hf.training.fingerprint import fingerprint_of
from flodl_hf.training.job import Job
from flodl_hf.training.observation import observed_of
from flodl_hf.training.start import ATTACHING_TASKS
from flodl_hf.training.vectors.tsdae import DenoisingTask

if TYPE_CHECKING:
    from flodl.train.builder import TrainerBuilder
    from flodl_hf.models.encoder_model import EncoderModel

__all__ = ["CHECKPOINTS", "make_builder", "settings_of_torch", "train_job"]

CHECKPOINTS = ".checkpoints"  # after the name of the folder that a run writes
LOG_EVERY = 20
"""Steps between reads of metrics from a CUDA device."""
NO_DECAY = ("*bias", "*norm.weight", "*norm*.weight")


UNSAVED_S = 30.0
"""Seconds of work that a run may lose if its model cannot be written; longer runs save a checkpoint first."""


@dataclass(frozen=True)
class _Groups:
    """Parameter groups: no decay on biases and norms, and lower rates towards the input if requested."""

    lr: float
    layerwise: float | None

    def __call__(self, model: Any) -> list[dict[str, Any]]:
        if self.layerwise is None:
            return parameter_groups(model, no_decay=NO_DECAY)
        return layerwise_decay(
            model, self.lr, self.layerwise, layers="network.encoder.layers", lowest=("network.encoder.embeddings",),
            no_decay=NO_DECAY,
        )  # fmt: skip


def train_job(
    job: Job,
    on_event: Callable[[Any], Any],
    stack: ExitStack,
    folder: Path | None = None,
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
        progress: as for `finetune`.
        trackers: called with events; their errors are logged and training continues.
        monitor: looks on.
    """
    builder = make_builder(job, on_event, stack, folder).progress(progress, total=job.steps).set(monitor=monitor)
    for tracker in trackers:
        builder.subscribe(tracker)
    try:
        trained = builder.run()
    except TrainInterrupted as stop:
        if stop.trained is not None and stop.trained.whole:
            take(job.model, stop.trained.state_dict())
        raise
    if trained.in_place:
        model: Any = trained.model
        return model
    if not trained.whole:
        return None
    take(job.model, trained.state_dict())
    return job.model


def make_builder(
    job: Job, on_event: Callable[[Any], Any], stack: ExitStack, folder: Path | None = None
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
            sum_of_means=options.compat is not None,
            deterministic=options.deterministic,
            capture="auto" if job.unrecorded is None else False,
            compile=options.compile,
            log_every=LOG_EVERY,
            schedule=job.schedule,
            parameter_groups=_Groups(options.lr, options.layerwise_decay),
            prepare_model=_arrangement(job),
            callbacks=(*job.own.hooks, *([Profiler(options.profile)] if options.profile else []), Notes(job.notes)),
            ema=None if options.ema is None else Ema(options.ema),
            **observed_of(job),
        )
        .subscribe(on_event)
    )
    if job.evaluation is not None:
        builder.eval_fn(job.evaluation).set(eval_every=options.eval_every)
    if options.early_stopping is not None:
        builder.set(early_stopping=(job.metric, options.early_stopping))
    if folder is not None:
        builder.checkpoints(
            str(folder),
            # every evaluation needs a checkpoint to restore the best weights
            every=options.save_every or options.eval_every,
            keep_last=options.keep_last,
            keep_best=job.metric if options.keep_best else None,
            resume=bool(options.resume),
            allow_change=() if isinstance(options.resume, bool) else options.resume,
        ).set(
            save_epochs="idle",
            save_end=_saved_at_end(job, folder),
            identity=fingerprint_of(job) if _is_kept(job, folder) else {},
        )
    if options.places is not None:
        builder.devices(options.places)
    if options.policy is not None:
        builder.policy(options.policy)
    if options.shard is not None and job.task.kind == "vectors":
        raise ConfigError(
            "shard='fsdp': vectors are compared over whole batches, which ranks with shards do not pass together; "
            "expected another task, or no shard",
            problems=["shard"],
        )
    if options.shard is not None:
        builder.set(shard=options.shard)
    return builder


def _saved_at_end(job: Job, folder: Path) -> bool | float:
    """Return whether the trainer saves the end of a run, or after how many seconds of work."""
    if job.options.keep_checkpoints or job.options.checkpoints is not None:
        return True
    return UNSAVED_S if _is_kept(job, folder) else False


def _is_kept(job: Job, folder: Path) -> bool:
    """Return whether a run can be resumed from ``folder``."""
    return job.options.checkpoints is not None or folder.name.endswith(CHECKPOINTS)


class Notes(Callback):
    """Reports notes about the data and the options as warnings when the run begins."""

    def __init__(self, notes: Sequence[str]) -> None:
        self.notes = tuple(notes)

    def on_train_begin(self, trainer: Any) -> None:
        """Report them, on the first rank."""
        for note in self.notes if trainer.ranks.rank == 0 else ():
            trainer.warn(note)


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


def _factory(job: Job, stack: ExitStack) -> Any:
    """Return what gives each rank its model: the one at hand where ranks are this process."""
    # Sharding splits the model, so it is opened again and the model in memory stays whole.
    several = job.options.ranks > 1
    others = several and not isinstance(job.options.places, str | None)  # started here, rather than by a launcher
    if not others and not (job.options.shard and several):
        job_model = job.model
        _ready(job, job_model, stack)
        return FixedModel(job_model)
    if isinstance(job.factory, ModelFactory):
        return job.factory
    shown = {"mapped": True} if job.options.shard and several else {}  # pages that ranks share
    # A model cannot be sent to other processes, its folder can.
    room = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flodl-hf-")))
    opening: dict[str, Any] = {**shown, "attention": job.options.attention}
    if job.model.active_adapter is not None:
        opening["adapter"] = job.model.save_adapter(room / "adapter")
    with job.model.disable_adapter() as base:
        base.save_pretrained(room / "model")
    start = job.task.start if isinstance(job.task, ATTACHING_TASKS) else None
    return ModelFactory(
        room / "model", job.task.head, None, None, job.options.freeze, job.options.dropout, opening, start=start
    )


def _ready(job: Job, model: EncoderModel, stack: ExitStack) -> None:
    """Freeze and set dropout, and have both put back when the training is over."""
    factory = ModelFactory("", "", None, None, job.options.freeze, None, {})
    learned = [p for p in model.parameters() if p.requires_grad]
    factory.ready(model)
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
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.set_float32_matmul_precision(products)

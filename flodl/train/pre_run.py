"""A dry run: some steps of a copy of the model, with the heaviest batch first, to measure the requirements of a run."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from flodl.progress import clock
from flodl.train.callback import Callback
from flodl.train.fitting import fit_micro_batch, heaviest_turn, try_turn
from flodl.train.plan import RunPlan
from flodl.train.settings import Settings

if TYPE_CHECKING:
    from flodl.train.trainer_parts import TrainerParts


ALONE: dict[str, Any] = {
    "folder": None, "resume": False, "save_every": None, "keep_best": None, "early_stopping": None, "eval_every": None,
    "eval_start": False, "max_restarts": 0, "timeline": None, "devices": None,
}  # fmt: skip
"""Settings of a run that writes nothing."""


def _first(settings: Settings) -> str | None:
    """Return the first device of a run; None for the usual one."""
    names = settings.device_names
    return None if isinstance(names, int) else names[0]


@dataclass
class Copied:
    """A model factory that returns copies, so that a model of the user does not change."""

    factory: Callable[[torch.device], Any]

    def __call__(self, device: torch.device) -> Any:
        """Return the copy."""
        return copy.deepcopy(self.factory(device))


@dataclass(frozen=True)
class Rehearsal:
    """Requirements of a run.

    Attributes:
        device: device of the dry run.
        parameters: number of parameters.
        learned: number of trainable parameters.
        steps: optimiser steps of the whole run, estimated from the first epoch.
        rows_at_once: rows of the heaviest micro-batch.
        fits: whether forward and backward of the heaviest batch fit into memory.
        step_seconds: mean time of a step without the first one.
        seconds: time of all steps, without evaluation.
        peak_bytes: maximum of allocated device memory; None on a CPU.
    """

    device: str
    parameters: int
    learned: int
    steps: int
    rows_at_once: int
    fits: bool
    step_seconds: float
    seconds: float
    peak_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        memory = "" if self.peak_bytes is None else f", {self.peak_bytes / 1e9:.2f} GB"
        fits = "fits" if self.fits else "does NOT fit into memory"
        return (
            f"{self.parameters:,} parameters, {self.learned:,} of them trainable, on {self.device}\n"
            f"the heaviest batch, {self.rows_at_once} rows, {fits}{memory}\n"
            f"{self.steps:,} steps of {self.step_seconds:.3g} s: {clock(self.seconds)}"
        )


class _Watch(Callback):
    """Runs the heaviest batch before the first step, and times the steps."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_begin(self, trainer: TrainerParts) -> None:
        # One batch of each evaluation set shows that evaluation works; whole sets take too long.
        self.evals, trainer.callbacks.evals = trainer.callbacks.evals, {}
        device, model = trainer.ranks.device, trainer.model
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        if trainer.settings.micro_batch_size == "auto":
            fit_micro_batch(trainer)
        self.rows, self.fits = try_turn(trainer, heaviest_turn(trainer))
        self.device = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        self.parameters = sum(p.numel() for p in model.parameters())
        self.learned = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert trainer.feed is not None
        self.steps_per_epoch = trainer.feed.turns(0)
        if not self.fits:
            trainer.stopping = True

    def on_step_begin(self, trainer: TrainerParts, batches: Any) -> None:
        self._wait(trainer)
        self._began = time.perf_counter()

    def on_step_end(self, trainer: TrainerParts, result: Any) -> None:
        self._wait(trainer)
        self.times.append(time.perf_counter() - self._began)

    def on_train_end(self, trainer: TrainerParts) -> None:
        for judge, feed in self.evals.values() if self.fits else ():
            trainer.model.eval()
            with torch.no_grad():
                for _, batches in feed.work(0, [0], None):
                    judge(trainer.model, batches[0])
        cuda = trainer.ranks.device.type == "cuda"
        self.peak = torch.cuda.max_memory_allocated(trainer.ranks.device) if cuda else None

    @staticmethod
    def _wait(trainer: TrainerParts) -> None:
        if trainer.ranks.device.type == "cuda":
            torch.cuda.synchronize(trainer.ranks.device)


def rehearse(plan: RunPlan, run: Callable[[RunPlan], Any], *, steps: int = 3) -> Rehearsal:
    """Return the requirements of the run of ``plan``; its model and its folder do not change.

    Raises:
        Exception: any error of the run in its first steps.
    """
    watch, given = _Watch(), plan.settings
    own = {**ALONE, "devices": _first(given), "max_steps": steps, "capture": False}
    settings = replace(given, **own, callbacks=(*given.callbacks, watch))
    data_options = {**plan.data_options, "max_steps": given.max_steps}  # the length of data without one
    copied = Copied(plan.model_factory)
    trial = replace(plan, model_factory=copied, settings=settings, data_options=data_options)
    run(replace(trial, functions=(), metrics_fn=None, eval_fn=None, subscribers=()))
    pace = watch.times[1:] or watch.times
    each = sum(pace) / len(pace) if pace else 0.0
    whole = watch.steps_per_epoch * given.num_epochs
    whole = whole if given.max_steps is None else min(whole, given.max_steps)
    return Rehearsal(
        watch.device, watch.parameters, watch.learned, whole, watch.rows, watch.fits, each, each * whole, watch.peak
    )

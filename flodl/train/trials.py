"""Trials before a run: a dry run and a search for a learning rate on a copy, and the rows that fit into memory.

The search takes some steps at rising rates (arXiv:1506.01186).

Micro-batches change memory only, so the result of the run does not depend on the size that is found.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from flodl.errors import ConfigError, TrainError
from flodl.progress import clock
from flodl.train.callback import Callback
from flodl.train.events import StepDone
from flodl.train.feed import RowFeed, Share
from flodl.train.loss import as_loss, batch_len
from flodl.train.plan import RunPlan
from flodl.train.saving.state import random_kept

# Settings of a run that writes nothing.
ALONE: dict[str, Any] = {
    "folder": None, "resume": False, "save_every": None, "keep_best": None, "early_stopping": None, "eval_every": None,
    "timeline": None, "monitor": None,
}  # fmt: skip


def trial_of(plan: RunPlan, callback: Callback, **settings: Any) -> RunPlan:
    """Return the plan of a run on a copy of the model and one device, which writes nothing."""
    plan.check(1)
    given = plan.settings
    settings = {**ALONE, "devices": given.device_names[0], **settings, "callbacks": (*given.callbacks, callback)}
    own: Any = {"functions": (), "metrics_fn": None, "eval_fn": None, "subscribers": ()}
    own["model_factory"] = lambda device: copy.deepcopy(plan.model_factory(device))
    return replace(plan, settings=replace(given, **settings), **own)


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

    def on_train_begin(self, trainer: Any) -> None:
        # One batch of each evaluation set shows that evaluation works; whole sets take too long.
        trainer.evaluator.evaluates = False
        device, model = trainer.ranks.device, trainer.model
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        if trainer.settings.micro_batch_size == "auto":
            fit_micro_batch(trainer)
        self.rows, self.fits = try_turn(trainer, heaviest_turn(trainer))
        self.device = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        self.parameters = sum(p.numel() for p in model.parameters())
        self.learned = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.steps_per_epoch = trainer.feed.turns(0)
        if not self.fits:
            trainer.stopping = True

    def on_step_begin(self, trainer: Any, batches: Any) -> None:
        self._wait(trainer)
        self._began = time.perf_counter()

    def on_step_end(self, trainer: Any, result: Any) -> None:
        self._wait(trainer)
        self.times.append(time.perf_counter() - self._began)

    def on_train_end(self, trainer: Any) -> None:
        for judge, feed in trainer.evaluator.evals.values() if self.fits else ():
            trainer.model.eval()
            with torch.no_grad():
                for _, batches in feed.work(0, [0], None):
                    judge(trainer.model, batches[0])
        cuda = trainer.ranks.device.type == "cuda"
        self.peak = torch.cuda.max_memory_allocated(trainer.ranks.device) if cuda else None

    @staticmethod
    def _wait(trainer: Any) -> None:
        if trainer.ranks.device.type == "cuda":
            torch.cuda.synchronize(trainer.ranks.device)


def rehearse(plan: RunPlan, run: Callable[[RunPlan], Any], *, steps: int) -> Rehearsal:
    """Return the requirements of the run of ``plan``; its model and its folder do not change.

    Raises:
        Exception: any error of the run in its first steps.
    """
    watch, given = _Watch(), plan.settings
    trial = trial_of(plan, watch, max_steps=steps, capture=False)
    # The estimate needs the length of data without one.
    run(replace(trial, data_options={**plan.data_options, "max_steps": given.max_steps}))
    pace = watch.times[1:] or watch.times
    each = sum(pace) / len(pace) if pace else 0.0
    whole = watch.steps_per_epoch * given.num_epochs
    whole = whole if given.max_steps is None else min(whole, given.max_steps)
    return Rehearsal(
        watch.device, watch.parameters, watch.learned, whole, watch.rows, watch.fits, each, each * whole, watch.peak
    )


def heaviest_turn(trainer: Any) -> int:
    """Return the step of this epoch with the most padded tokens; the first one if lengths are unknown."""
    feed = trainer.feed
    if not isinstance(feed, RowFeed):
        return 0
    plan = feed.loader.plan(trainer.epoch_number)
    sources = (getattr(part, "lengths", ()) for part in (feed.loader.batches, feed.loader.data))
    known = (part for part in sources if hasattr(part, "__len__") and len(part) == feed.loader.num_rows)
    lengths = np.asarray(next(known, np.ones(feed.loader.num_rows)))
    weights = [len(plan[i]) * int(lengths[plan[i]].max()) for i in range(len(plan))]
    return max(range(len(weights)), key=weights.__getitem__) // feed.accumulate if weights else 0


def fit_micro_batch(trainer: Any) -> int | None:
    """Divide batches into micro-batches that fit; return their number of rows, None if whole batches fit.

    All ranks find the same number. Random states, buffers and gradients are restored.

    Raises:
        TrainError: a single row does not fit.
    """
    feed: Any = trainer.feed
    turn, size = heaviest_turn(trainer), None
    while True:
        feed.micro_batch_size = size
        data = getattr(getattr(feed, "loader", None), "data", None)
        cut: Any = getattr(getattr(data, "collate", None), "cut_to", None)
        if cut is not None:  # a collate function that depends on the size
            data.collate = cut(size)  # type: ignore[union-attr]
        rows, fits = try_turn(trainer, turn)
        table = trainer.ranks.table([float(rows), float(fits)])
        if all(row[1] for row in table):
            break
        if trainer.ranks.device.type == "cuda":
            torch.cuda.empty_cache()
        most = int(max(row[0] for row in table))
        if most <= trainer.min_rows:
            raise TrainError(
                f"micro_batch_size: {most} row(s) of the heaviest batch exceed the memory of {trainer.ranks.device}.",
                rows=most,
            )
        size = max(trainer.min_rows, most // 2)
    if size is not None:
        trainer.warn(f"micro_batch_size: {size} rows, because twice as many exceed the memory")
    return size


def try_turn(trainer: Any, turn: int) -> tuple[int, bool]:
    """Run forward and backward of a step without an update; return rows of its largest micro-batch, and if it fits."""
    model, step, device = trainer.model, trainer.step_, trainer.ranks.device
    largest, fits = 0, True
    with ExitStack() as stack:
        stack.enter_context(random_kept(device))
        for buffer in model.buffers():
            stack.callback(buffer.copy_, buffer.clone())
        stack.callback(model.zero_grad, set_to_none=True)
        several = step.share_gradients
        ratios = (1.0,) * trainer.ranks.world if several else (1.0,)
        share = Share(trainer.ranks.rank if several else 0, ratios, trainer.min_rows)
        try:
            held: list[torch.Tensor] = []
            if device.type == "cuda" and not trainer.optimizer.state:  # the first step allocates this memory
                num_copies = 1 if isinstance(trainer.optimizer, torch.optim.SGD) else 2
                held = [torch.empty_like(p) for p in model.parameters() if p.requires_grad for _ in range(num_copies)]
            for _, batches in trainer.feed.work(trainer.epoch_number, [turn], share):
                for batch in batches:
                    largest = max(largest, batch_len(batch))
                    with step.precision.context():
                        loss = as_loss(trainer.plan.train_step(model, batch), batch_len(batch))
                    loss.as_mean().backward()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            del held
        except torch.OutOfMemoryError:
            fits = False
    return largest, fits


SMOOTH = 0.9
DIVERGED = 4.0


@dataclass(frozen=True)
class RateSearch:
    """Result of a search.

    Attributes:
        rates: learning rates of the steps, rising.
        losses: mean loss of each step.
        smoothed: running mean of the losses.
        suggestion: the rate at which the smoothed loss fell fastest; None if it never fell.
    """

    rates: list[float] = field(repr=False)
    losses: list[float] = field(repr=False)
    smoothed: list[float] = field(repr=False)
    suggestion: float | None

    @classmethod
    def of(cls, rates: list[float], losses: list[float]) -> RateSearch:
        """Return the result of these steps."""
        smoothed, mean = [], 0.0
        for number, loss in enumerate(losses, start=1):
            mean = SMOOTH * mean + (1 - SMOOTH) * loss
            smoothed.append(mean / (1 - SMOOTH**number))
        # The first means contain few losses; after the lowest point the loss diverges.
        count = len(smoothed)
        wide = max(1, count // 20)
        last = min(range(count), key=smoothed.__getitem__, default=0)
        falls = {i: smoothed[i + wide] - smoothed[i - wide] for i in range(max(wide, count // 10), last - wide + 1)}
        steepest = min(falls, key=falls.__getitem__, default=None)
        found = rates[steepest] if steepest is not None and falls[steepest] < 0 else None
        return cls(rates, losses, smoothed, found)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


class _Stops(Callback):
    """Collects losses, and stops the run when they are far above the lowest."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.losses: list[float] = []

    def on_train_begin(self, trainer: Any) -> None:
        self.trainer = trainer
        trainer.events.subscribe(self.note, StepDone)

    def note(self, event: StepDone) -> None:
        if not math.isfinite(event.loss):
            self.trainer.stop()
            return
        self.rates.append(event.lr)
        self.losses.append(event.loss)
        if event.loss > DIVERGED * min(self.losses):
            self.trainer.stop()


def search_rates(plan: RunPlan, run: Callable[[RunPlan], Any], *, low: float, high: float, steps: int) -> RateSearch:
    """Return the result of a search over the run of ``plan``; its model and its folder do not change.

    Raises:
        ConfigError: rates that do not rise, or fewer than 8 steps.
        TrainError: the loss was never finite.
    """
    if not 0 < low < high or steps < 8:
        found = f"{low!r} to {high!r} in {steps} steps"
        raise ConfigError(
            f"find_lr: found {found}; expected rates above 0 that rise, and 8 steps or more",
            problems=["low", "high", "steps"],
        )
    watch = _Stops()
    factor = (high / low) ** (1 / (steps - 1))
    rising = SimpleNamespace(lr=lambda step: low * factor**step)  # absolute rates, whatever the optimiser has
    length = {"num_epochs": 1_000_000, "max_steps": steps, "log_every": 1}
    trial = trial_of(plan, watch, schedule=rising, lr_scale_ratio=0.0, on_nan="skip", ema=None, **length)
    run(replace(trial, evals={}))
    if not watch.losses:
        raise TrainError(
            f"find_lr: the loss is not finite at a learning rate of {low:g}; look at the data and the model."
        )
    return RateSearch.of(watch.rates, watch.losses)

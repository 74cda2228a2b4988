"""A learning-rate finder: some steps at rising rates, on a copy of the model (arXiv:1506.01186)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from flodl.errors import ConfigError, TrainError
from flodl.train.callback import Callback
from flodl.train.events import StepDone
from flodl.train.plan import RunPlan
from flodl.train.trials import trial_of

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
        return {**vars(self)}


class _Rising:
    """Absolute rates, whatever the optimiser has."""

    def __init__(self, low: float, factor: float) -> None:
        self.low, self.factor = low, factor

    def lr(self, step: int) -> float:
        return self.low * self.factor**step


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


def search_rates(
    plan: RunPlan, run: Callable[[RunPlan], Any], *, low: float = 1e-7, high: float = 1.0, steps: int = 100
) -> RateSearch:
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
    rising = _Rising(low, (high / low) ** (1 / (steps - 1)))
    length = {"num_epochs": 1_000_000, "max_steps": steps, "log_every": 1}
    trial = trial_of(plan, watch, schedule=rising, lr_scale_ratio=0.0, on_nan="skip", ema=None, **length)
    run(replace(trial, evals={}))
    if not watch.losses:
        raise TrainError(
            f"find_lr: the loss is not finite at a learning rate of {low:g}; look at the data and the model."
        )
    return RateSearch.of(watch.rates, watch.losses)

"""Learning rates over the steps of a run: the curves that recipes for Hugging Face models name.

The formulas are those of transformers' schedules, in the same order of operations, so that a recipe moved here
keeps its rates to the bit. Other shapes come from `flodl.train.schedule`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from flodl.train.schedule import OneCycle, Plateau

__all__ = ["WarmedUp", "make_schedule", "warmup_steps"]


@dataclass(frozen=True)
class WarmedUp:
    """Rises from 0 to ``base`` over ``warmup`` steps, then follows ``shape`` until step ``total``.

    Args:
        shape: ``"linear"`` (to 0), ``"cosine"`` (half a wave to 0) or ``"constant"``.
        base: the highest rate.
        warmup: steps of the rise; step 0 has rate 0 if there are any.
        total: steps of the run.
    """

    shape: str
    base: float
    warmup: int
    total: int

    def lr(self, step: int) -> float:
        """Return the rate of a step, counted from 0."""
        return self.base * self.factor(step)

    def factor(self, step: int) -> float:
        """Return the rate as a share of ``base``."""
        if step < self.warmup:
            return float(step) / float(max(1, self.warmup))
        if self.shape == "constant":
            return 1.0
        rest = float(max(1, self.total - self.warmup))
        if self.shape == "linear":
            return max(0.0, float(self.total - step) / rest)
        progress = float(step - self.warmup) / rest
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * 0.5 * 2.0 * progress)))


def warmup_steps(warmup: float, total: int) -> int:
    """Return the steps of the rise: a share of all steps below 1, else a number of steps."""
    return math.ceil(total * warmup) if warmup < 1 else int(warmup)


def make_schedule(kind: Any, base: float, warmup: float, total: int, *, lower_is_better: bool) -> Any:
    """Return the schedule of a run of ``total`` steps; an object with ``lr(step)`` is returned as it is."""
    if not isinstance(kind, str):
        return kind
    if kind == "one_cycle":
        return OneCycle(base, total, warmup_fraction=warmup_steps(warmup, total) / total if warmup else 0.3)
    if kind == "plateau":
        return Plateau(base, patience=1, mode="min" if lower_is_better else "max")
    return WarmedUp(kind, base, warmup_steps(warmup, total), total)

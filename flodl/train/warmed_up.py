"""Schedules that rise from 0 and then follow a curve, by the formulas of common recipes for fine-tuning.

The order of operations is part of each formula, so that a recipe of another library keeps its rates to the bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flodl.checked_fields import check_fields, choice, number
from flodl.errors import ConfigError
from flodl.train.schedule import RATE, SHARE, SOME_STEPS, STEPS, Schedule

__all__ = ["CosineFloor", "CosineRestarts", "InverseSqrt", "Polynomial", "WarmedUp", "WarmupStableDecay"]

CURVE = choice("linear", "cosine", "1-sqrt")


class _Curve(Schedule):
    """A schedule with the rate ``base`` times a factor, which rises from 0 over ``warmup`` steps."""

    base: float
    warmup: int
    total: int

    def lr(self, step: int) -> float:
        """Return the learning rate of ``step``."""
        return self.base * self(step)

    def __call__(self, step: int) -> float:
        """Return the rate of ``step`` as a share of ``base``."""
        return float(step) / float(max(1, self.warmup)) if step < self.warmup else self.after(step)

    def after(self, step: int) -> float:
        """Return the rate of ``step``, after the rise, as a share of ``base``."""
        raise NotImplementedError

    def progress(self, step: int) -> float:
        """Return the share of the steps after the rise that are done."""
        return float(step - self.warmup) / float(max(1, self.total - self.warmup))


@dataclass(frozen=True)
class _Recipe(_Curve, base=RATE, total=SOME_STEPS, warmup=STEPS):
    base: float
    total: int
    warmup: int = 0


@dataclass(frozen=True)
class CosineFloor(_Recipe, floor=SHARE, cycles=number()):
    """A straight rise from 0, then waves of a cosine that go no lower than ``floor`` times ``base``.

    Attributes:
        base: the highest rate.
        total: steps of the run.
        warmup: steps of the rise.
        floor: lowest rate as a share of ``base``.
        cycles: waves; a half goes down once.
    """

    floor: float = 0.0
    cycles: float = 0.5

    def after(self, step: int) -> float:
        """Return the rate after the rise as a share of ``base``."""
        factor = 0.5 * (1.0 + math.cos(math.pi * float(self.cycles) * 2.0 * self.progress(step)))
        return max(0.0, factor * (1 - self.floor) + self.floor)


@dataclass(frozen=True)
class CosineRestarts(_Recipe, cycles=number(above=0)):
    """A straight rise from 0, then half a cosine from ``base`` to 0, again and again (arXiv:1608.03983).

    Attributes:
        base: the highest rate.
        total: steps of the run; 0 from there on.
        warmup: steps of the rise.
        cycles: how often the half wave comes.
    """

    cycles: float = 1

    def after(self, step: int) -> float:
        """Return the rate after the rise as a share of ``base``."""
        progress = self.progress(step)
        if progress >= 1.0:
            return 0.0
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((float(self.cycles) * progress) % 1.0))))


@dataclass(frozen=True)
class Polynomial(_Recipe, power=number(above=0)):
    """A straight rise from 0, then a fall to ``end`` by a power of the remaining share of steps.

    Attributes:
        base: the highest rate.
        total: steps of the run; ``end`` afterwards.
        warmup: steps of the rise.
        end: the last rate, below ``base``.
        power: the power; 1 is a straight line.
    """

    end: float = 1e-7
    power: float = 1.0

    def __post_init__(self) -> None:
        """Check the arguments."""
        super().__post_init__()
        check_fields(self, {"end": number(below=self.base)}, "Polynomial", ConfigError)

    def after(self, step: int) -> float:
        """Return the rate after the rise as a share of ``base``."""
        if step > self.total or self.total <= self.warmup:
            return self.end / self.base
        remaining = 1 - (step - self.warmup) / (self.total - self.warmup)
        return ((self.base - self.end) * remaining**self.power + self.end) / self.base


@dataclass(frozen=True)
class InverseSqrt(_Curve, base=RATE, warmup=STEPS, timescale=SOME_STEPS | None):
    """A straight rise from 0, then a rate that falls with the root of the step, without an end.

    Attributes:
        base: the highest rate.
        warmup: steps of the rise.
        timescale: steps after which the rate is ``base / sqrt(2)`` if there is no rise; None for ``warmup``, or 10,000
            if that is 0.
    """

    base: float
    warmup: int = 0
    timescale: int | None = None

    def after(self, step: int) -> float:
        """Return the rate after the rise as a share of ``base``."""
        timescale = self.timescale if self.timescale is not None else self.warmup or 10_000
        return 1.0 / math.sqrt((step + (timescale - self.warmup)) / timescale)


@dataclass(frozen=True)
class WarmupStableDecay(
    _Curve, base=RATE, warmup=STEPS, stable=STEPS, decay=STEPS, rise=CURVE, fall=CURVE, floor=SHARE
):
    """A rise, a stretch at ``base``, and a fall: how long a run lasts may be decided when it falls.

    Attributes:
        base: the highest rate.
        warmup: steps of the rise.
        stable: steps at ``base``.
        decay: steps of the fall; the floor afterwards.
        rise: ``"linear"``, ``"cosine"`` or ``"1-sqrt"``.
        fall: one of the same.
        floor: first and last rate as a share of ``base``.
        cycles: waves of a fall by the cosine; a half goes down once.
    """

    base: float
    warmup: int
    stable: int
    decay: int
    rise: str = "linear"
    fall: str = "cosine"
    floor: float = 0.0
    cycles: float = 0.5

    def __call__(self, step: int) -> float:
        """Return the rate of ``step`` as a share of ``base``."""
        if step < self.warmup:
            progress = float(step) / float(self.warmup)
            if self.rise == "linear":
                factor = progress
            elif self.rise == "cosine":
                factor = 0.5 * (1.0 - math.cos(math.pi * progress))
            else:
                factor = 1.0 - math.sqrt(1.0 - progress)
        elif step < self.warmup + self.stable:
            return 1.0
        elif step < self.warmup + self.stable + self.decay:
            progress = float(step - self.warmup - self.stable) / float(max(1, self.decay))
            if self.fall == "linear":
                factor = 1.0 - progress
            elif self.fall == "cosine":
                factor = 0.5 * (1.0 + math.cos(math.pi * float(self.cycles) * 2.0 * progress))
            else:
                factor = 1.0 - math.sqrt(progress)
        else:
            return self.floor
        return max(0.0, factor * (1.0 - self.floor) + self.floor)


@dataclass(frozen=True)
class WarmedUp(_Curve, base=RATE, warmup=STEPS, total=STEPS):
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

    def after(self, step: int) -> float:
        """Return the rate after the rise as a share of ``base``."""
        if self.shape == "constant":
            return 1.0
        if self.shape == "linear":
            return max(0.0, float(self.total - step) / float(max(1, self.total - self.warmup)))
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * self.progress(step))))

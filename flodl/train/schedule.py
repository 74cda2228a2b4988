"""Learning rates as functions of the step.

A schedule knows no optimiser: ``lr(step)`` is a number, so schedules nest, are compared, pickled and
resumed by nothing more than the step they are asked for. Who sets the number on an optimiser, and
whether a step is a batch or an epoch, is the caller's matter. `Plateau` alone has a memory, because it
answers to a metric. Curves as recipes for fine-tuning name them are in `flodl.train.warmed_up`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from flodl.checked_fields import Values, check_fields, choice, number, of_kind, share, whole
from flodl.errors import ConfigError

__all__ = [
    "Constant",
    "Cosine",
    "Cyclic",
    "Exponential",
    "Linear",
    "MultiStep",
    "OneCycle",
    "Plateau",
    "Schedule",
    "StepDecay",
    "Warmup",
    "check_arguments",
]


@runtime_checkable
class Schedule(Protocol):
    """Anything that knows the learning rate of a step."""

    def lr(self, step: int) -> float:
        """Return the learning rate of ``step``, the first being 0."""
        ...


def check_arguments(schedule: object, **values: Values) -> None:
    """Check the arguments of a schedule.

    Args:
        schedule: its attributes are the arguments.
        **values: what each argument may be.

    Raises:
        ConfigError: ``problems`` lists each argument with what was found and what was expected.
    """
    check_fields(schedule, values, type(schedule).__name__, ConfigError)


RATE, SHARE = number(least=0), share()
STEPS, SOME_STEPS = number(least=0), number(least=1)


def _is_rising(steps: tuple[Any, ...]) -> bool:
    return all(map(STEPS.fits, steps)) and list(steps) == sorted(set(steps))


@dataclass(frozen=True)
class Constant:
    """The same rate always.

    Attributes:
        base: the rate.
    """

    base: float

    def __post_init__(self) -> None:
        check_arguments(self, base=RATE)

    def lr(self, step: int) -> float:
        """Return the learning rate of ``step``."""
        return self.base


@dataclass(frozen=True)
class Linear:
    """A straight line from ``start`` to ``end``, constant afterwards.

    Attributes:
        start: rate of step 0.
        end: rate from step ``total`` on.
        total: steps of the line.
    """

    start: float
    end: float
    total: int

    def __post_init__(self) -> None:
        check_arguments(self, start=RATE, end=RATE, total=SOME_STEPS)

    def lr(self, step: int) -> float:
        """Return the learning rate of ``step``."""
        return self.end if step >= self.total else self.start + (self.end - self.start) * step / self.total


@dataclass(frozen=True)
class StepDecay:
    """``base`` times ``gamma`` to the number of full ``size`` steps.

    Attributes:
        base: rate of the first stretch.
        size: steps of a stretch.
        gamma: factor from one stretch to the next.
    """

    base: float
    size: int
    gamma: float = 0.1

    def __post_init__(self) -> None:
        check_arguments(self, base=RATE, size=SOME_STEPS, gamma=number())

    def lr(self, step: int) -> float:
        """Return the learning rate of ``step``."""
        return self.base * self.gamma ** (step // self.size)


@dataclass(frozen=True)
class MultiStep:
    """``base`` times ``gamma`` for each milestone passed.

    Attributes:
        base: rate before the first milestone.
        milestones: steps at which the factor applies, rising.
        gamma: the factor.
    """

    base: float
    milestones: tuple[int, ...]
    gamma: float = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "milestones", tuple(self.milestones))
        rising = of_kind("rising numbers of steps", _is_rising)
        check_arguments(self, base=RATE, milestones=rising, gamma=number())

    def lr(self, step: int) -> float:
        """Return the learning rate of ``step``."""
        return self.base * self.gamma ** bisect_right(self.milestones, step)


@dataclass(frozen=True)
class Exponential:
    """``base`` times ``gamma`` to the step.

    Attributes:
        base: rate of step 0.
        gamma: factor from one step to the next.
    """

    base: float
    gamma: float

    def __post_init__(self) -> None:
        check_arguments(self, base=RATE, gamma=number())

    def lr(self, step: int) -> float:
        """Return the learning rate of ``step``."""
        return self.base * self.gamma**step


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from ``base`` to ``floor``, then constant (arXiv:1608.03983 without restarts).

    Attributes:
        base: rate of step 0.
        floor: rate from step ``total`` on.
        total: steps of the half wave.
    """

    base: float
    floor: float
    total: int

    def __post_init__(self) -> None:
        check_arguments(self, base=RATE, floor=RATE, total=SOME_STEPS)

    def lr(self, step: int) -> float:
        """Return the learning rate of ``step``."""
        if step >= self.total:
            return self.floor
        return self.floor + (self.base - self.floor) * (1 + math.cos(math.pi * step / self.total)) / 2


@dataclass(frozen=True)
class Warmup:
    """A straight rise to ``target``, then another schedule from its own step 0.

    Attributes:
        inner: the schedule that follows.
        target: rate of the last step of the rise.
        steps: length of the rise; step 0 already has ``target / steps``.
    """

    inner: Schedule
    target: float
    steps: int

    def __post_init__(self) -> None:
        check_arguments(self, target=RATE, steps=STEPS)

    def lr(self, step: int) -> float:
        """Return the learning rate of ``step``."""
        return self.target * (step + 1) / self.steps if step < self.steps else self.inner.lr(step - self.steps)


@dataclass(frozen=True)
class OneCycle:
    """A straight rise to ``peak``, then half a cosine down again (after arXiv:1708.07120).

    Attributes:
        peak: the highest rate.
        total: steps of the whole cycle; the rate stays low afterwards.
        warmup_fraction: part of the cycle that rises.
        divisor: ``peak / divisor`` is the rate at both ends.
    """

    peak: float
    total: int
    warmup_fraction: float = 0.3
    divisor: float = 25.0

    def __post_init__(self) -> None:
        check_arguments(self, peak=RATE, total=SOME_STEPS, warmup_fraction=SHARE, divisor=number(above=0))

    def lr(self, step: int) -> float:
        """Return the learning rate of ``step``."""
        low = self.peak / self.divisor
        rise = self.total * self.warmup_fraction
        if step >= self.total:
            return low
        if step < rise:
            return low + (self.peak - low) * step / rise
        return low + (self.peak - low) * (1 + math.cos(math.pi * (step - rise) / (self.total - rise))) / 2


@dataclass(frozen=True)
class Cyclic:
    """A triangle between ``base`` and ``peak``, again and again (arXiv:1506.01186).

    Attributes:
        base: rate at the foot, step 0.
        peak: rate at the top.
        up: steps from foot to top.
        down: steps from top to foot; ``up`` when None.
    """

    base: float
    peak: float
    up: int
    down: int | None = None

    def __post_init__(self) -> None:
        check_arguments(self, base=RATE, peak=RATE, up=SOME_STEPS, down=SOME_STEPS | None)

    def lr(self, step: int) -> float:
        """Return the learning rate of ``step``."""
        down = self.up if self.down is None else self.down
        place = step % (self.up + down)
        part = place / self.up if place < self.up else (self.up + down - place) / down
        return self.base + (self.peak - self.base) * part


class Plateau:
    """A rate that falls by ``factor`` whenever a metric has not improved ``patience`` times in a row.

    Args:
        base: the first rate.
        patience: observations without strict improvement before the rate falls.
        factor: what the rate is multiplied by.
        floor: the rate never falls below this.
        mode: ``"min"`` when lower metrics are better, ``"max"`` when higher ones are.
    """

    def __init__(self, base: float, patience: int, factor: float = 0.1, floor: float = 0.0, mode: str = "min") -> None:
        self.base, self.patience, self.factor, self.floor, self.mode = base, patience, factor, floor, mode
        values = {"base": RATE, "patience": whole(1), "factor": number(above=0, below=1), "floor": number()}
        check_arguments(self, **values, mode=choice("min", "max"))
        self._rate = base
        self._best: float | None = None
        self._wait = 0

    def __repr__(self) -> str:
        return f"Plateau({self.base}, {self.patience}, {self.factor}, {self.floor}, {self.mode!r})"

    def lr(self, step: int = 0) -> float:
        """Return the present learning rate, whatever the step."""
        return self._rate

    def observe(self, metric: float) -> float:
        """Take note of a metric and return the learning rate from now on.

        A metric that is not a number counts as no improvement.
        """
        better = not math.isnan(metric) and (
            self._best is None or (metric < self._best if self.mode == "min" else metric > self._best)
        )
        if better:
            self._best, self._wait = metric, 0
        else:
            self._wait += 1
            if self._wait >= self.patience:
                self._rate, self._wait = max(self._rate * self.factor, self.floor), 0
        return self._rate

    def state_dict(self) -> dict[str, float | int | None]:
        """Return what a resumed run needs."""
        return {"rate": self._rate, "best": self._best, "wait": self._wait}

    def load_state_dict(self, state: dict[str, float | int | None]) -> None:
        """Go on from what ``state_dict`` returned.

        Raises:
            ConfigError: entries are missing or unknown.
        """
        rate, wait = state.get("rate"), state.get("wait")
        if state.keys() != {"rate", "best", "wait"} or rate is None or wait is None:
            raise ConfigError(
                f"{self!r}: state has {sorted(state)}, expected rate, best and wait; pass a state_dict().",
                problems=sorted(state),
            )
        self._rate, self._best, self._wait = float(rate), state["best"], int(wait)

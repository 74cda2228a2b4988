"""Learning-rate schedules as functions of the step.

``Cosine(total=900)`` is a function ``step -> factor`` of the optimiser's learning rate, as are the functions that
torch's ``LambdaLR`` takes; so any function of the step serves as a schedule. With its absolute rate
(``Cosine(1e-3, 1e-5, 900)``) ``schedule.lr(step)`` is the absolute rate, and the optimiser must have the same. Only
`Plateau`, which reads a metric, has a state. Curves of fine-tuning recipes are in `flodl.train.warmed_up`.
"""

from __future__ import annotations

import copy
import math
import warnings
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from flodl.checked_fields import Values, check_fields, choice, number, of_kind, share, whole
from flodl.errors import ConfigError, TrainError
from flodl.train.events import EpochMetrics

__all__ = [
    "Constant",
    "Cosine",
    "Cyclic",
    "Exponential",
    "Linear",
    "MultiStep",
    "OneCycle",
    "Plateau",
    "StepDecay",
    "Warmup",
]

RATE, SHARE = number(least=0), share()
MODE = choice("min", "max")
STEPS, SOME_STEPS = number(least=0), number(least=1)


def _is_rising(steps: tuple[Any, ...]) -> bool:
    return all(map(STEPS.fits, steps)) and list(steps) == sorted(set(steps))


class Schedule:
    """Base class of schedules: a call returns the factor of a step, `lr` the rate of a schedule with its own rate.

    Raises:
        ConfigError: invalid arguments; ``problems`` lists each of them.
    """

    # Valid values of each argument, passed as keywords of the class, with those of its base class.
    values: ClassVar[Mapping[str, Values]] = {}

    def __init_subclass__(cls, **values: Values) -> None:
        cls.values = {**cls.values, **values}

    def __post_init__(self) -> None:
        """Check the arguments."""
        check_fields(self, self.values, type(self).__name__, ConfigError)

    @property
    def reference(self) -> float:
        """The rate that has the factor 1: the largest rate among the arguments."""
        return max(vars(self)[name] for name, values in self.values.items() if values is RATE)

    def lr(self, step: int) -> float:
        """Return the learning rate of ``step``; the first step is 0."""
        raise NotImplementedError

    def __call__(self, step: int) -> float:
        """Return the factor of ``step``."""
        return self.lr(step) / self.reference if self.reference else 0.0


@dataclass(frozen=True)
class Constant(Schedule, base=RATE):
    """The same rate in all steps.

    Attributes:
        base: the rate.
    """

    base: float = 1.0

    def lr(self, step: int) -> float:
        """Return the rate."""
        return self.base


@dataclass(frozen=True)
class Linear(Schedule, start=RATE, end=RATE, total=SOME_STEPS):
    """A straight line from ``start`` to ``end``, constant afterwards.

    Attributes:
        start: rate of step 0.
        end: rate from step ``total`` on.
        total: steps of the line.
    """

    start: float = 1.0
    end: float = 0.0
    total: int = 0

    def lr(self, step: int) -> float:
        """Return the rate of a step."""
        return self.end if step >= self.total else self.start + (self.end - self.start) * step / self.total


@dataclass(frozen=True)
class StepDecay(Schedule, base=RATE, size=SOME_STEPS, gamma=number()):
    """``base`` times ``gamma`` to the power of the number of full ``size`` steps.

    Attributes:
        base: the first rate.
        size: steps with one rate.
        gamma: factor from one rate to the next.
    """

    base: float = 1.0
    size: int = 0
    gamma: float = 0.1

    def lr(self, step: int) -> float:
        """Return the rate of a step."""
        return self.base * self.gamma ** (step // self.size)


@dataclass(frozen=True)
class MultiStep(Schedule, base=RATE, milestones=of_kind("rising numbers of steps", _is_rising), gamma=number()):
    """``base`` times ``gamma`` for each milestone that has passed.

    Attributes:
        base: rate before the first milestone.
        milestones: ascending steps at which the factor applies.
        gamma: the factor.
    """

    base: float = 1.0
    milestones: tuple[int, ...] = ()
    gamma: float = 0.1

    def __post_init__(self) -> None:
        """Check the arguments."""
        object.__setattr__(self, "milestones", tuple(self.milestones))
        super().__post_init__()

    def lr(self, step: int) -> float:
        """Return the rate of a step."""
        return self.base * self.gamma ** bisect_right(self.milestones, step)


@dataclass(frozen=True)
class Exponential(Schedule, base=RATE, gamma=number()):
    """``base`` times ``gamma`` to the power of the step.

    Attributes:
        base: rate of step 0.
        gamma: factor from one step to the next.
    """

    base: float = 1.0
    gamma: float = 1.0

    def lr(self, step: int) -> float:
        """Return the rate of a step."""
        return self.base * self.gamma**step


@dataclass(frozen=True)
class Cosine(Schedule, base=RATE, floor=RATE, total=SOME_STEPS):
    """Half a cosine from ``base`` to ``floor``, then constant (arXiv:1608.03983 without restarts).

    Attributes:
        base: rate of step 0.
        floor: rate from step ``total`` on.
        total: steps of the half wave.
    """

    base: float = 1.0
    floor: float = 0.0
    total: int = 0

    def lr(self, step: int) -> float:
        """Return the rate of a step."""
        if step >= self.total:
            return self.floor
        return self.floor + (self.base - self.floor) * (1 + math.cos(math.pi * step / self.total)) / 2


@dataclass(frozen=True)
class Warmup(Schedule, target=RATE, steps=STEPS):
    """A straight rise to ``target``, then another schedule from its step 0.

    Attributes:
        inner: the schedule that follows.
        target: rate of the last step of the rise.
        steps: length of the rise; step 0 already has ``target / steps``.
    """

    inner: Any
    target: float = 1.0
    steps: int = 0

    def lr(self, step: int) -> float:
        """Return the rate of a step."""
        if step < self.steps:
            return self.target * (step + 1) / self.steps
        return getattr(self.inner, "lr", self.inner)(step - self.steps)


@dataclass(frozen=True)
class OneCycle(Schedule, peak=RATE, total=SOME_STEPS, warmup_fraction=SHARE, divisor=number(above=0)):
    """A straight rise to ``peak``, then half a cosine down again (after arXiv:1708.07120).

    Attributes:
        peak: the highest rate.
        total: steps of the whole cycle; the rate stays low afterwards.
        warmup_fraction: part of the cycle that rises.
        divisor: ``peak / divisor`` is the rate at both ends.
    """

    peak: float = 1.0
    total: int = 0
    warmup_fraction: float = 0.3
    divisor: float = 25.0

    def lr(self, step: int) -> float:
        """Return the rate of a step."""
        low = self.peak / self.divisor
        rise = self.total * self.warmup_fraction
        if step >= self.total:
            return low
        if step < rise:
            return low + (self.peak - low) * step / rise
        return low + (self.peak - low) * (1 + math.cos(math.pi * (step - rise) / (self.total - rise))) / 2


@dataclass(frozen=True)
class Cyclic(Schedule, base=RATE, peak=RATE, up=SOME_STEPS, down=SOME_STEPS | None):
    """A triangle between ``base`` and ``peak``, repeated (arXiv:1506.01186).

    Attributes:
        base: lowest rate, of step 0.
        peak: highest rate.
        up: steps from the lowest to the highest rate.
        down: steps back; ``up`` when None.
    """

    base: float
    peak: float = 1.0
    up: int = 0
    down: int | None = None

    def lr(self, step: int) -> float:
        """Return the rate of a step."""
        down = self.up if self.down is None else self.down
        position = step % (self.up + down)
        part = position / self.up if position < self.up else (self.up + down - position) / down
        return self.base + (self.peak - self.base) * part


@dataclass(repr=False, eq=False)
class Plateau(Schedule, base=RATE, patience=whole(1), factor=number(above=0, below=1), floor=number(), mode=MODE):
    """A rate that falls by ``factor`` when a metric has not improved ``patience`` times in a row.

    Attributes:
        base: the first rate.
        patience: observations without strict improvement before the rate falls.
        factor: the rate is multiplied by this.
        floor: the lowest rate.
        mode: ``"min"`` if lower metrics are better, else ``"max"``.
        metric: the figure that a run passes: ``"loss"``, a metric of the training step or of evaluations.
    """

    base: float = 1.0
    patience: int = 1
    factor: float = 0.1
    floor: float = 0.0
    mode: str = "min"
    metric: str = "loss"

    def __post_init__(self) -> None:
        """Check the arguments."""
        super().__post_init__()
        self._rate, self._wait = self.base, 0
        self._best: float | None = None

    def __repr__(self) -> str:
        return f"Plateau({self.base}, {self.patience}, {self.factor}, {self.floor}, {self.mode!r})"

    def lr(self, step: int = 0) -> float:
        """Return the present rate."""
        return self._rate

    def observe(self, metric: float) -> float:
        """Add a value of the metric and return the rate from now on; NaN counts as no improvement."""
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

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {"rate": self._rate, "best": self._best, "wait": self._wait}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of `state_dict`."""
        self._rate, self._best, self._wait = state["rate"], state["best"], state["wait"]


EXPECTED = (
    "a function of the step that returns a factor, a torch LRScheduler or a function of the optimizer that returns "
    "one, or an object with lr(step)"
)


def make_schedule(schedule: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Return the schedule of a run: a function of the step, an object with ``lr(step)``, or an ``LRScheduler``.

    Args:
        schedule: one of these, or a function of the optimiser that returns one.
        optimizer: the optimiser of the run.

    Raises:
        TrainError: it is none of these, has another learning rate than the optimiser, or belongs to another optimiser.
    """
    if schedule is None:
        return None
    made, fault = schedule, None
    if not isinstance(schedule, LRScheduler) and not hasattr(schedule, "lr"):
        rate, fault = _call(schedule, 0)
        if not number().fits(rate):
            made, error = _call(schedule, optimizer)
            fault = fault or error
    if isinstance(made, LRScheduler):
        if made.optimizer is not optimizer:
            raise TrainError("schedule: found a torch LRScheduler of another optimizer; expected a function of it.")
        return made
    made = copy.deepcopy(made)  # a schedule with a state changes, and the caller may start another run with it
    rate, error = _call(getattr(made, "lr", made), 0)
    if error is not None or not number(least=0, below=float("inf")).fits(rate):
        fault = fault or error
        found = f"{type(fault).__name__}: {fault}" if fault is not None else f"the value {rate!r}"
        raise TrainError(f"schedule: found {found} in step 0 of {schedule!r}; expected {EXPECTED}.")
    reference, rate = getattr(made, "reference", None), float(optimizer.defaults.get("lr", 1.0))
    if reference is not None and reference not in (rate, 1.0):
        raise TrainError(
            f"schedule: found a learning rate of {reference:g} in {made!r} and {rate:g} in the optimizer; expected one "
            f"rate. Leave it out of the schedule, or make both equal.",
            schedule=reference,
            optimizer=rate,
        )
    return made


def _call(function: Any, argument: Any) -> tuple[Any, Exception | None]:
    """Return the result of a function, and its error."""
    try:
        return function(argument), None
    except Exception as error:
        return None, error


class Rates:
    """Sets the learning rates of a run before each step.

    A group keeps its ratio to the optimiser's default rate (layer-wise decay, a faster head) as ``lr_scale``.

    Args:
        optimizer: the optimiser of the run.
        schedule: as for `make_schedule`; None leaves the rates as they are.
        world: number of ranks.
        ratio: the rate is multiplied by ``1 + (world - 1) * ratio``; once if there is no schedule.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Any, world: int, ratio: float) -> None:
        self.optimizer = optimizer
        self.factor = 1 + (world - 1) * ratio
        self._set: float | None = None
        base = optimizer.defaults.get("lr")
        for group in optimizer.param_groups:
            group.setdefault("lr_scale", float(group["lr"]) / float(base) if base else 1.0)
            if self.factor != 1 and (schedule is None or isinstance(schedule, LRScheduler)):
                group["lr"] = group["lr"] * self.factor
        self.schedule = make_schedule(schedule, optimizer)
        relative = getattr(self.schedule, "reference", None) == 1.0 or not hasattr(self.schedule, "lr")
        self._base = float(base) if base and relative else 1.0
        self._rate_of: Any = getattr(self.schedule, "lr", self.schedule)

    def set(self, step: int) -> None:
        """Set the rates of the step with this number, counted from 0; a run without a schedule does not call this."""
        if isinstance(self.schedule, LRScheduler):
            with warnings.catch_warnings():
                # torch expects optimizer.step() before each of these; captured steps do not call it.
                warnings.simplefilter("ignore")
                while not isinstance(self.schedule, ReduceLROnPlateau) and self.schedule.last_epoch < step:
                    self.schedule.step()
            return
        rate = self._base * self._rate_of(step) * self.factor
        self._set = rate * self.optimizer.param_groups[0]["lr_scale"]
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate * group["lr_scale"])
            else:
                group["lr"] = rate * group["lr_scale"]

    @property
    def first(self) -> float:
        """The rate of the first group, known without reading a device where a schedule set it."""
        if self._set is not None:
            return self._set
        rate = self.optimizer.param_groups[0]["lr"]
        if not isinstance(rate, torch.Tensor):
            return float(rate)
        if self._read is None or self._read[:2] != (id(rate), rate._version):
            self._read = id(rate), rate._version, float(rate)
        return self._read[2]

    _read: tuple[int, int, float] | None = None

    # ---- schedules that depend on a metric ---------------------------------------------------------------

    @property
    def metric(self) -> str | None:
        """The figure that the schedule reads; None if it reads none."""
        if isinstance(self.schedule, ReduceLROnPlateau):
            return "loss"
        return getattr(self.schedule, "metric", "loss") if hasattr(self.schedule, "observe") else None

    def evaluated(self, evaluator: Any) -> None:
        """Pass a figure of an evaluation to the schedule."""
        if self.metric not in (None, "loss") and self.metric in evaluator.found:
            self._observe(evaluator.found)

    def end_epoch(self, metrics: EpochMetrics, evaluator: Any) -> None:
        """Pass a training figure of an epoch to the schedule; `evaluated` passes figures of evaluations.

        Raises:
            TrainError: there is no such figure.
        """
        name, found = self.metric, evaluator.found
        known = {**found, **metrics.metrics, "loss": metrics.loss}
        is_to_come = name not in known and not found and evaluator.evaluates
        if name is not None and (name == "loss" or not (name in found or is_to_come)):
            self._observe(known)

    def _observe(self, figures: Mapping[str, float]) -> None:
        name: Any = self.metric
        if name not in figures:
            raise TrainError(f"schedule: found no figure {name!r}; expected one of {', '.join(figures)}.", name=name)
        value: Any = figures[name]
        if isinstance(self.schedule, ReduceLROnPlateau):
            self.schedule.step(value)
        else:
            self.schedule.observe(value)

    # ---- in checkpoints ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the schedule as JSON values; empty for a pure function."""
        if not hasattr(self.schedule, "state_dict"):
            return {}
        state = self.schedule.state_dict()
        if isinstance(self.schedule, LRScheduler):
            kinds = (bool, int, float, str, type(None))
            return {name: value for name, value in state.items() if isinstance(value, kinds)}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state."""
        if state:
            self.schedule.load_state_dict(dict(state))

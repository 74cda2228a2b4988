"""The learning rate of each parameter group: the optimiser's own rate times the factor of a schedule."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from flodl.checked_fields import number
from flodl.errors import TrainError
from flodl.train.events import EpochMetrics

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

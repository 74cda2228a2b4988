"""The learning rate of each parameter group: a pure schedule, times the group's own scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flodl.errors import TrainError

__all__ = ["Rates"]


class Rates:
    """Sets learning rates from ``schedule.lr(step)``.

    A group keeps its ratio to the optimiser's default rate (layer-wise decay, a faster head) as
    ``lr_scale`` while the schedule moves all of them.

    Args:
        schedule: has ``lr(step)``; None leaves the rates as they are.
        world: number of ranks.
        ratio: the rate is multiplied by ``1 + (world - 1) * ratio``; once, where there is no schedule.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Any, world: int, ratio: float) -> None:
        if schedule is not None and not hasattr(schedule, "lr"):
            raise TrainError(
                f"schedule: found {type(schedule).__name__}; expected an object with lr(step), such as those of "
                "flodl.train.schedule, or a function of the number of ranks that returns one."
            )
        self.optimizer = optimizer
        self.schedule: Any = schedule
        self.factor = 1 + (world - 1) * ratio
        self._set: float | None = None
        base = optimizer.defaults.get("lr")
        for group in optimizer.param_groups:
            group.setdefault("lr_scale", float(group["lr"]) / float(base) if base else 1.0)
            if schedule is None and self.factor != 1:
                group["lr"] = group["lr"] * self.factor

    def set(self, step: int) -> None:
        """Set the rates for the step with this number, counted from 0."""
        if self.schedule is None:
            return
        rate = self.schedule.lr(step) * self.factor
        self._set = rate * self.optimizer.param_groups[0]["lr_scale"]
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate * group["lr_scale"])
            else:
                group["lr"] = rate * group["lr_scale"]

    @property
    def first(self) -> float:
        """The rate of the first group, known without asking a device where a schedule set it."""
        if self._set is None:
            rate = self.optimizer.param_groups[0]["lr"]
            if not isinstance(rate, torch.Tensor):
                return float(rate)
            if self._read is not None and self._read[:2] == (id(rate), rate._version):
                return self._read[2]
            self._read = id(rate), rate._version, float(rate)
            return self._read[2]
        return self._set

    _read: tuple[int, int, float] | None = None

    def observe(self, figures: Mapping[str, float], name: str) -> None:
        """Give a schedule that waits for plateaus the figure ``name``.

        Raises:
            TrainError: there is no such figure.
        """
        if not hasattr(self.schedule, "observe"):
            return
        if name not in figures:
            raise TrainError(
                f"schedule_metric: found no figure {name!r}, expected one of {', '.join(figures)}.", name=name
            )
        self.schedule.observe(figures[name])

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's state, empty for a pure one."""
        return self.schedule.state_dict() if hasattr(self.schedule, "state_dict") else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state."""
        if state:
            self.schedule.load_state_dict(dict(state))

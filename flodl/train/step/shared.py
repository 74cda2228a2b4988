"""One optimiser step of all ranks together, decided on the device.

A rank's own part (forward, backward, gradients brought to where they are summed) holds no talk with other ranks and
may be captured (`flodl.train.step.capture`), on each rank as its batches allow. What follows is the same on all
ranks, and is captured on all of them or on none: one sum, one division by the count of all, and an update that leaves
itself out where something is not finite. What ranks must know of each other before that travels between hosts
(`SharedStep.agree`), so that no host waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from flodl.distributed.average import BufferMean
from flodl.distributed.gradients import GradientSum
from flodl.distributed.group import Ranks
from flodl.errors import TrainError
from flodl.train.precision import Precision
from flodl.train.step.capture import DIRTY_RUNS, Capturer, options_of, state_places
from flodl.train.step.on_device import DeviceStep
from flodl.train.step.outcome import Outcome, outcome_of
from flodl.train.step.overlap import Overlap

__all__ = ["Agreement", "Common", "SharedStep"]

MOST_CAPTURES = 8


@dataclass(frozen=True)
class Agreement:
    """What all ranks know of a step before it is finished, the same on each.

    Attributes:
        flags: sums of the flags.
        missing: places of parameters that no rank has a gradient of.
        arrived: whether the oldest figures under way are on the host of every rank.
    """

    flags: list[float]
    missing: tuple[int, ...]
    arrived: bool


class SharedStep(DeviceStep):
    """Called with micro-batches, does this rank's part of a step; `finish` does the rest with all ranks.

    Args:
        sums: sums gradients over ranks.
        buffers: averages the model's buffers; None where it has none.
        **others: as for `flodl.train.step.on_device.DeviceStep`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        ranks: Ranks,
        sums: GradientSum,
        buffers: BufferMean | None,
        **others: Any,
    ) -> None:
        super().__init__(model, optimizer, ranks.device, precision, **others)
        self.ranks, self.sums, self.buffers = ranks, sums, buffers
        self.overlap: Overlap | None = None

    def begin_sums_early(self, overlap: Overlap, tell: Callable[[str], Any]) -> None:
        """Have sums wait for the buckets that they add up, and not for all of this rank's part.

        Args:
            tell: told once where they have to go another way than they were to.
        """
        self.overlap = overlap
        self.sums.prepare_capture(overlap.event, fault=overlap.fault, tell=tell)

    def __call__(self, train_step: Callable[..., Any], batches: Sequence[Any]) -> Outcome:
        """Return sum and count of this rank's losses, its gradients brought to where they are summed.

        Raises:
            TrainError: the loss depends on no parameter, or is none.
        """
        part = self.accumulator.run(train_step, batches, around=self.sums.filling_in_backward)
        try:
            lacking = self.sums.fill_buckets()
        finally:
            self.model.zero_grad(set_to_none=True)
        return outcome_of(part.pair(self.device), 0.0, True, part.metrics, lacking)

    def agree(self, part: Outcome, flags: Sequence[float], *, arrived: bool) -> Agreement:
        """Tell the other ranks what they must know of this one, and return what all know.

        Args:
            arrived: whether the oldest figures under way are on this host.
        """
        rows = self.ranks.table([*flags, float(len(part.lacking)), float(arrived)])
        missing = self.sums.missing(part.lacking, max(row[-2] for row in rows))
        return Agreement(
            [float(sum(column)) for column in zip(*rows, strict=True)][:-2], missing, all(row[-1] for row in rows)
        )

    def finish(self, pair: torch.Tensor, weight: torch.Tensor, missing: Sequence[int]) -> Outcome:
        """Return the outcome of the step of all ranks.

        Args:
            pair: sum and count of this rank's losses, float64 ``(2,)``; those of all are written to it.
            weight: this rank's samples, by which buffers are averaged, float64 ``()``.
            missing: places of parameters that no rank has a gradient of.
        """
        with torch.no_grad():
            self.sums.launch()
            if self.overlap is not None:
                self.overlap.wait_for_end()
            self.sums.sum_last(pair)
            self.sums.wait(missing)
            if self.buffers is not None:
                self.buffers(weight)
            total, count = pair.unbind()
            found = self.apply(total, count, divided=self.sum_of_means, apart=False, metrics={}, inside=True)
            self.model.zero_grad(set_to_none=True)
        return found


class Common:
    """The end of a step that all ranks share, replayed where they have captured it.

    Sums over ranks may be captured only if all ranks capture them, together. So every decision here follows from what
    all ranks know: options of the optimiser, which parameters are missing, and whether capturing went well on each.

    Args:
        step: what is captured.
        capturer: how; None runs everything one operation at a time.
        warn: told once why nothing is captured.
        strict: raise where it cannot be captured.
    """

    def __init__(
        self, step: SharedStep, capturer: Capturer | None, warn: Callable[[str], Any], *, strict: bool = False
    ) -> None:
        self.step, self.capturer, self.warn, self.strict = step, capturer, warn, strict
        self.given_up: str | None = None
        # Replays read these, so they stay where they are.
        self._pair = torch.zeros(2, dtype=torch.float64, device=step.device)
        self._weight = torch.zeros((), dtype=torch.float64, device=step.device)
        self._samples: int | None = None
        self.forget()

    def forget(self) -> None:
        """Drop all captured graphs: tensors that they use were replaced."""
        self._replays: dict[Any, tuple[Callable[[], Outcome], object]] = {}
        self._runs: dict[Any, int] = {}
        self._dirty = 0
        self._places = [p.data_ptr() for p in self.step.model.parameters()]
        self._state_places: list[int] = []

    def invalidate_if_changed(self) -> None:
        """Drop all captured graphs if memory of parameters or of the optimiser was exchanged, on all ranks alike."""
        moved = self._replays and state_places(self.step.optimizer) != self._state_places
        if moved or [p.data_ptr() for p in self.step.model.parameters()] != self._places:
            self.forget()

    @property
    def num_graphs(self) -> int:
        """The number of captured graphs."""
        return len(self._replays)

    def run(self, part: Outcome, samples: int, agreed: Agreement) -> Outcome:
        """Return the outcome of the step of all ranks, with the metrics of this rank's ``part``."""
        self._pair.copy_(part.row[:2])
        if samples != self._samples:  # they seldom change
            self._weight.fill_(float(samples))
            self._samples = samples
        if self.step.overlap is not None:
            self.step.overlap.mark_end()
        found = self._found(agreed.missing)
        if not part.metrics:
            return found
        row = torch.cat([found.row.to(torch.float64), part.row[2:]])
        return replace(found, row=row, metrics=part.metrics)

    def _found(self, missing: tuple[int, ...]) -> Outcome:
        if self.capturer is None or self.given_up is not None:
            return self._once(missing)
        key = options_of(self.step.optimizer), missing
        if key in self._replays:
            return self._replayed(self._replays[key][0])
        if len(self._replays) >= MOST_CAPTURES:
            return self._once(missing)
        if not self._runs.get(key):
            outcome, fault = self.capturer.watch(lambda: self._once(missing))
            if self._on_all(fault):
                self._runs[key] = 1
            else:
                self._dirty += 1
                if self._dirty >= DIRTY_RUNS:
                    self._give_up(fault or "the end of a step waits for the device on another rank")
            return outcome
        replay, fault = None, None
        try:
            replay = self.capturer.capture(lambda: self._once(missing))
        except Exception as error:
            fault = f"{error}".strip().splitlines()[0] if str(error).strip() else type(error).__name__
        held = self.step.finish_capture()
        if not self._on_all(fault) or replay is None:
            self.step.sums.abandon()
            self._give_up(fault or "another rank cannot capture the end of a step")
            return self._once(missing)
        self._replays[key] = replay, held
        self._state_places = state_places(self.step.optimizer)
        return self._replayed(replay)

    def _replayed(self, replay: Callable[[], Outcome]) -> Outcome:
        if self.step.overlap is None:
            return replay().replayed()
        return self.step.overlap.beside(replay).replayed()

    def _once(self, missing: tuple[int, ...]) -> Outcome:
        return self.step.finish(self._pair, self._weight, missing)

    def _on_all(self, fault: str | None) -> bool:
        """Return whether no rank has a fault."""
        return not any(row[0] for row in self.step.ranks.table([float(fault is not None)]))

    def _give_up(self, reason: str) -> None:
        self.forget()
        self.given_up = reason
        if self.strict:
            raise TrainError(f"capture: steps cannot be captured, because {reason}. Leave it at 'auto'.", reason=reason)
        self.warn(
            f"capture: sums over ranks and updates run one operation at a time, with the same numbers, because "
            f"{reason}. capture=False says that this is expected."
        )

"""What a step came to: figures on the device, brought to the host, and told as the result of the step.

A step that was decided on the device leaves its figures there as one row of numbers; `Outcome` says what stands where,
`StepResult` takes them in when they have arrived.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from flodl.errors import TrainError

__all__ = ["OBSERVED", "Figures", "Outcome", "StepResult", "apart", "not_finite", "outcome_of", "told_of"]

OBSERVED = "\0"
"""Before the names of what was watched inside of the model, which travels with the metrics of a step."""


@dataclass(frozen=True)
class Figures:
    """What a step came to, on the host.

    Attributes:
        loss: mean loss.
        count: items counted.
        grad_norm: 2-norm of the gradient before clipping.
        metrics: ``name: (sum, count)``.
    """

    loss: float
    count: float
    grad_norm: float
    metrics: dict[str, tuple[float, float]]

    @property
    def fault(self) -> str | None:
        """What is not finite, ``"loss"`` or ``"gradient"``; None when the step is sound, or counted nothing."""
        if not self.count:
            return None
        return "loss" if not math.isfinite(self.loss) else None if math.isfinite(self.grad_norm) else "gradient"


@dataclass(frozen=True)
class Outcome:
    """What a step came to, still on the device.

    Attributes:
        row: its figures: the loss, norms of parts of the gradient, then what the host does not know yet.
        count: items counted, where that is known on the host; else it is in the row.
        metrics: names, and for each whether its sum and its count are in the row, or the number itself.
        moved: whether there was any gradient.
        lacking: places of parameters without one, where that matters to others.
        norms: how many norms there are; together they are the norm of the gradient.
        next_row: where this was captured: gives ``row``, less the metrics, of the replay that was launched last, in
            memory that the next replays leave alone. None: the next replay writes to the same row.
    """

    row: torch.Tensor
    count: float | None
    metrics: tuple[tuple[str, float | None, float | None], ...] = ()
    moved: bool = True
    lacking: tuple[int, ...] = ()
    norms: int = 1
    next_row: Callable[[], torch.Tensor] | None = None

    def replayed(self) -> Outcome:
        """Return the outcome of the replay that was launched last, out of the way of the next; called after each."""
        row = self.next_row() if self.next_row is not None else None
        if row is None or row.numel() != self.row.numel():
            row = self.row.clone()
        return replace(self, row=row, next_row=None)

    def read(self, values: Sequence[float]) -> Figures:
        """Return the figures of a row that has come to the host."""
        rest = iter(values[1 + self.norms :])
        count = self.count if self.count is not None else next(rest)
        metrics = {}
        for name, total, number in self.metrics:
            metrics[name] = next(rest) if total is None else total, next(rest) if number is None else number
        norm = math.hypot(*values[1 : 1 + self.norms])
        return Figures(values[0], count if self.moved else 0.0, norm, metrics)


@dataclass
class StepResult:
    """What one step did.

    Attributes:
        loss: mean loss over ``count`` items, as computed before the update.
        count: items counted, over ranks where gradients are summed over them.
        samples: samples of this rank.
        grad_norm: 2-norm of the whole gradient before clipping.
        compute_ms: time of forward and backward on this rank.
        applied: whether parameters moved.
        reason: why not, when they did not.
        flags: sums over ranks of the flags given to the step.
        metrics: ``name: (sum, count)`` of this rank.
        observed: the same of what was watched inside of the model.
        outcome: the figures while they are on the device; `settle` puts them here.
        arrived: whether the oldest figures under way are on the host of every rank; None where ranks need not agree.
    """

    loss: float
    count: float
    samples: int
    grad_norm: float
    compute_ms: float
    applied: bool = True
    reason: str = ""
    flags: list[float] = field(default_factory=list)
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    observed: dict[str, tuple[float, float]] = field(default_factory=dict)
    outcome: Outcome | None = None
    arrived: bool | None = None

    def moved(self) -> bool:
        """Return whether parameters moved, waiting for the device where it alone knows."""
        if self.outcome is None:
            return self.applied
        figures = self.outcome.read(self.outcome.row.tolist())
        return bool(figures.count) and figures.fault is None

    def settle(
        self, figures: Figures, compute_ms: float, *, raising: Callable[[str, float], TrainError] | None
    ) -> None:
        """Take in the figures that came from the device.

        Args:
            compute_ms: how long the device took.
            raising: makes the error for a loss or gradient (the word and its value) that is not finite; None
                leaves it at the step not being applied.

        Raises:
            TrainError: what ``raising`` made.
        """
        self.loss, self.count, self.grad_norm = figures.loss, figures.count, figures.grad_norm
        self.metrics, self.observed = apart(figures.metrics)
        self.compute_ms, self.outcome = compute_ms, None
        if figures.fault is not None:
            self.applied, self.reason = False, f"{figures.fault} is not finite"
            if raising is not None:
                raise raising(figures.fault, self.loss if figures.fault == "loss" else self.grad_norm)
        elif not figures.count:
            self.applied, self.reason = False, "nothing was counted in this step"


def apart(figures: Mapping[str, tuple[float, float]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the metrics of a step, and what was watched in it."""
    metrics, observed = {}, {}
    for name, pair in figures.items():
        if name[:1] == OBSERVED:
            observed[name[1:]] = pair
        else:
            metrics[name] = pair
    return metrics, observed


def outcome_of(
    pair: torch.Tensor,
    count: Any,
    moved: bool,
    metrics: Mapping[str, tuple[Any, Any]],
    lacking: tuple[int, ...] = (),
) -> Outcome:
    """Return an outcome whose row begins with ``pair``, loss and norm; tensors of the rest come into it too."""
    told, rest = told_of(metrics, pair.device)
    parts = [pair]
    if isinstance(count, torch.Tensor):
        parts.append(count.detach().reshape(1).to(pair.device))
    if rest is not None:
        parts.append(rest)
    row = torch.cat([part.to(torch.float64) for part in parts]) if len(parts) > 1 else pair
    return Outcome(row, None if isinstance(count, torch.Tensor) else float(count), told, moved, lacking)


def told_of(
    metrics: Mapping[str, tuple[Any, Any]], device: torch.device
) -> tuple[tuple[tuple[str, float | None, float | None], ...], torch.Tensor | None]:
    """Return what `Outcome.metrics` says of metrics, and what of them is in the row, float64; None for nothing."""
    further: list[torch.Tensor] = []

    def kept(value: Any) -> float | None:
        if not isinstance(value, torch.Tensor):
            return float(value)
        further.append(value.detach().reshape(()).to(device))
        return None

    told = [(name, kept(total), kept(number)) for name, (total, number) in metrics.items()]
    return tuple(told), _together(further) if further else None


def _together(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return numbers of one tensor each as float64 ``(len(values),)``: as they lie, or cast at once where alike."""
    first = values[0]
    memory = first.untyped_storage().data_ptr()
    if all(
        value.dtype == torch.float64
        and value.untyped_storage().data_ptr() == memory
        and value.storage_offset() == first.storage_offset() + place
        for place, value in enumerate(values)
    ):
        return first.as_strided((len(values),), (1,))
    if any(value.dtype != values[0].dtype for value in values):
        values = [value.to(torch.float64) for value in values]
    return torch.stack(list(values)).to(torch.float64)


def not_finite(rank: int, step: int, what: str, value: float, tensor: str | None = None) -> TrainError:
    """Return the error of a loss or gradient that is not finite."""
    where = f" (first in {tensor})" if tensor else ""
    return TrainError(
        f"rank {rank}, step {step}: the {what} is {value}{where}; expected a finite number. The step was not applied "
        "on any rank. Lower the learning rate, clip (max_grad_norm), look at the batch, or go on without such steps "
        "with on_nan='skip'.",
        rank=rank,
        step=step,
        tensor=tensor,
    )

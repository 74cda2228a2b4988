"""Figures of one step: on the device as one row of numbers, on the host as the result of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from flodl.errors import TrainError
from flodl.train.loss import LOSS_FAULT, NOTHING_COUNTED, decide

__all__ = [
    "OBSERVED",
    "Figures",
    "Outcome",
    "Part",
    "StepResult",
    "not_finite",
    "outcome_of",
    "pack_metrics",
    "read_metrics",
]

OBSERVED = "\0"
"""Prefix of the names of values collected inside the model, which travel with the metrics of a step."""

Packed = tuple[tuple[str, float | None, float | None], ...]
"""Names of metrics, each with its sum and its count; None for a number that is in the row."""


@dataclass
class Part:
    """Sums over the micro-batches of one rank.

    Attributes:
        total: float64, the sum of their losses; with ``sum_of_means`` of their means. None without a micro-batch.
        count: number of items, known to the host or a tensor; with ``sum_of_means`` the number of micro-batches.
        samples: number of samples.
        divided: True if the gradients are means already.
        metrics: ``name: (sum, count)``.
        loss_known: False if the caller did not provide the loss.
    """

    total: torch.Tensor | None = None
    count: float | torch.Tensor = 0.0
    samples: int = 0
    divided: bool = False
    metrics: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    loss_known: bool = True

    def add_metrics(self, metrics: Mapping[str, tuple[Any, Any]], prefix: str = "") -> None:
        """Add sums and counts to the metrics of the same names."""
        for name, (value, weight) in metrics.items():
            value, weight = _plain(value), _plain(weight)
            before = self.metrics.get(prefix + name)
            self.metrics[prefix + name] = (value, weight) if before is None else (before[0] + value, before[1] + weight)


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else float(value)


@dataclass(frozen=True)
class Figures:
    """Figures of a step on the host.

    Attributes:
        loss: mean loss.
        count: number of counted items.
        grad_norm: 2-norm of the gradient before clipping.
        metrics: ``name: (sum, count)``.
    """

    loss: float
    count: float
    grad_norm: float
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """Figures of a step on the device.

    Attributes:
        row: the loss, norms of parts of the gradient, then the numbers that the host does not know.
        count: number of counted items if the host knows it; otherwise it is in the row.
        metrics: metrics, see `Packed`.
        moved: False if there was no gradient.
        lacking: positions of parameters without a gradient on this rank.
        norms: number of norms; together they are the norm of the gradient.
        next_row: after a capture: returns ``row`` of the last launched replay, in memory that the next replays do not
            write to. None if the next replay writes to the same row.
    """

    row: torch.Tensor
    count: float | None
    metrics: Packed = ()
    moved: bool = True
    lacking: tuple[int, ...] = ()
    norms: int = 1
    next_row: Callable[[], torch.Tensor] | None = None

    def replayed(self) -> Outcome:
        """Return the outcome of the last launched replay; call it after each replay."""
        row = self.next_row() if self.next_row is not None else None
        if row is None or row.numel() != self.row.numel():
            row = self.row.clone()
        return replace(self, row=row, next_row=None)

    def read(self, values: Sequence[float]) -> Figures:
        """Return the figures of a row that was copied to the host."""
        rest = iter(values[1 + self.norms :])
        count = self.count if self.count is not None else next(rest)
        norm = math.hypot(*values[1 : 1 + self.norms])
        return Figures(values[0], count if self.moved else 0.0, norm, read_metrics(self.metrics, rest))


@dataclass
class StepResult:
    """Result of one step.

    Attributes:
        loss: mean loss over ``count`` items, computed before the update.
        count: number of counted items, over ranks if gradients are summed over ranks.
        samples: samples of this rank.
        grad_norm: 2-norm of the whole gradient before clipping.
        compute_ms: time of forward and backward on this rank.
        applied: True if the parameters were updated.
        reason: why they were not updated.
        flags: sums over ranks of the flags given to the step.
        metrics: ``name: (sum, count)`` of this rank.
        observed: the same for values collected inside the model.
        outcome: the figures while they are on the device; `settle` copies them here.
        arrived: True if the oldest pending figures are on the host of every rank; None without an agreement of ranks.
    """

    loss: float = math.nan
    count: float = 0.0
    samples: int = 0
    grad_norm: float = math.nan
    compute_ms: float = 0.0
    applied: bool = True
    reason: str = ""
    flags: Sequence[float] = ()
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    observed: dict[str, tuple[float, float]] = field(default_factory=dict)
    outcome: Outcome | None = None
    arrived: bool | None = None

    def moved(self) -> bool:
        """Return True if the parameters were updated; waits for the device if only it knows."""
        if self.outcome is None:
            return self.applied
        figures = self.outcome.read(self.outcome.row.tolist())
        return not decide(figures.loss, figures.count, figures.grad_norm)

    def settle(
        self, figures: Figures, compute_ms: float, *, raising: Callable[[str, float, float], TrainError] | None
    ) -> None:
        """Store the figures and the decision of the device.

        Args:
            compute_ms: time of forward and backward.
            raising: creates the error for a loss or gradient that is not finite, from the reason, loss and norm; None
                only marks the step as not applied.

        Raises:
            TrainError: the error that ``raising`` created.
        """
        self.loss, self.count, self.grad_norm = figures.loss, figures.count, figures.grad_norm
        self.compute_ms, self.outcome = compute_ms, None
        self.add_metrics(figures.metrics)
        self.reason = decide(self.loss, self.count, self.grad_norm)
        self.applied = not self.reason
        if raising is not None and self.reason not in ("", NOTHING_COUNTED):
            raise raising(self.reason, self.loss, self.grad_norm)

    def add_metrics(self, metrics: Mapping[str, tuple[float, float]]) -> None:
        """Store metrics, and values collected inside the model."""
        for name, pair in metrics.items():
            if name[:1] == OBSERVED:
                self.observed[name[1:]] = pair
            else:
                self.metrics[name] = pair


def outcome_of(
    pair: torch.Tensor, count: Any, moved: bool, metrics: Mapping[str, tuple[Any, Any]], lacking: tuple[int, ...] = ()
) -> Outcome:
    """Return an outcome whose row begins with ``pair`` and ends with the tensors of ``count`` and ``metrics``."""
    packed, rest = pack_metrics(metrics, pair.device)
    parts = [pair]
    if isinstance(count, torch.Tensor):
        parts.append(count.detach().reshape(1).to(pair.device))
    if rest is not None:
        parts.append(rest)
    row = torch.cat([part.to(torch.float64) for part in parts]) if len(parts) > 1 else pair
    return Outcome(row, None if isinstance(count, torch.Tensor) else float(count), packed, moved, lacking)


def pack_metrics(metrics: Mapping[str, tuple[Any, Any]], device: torch.device) -> tuple[Packed, torch.Tensor | None]:
    """Return the names of metrics with the numbers that the host knows, and the other numbers as float64 or None."""
    if not metrics:
        return (), None
    tensors: list[torch.Tensor] = []

    def known(value: Any) -> float | None:
        if not isinstance(value, torch.Tensor):
            return float(value)
        tensors.append(value.detach().reshape(()).to(device))
        return None

    packed = tuple((name, known(total), known(number)) for name, (total, number) in metrics.items())
    return packed, _joined(tensors) if tensors else None


def read_metrics(packed: Packed, rest: Any) -> dict[str, tuple[float, float]]:
    """Return metrics as numbers; ``rest`` iterates over the numbers of the row."""
    return {
        name: (next(rest) if total is None else total, next(rest) if number is None else number)
        for name, total, number in packed
    }


def _joined(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one-number tensors as float64 ``(len(values),)``: a view if they are adjacent in memory, else a copy."""
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


def not_finite(
    rank: int, step: int, reason: str, loss: float, grad_norm: float, tensor: str | None = None
) -> TrainError:
    """Return the error for a loss or gradient that is not finite; ``reason`` is a result of `decide`."""
    what, value = ("loss", loss) if reason == LOSS_FAULT else ("gradient", grad_norm)
    where = f" (first in {tensor})" if tensor else ""
    return TrainError(
        f"rank {rank}, step {step}: the {what} is {value}{where}; expected a finite number. The step was not applied "
        "on any rank. Lower the learning rate, clip (max_grad_norm), check the batch, or skip such steps with "
        "on_nan='skip'.",
        rank=rank,
        step=step,
        tensor=tensor,
    )

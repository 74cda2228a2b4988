"""Figures of one step: on the device as one row of numbers, on the host as the result of the step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flodl.errors import TrainError
from flodl.train.loss import LOSS_FAULT, NOTHING_COUNTED, Metrics, decide

# Prefix of the names of values collected inside the model, which travel with the metrics of a step.
OBSERVED = "\0"

# Names of metrics, each with its sum and its count; None for a number that is in the row.
Packed = tuple[tuple[str, float | None, float | None], ...]


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

    def add_metrics(self, metrics: Metrics, prefix: str = "") -> None:
        """Add sums and counts to the metrics of the same names."""
        for name, (value, weight) in metrics.items():
            value, weight = _plain(value), _plain(weight)
            before = self.metrics.get(prefix + name)
            self.metrics[prefix + name] = (value, weight) if before is None else (before[0] + value, before[1] + weight)


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else float(value)


@dataclass(frozen=True)
class Outcome:
    """Figures of a step on the device.

    Attributes:
        row: the loss, the norm of the gradient, then the numbers that the host does not know.
        count: number of counted items if the host knows it; otherwise it is in the row.
        metrics: metrics, see `Packed`.
        lacking: positions of parameters without a gradient on this rank.
    """

    row: torch.Tensor
    count: float | None
    metrics: Packed = ()
    lacking: tuple[int, ...] = ()


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
        loss, norm, *rest = self.outcome.row.tolist()
        return not decide(loss, rest[0] if self.outcome.count is None else self.outcome.count, norm)

    def settle(self, values: Sequence[float], compute_ms: float, *, stop: tuple[int, int] | None) -> None:
        """Store the figures of the outcome, and the decision of the device.

        Args:
            values: the row of the outcome, copied to the host.
            compute_ms: time of forward and backward.
            stop: rank and step for the error of a loss or gradient that is not finite; None marks the step as not
                applied.

        Raises:
            TrainError: loss or gradient is not finite, and ``stop`` is given.
        """
        outcome, self.outcome, self.compute_ms = self.outcome, None, compute_ms
        assert outcome is not None
        rest = iter(values[2:])
        self.loss, self.grad_norm = values[:2]
        self.count = next(rest) if outcome.count is None else outcome.count
        self.add_metrics(read_metrics(outcome.metrics, rest))
        self.reason = decide(self.loss, self.count, self.grad_norm)
        self.applied = not self.reason
        if stop is not None and self.reason not in ("", NOTHING_COUNTED):
            raise not_finite(*stop, self.reason, self.loss, self.grad_norm)

    def add_metrics(self, metrics: Mapping[str, tuple[float, float]]) -> None:
        """Store metrics, and values collected inside the model."""
        for name, pair in metrics.items():
            values = self.observed if name[:1] == OBSERVED else self.metrics
            values[name.removeprefix(OBSERVED)] = pair


def outcome_of(pair: torch.Tensor, metrics: Metrics, lacking: tuple[int, ...] = ()) -> Outcome:
    """Return an outcome in which nothing was counted, whose row is ``pair`` and the tensors of ``metrics``."""
    packed, rest = pack_metrics(metrics, pair.device)
    return Outcome(pair if rest is None else torch.cat([pair, rest]), 0.0, packed, lacking)


def pack_metrics(metrics: Metrics, device: torch.device) -> tuple[Packed, torch.Tensor | None]:
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
    if any(tensor.dtype != tensors[0].dtype for tensor in tensors):
        tensors = [tensor.to(torch.float64) for tensor in tensors]
    return packed, torch.stack(tensors).to(torch.float64) if tensors else None


def read_metrics(packed: Packed, rest: Any) -> dict[str, tuple[float, float]]:
    """Return metrics as numbers; ``rest`` iterates over the numbers of the row."""
    return {
        name: (next(rest) if total is None else total, next(rest) if number is None else number)
        for name, total, number in packed
    }


def not_finite(rank: int, step: int, reason: str, loss: float, norm: float, tensor: str | None = None) -> TrainError:
    """Return the error for a loss or gradient that is not finite; ``reason`` is a result of `decide`."""
    what, value = ("loss", loss) if reason == LOSS_FAULT else ("gradient", norm)
    where = f" (first in {tensor})" if tensor else ""
    return TrainError(
        f"rank {rank}, step {step}: the {what} is {value}{where}; expected a finite number. The step was not applied "
        "on any rank. Lower the learning rate, clip (max_grad_norm), check the batch, or skip such steps with "
        "on_nan='skip'.",
        rank=rank,
        step=step,
        tensor=tensor,
    )

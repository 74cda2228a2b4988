"""Result of a training step: a sum of losses and the number of items.

Only sums and counts add up across micro-batches and ranks. A mean of means is wrong as soon as two micro-batches have
different numbers of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flodl.errors import TrainError

NOTHING_COUNTED = "nothing was counted in this step"
LOSS_FAULT = "loss is not finite"
GRADIENT_FAULT = "gradient is not finite"
Metrics = Mapping[str, tuple[Any, Any]]  # sum and count by name


@dataclass(frozen=True)
class Loss:
    """The loss of one micro-batch as a sum and a count.

    Attributes:
        sum: 0-dimensional tensor, the sum of the losses of all counted items.
        count: number of counted items: samples, or tokens with a label that is not ignored. A number or a
            0-dimensional tensor.
        metrics: further figures as ``name: (sum, count)``; reported as means weighted by count.
        is_mean: True if ``sum`` is the mean instead; set by `mean`.
    """

    sum: Tensor
    count: float | Tensor
    metrics: Metrics = field(default_factory=dict)
    is_mean: bool = False

    @classmethod
    def mean(cls, value: Tensor, count: float | Tensor, metrics: Metrics | None = None) -> Loss:
        """Return the loss with the mean ``value`` over ``count`` items."""
        return cls(value, count, metrics or {}, is_mean=True)

    def as_sum(self) -> Tensor:
        """Return the sum, which adds up over micro-batches."""
        return _where_any(self.count, self.sum * self.count) if self.is_mean else self.sum

    def as_mean(self) -> Tensor:
        """Return the mean; 0 where nothing was counted, though the mean of nothing is NaN."""
        if self.is_mean:
            return self.sum
        # Weights of labels are counts too, and may be below 1.
        if isinstance(self.count, Tensor):
            return self.sum / torch.where(self.count > 0, self.count, 1)
        return self.sum / (self.count or 1)

    def summed(self) -> Tensor:
        """Return the sum without gradient, float64 ``()``, on the device of the loss."""
        if self.is_mean:
            # Multiplied in float64, so that the reported mean equals the given one.
            mean = self.sum.detach().to(torch.float64).reshape(())
            return _where_any(self.count, mean * self.count)
        return self.sum.detach().to(torch.float64).reshape(())

    def totals(self) -> Tensor:
        """Return ``(sum, count)`` without gradient, float64 ``(2,)``, on the device of the loss."""
        value = self.summed()
        if isinstance(self.count, Tensor):
            return torch.stack([value, self.count.to(value.device, torch.float64)])
        # Filled on the device: a copy from the host would wait for it.
        return torch.stack([value, value.new_full((), float(self.count))])


def _where_any(count: Any, value: Tensor) -> Tensor:
    """Return ``value``, or 0 if nothing was counted."""
    if isinstance(count, Tensor):
        return torch.where(count > 0, value, 0.0)
    # Its gradient is 0 too, although the mean of nothing is NaN.
    return value if count > 0 else torch.where(torch.zeros((), dtype=torch.bool, device=value.device), value, 0.0)


def as_loss(value: Any, samples: float) -> Loss:
    """Return the result of a training step as a `Loss`.

    Args:
        value: a `Loss`; a pair ``(sum, count)``; a mean over the samples of the micro-batch as a tensor; or a mapping
            or an object with such a tensor as ``loss``.
        samples: number of samples in the micro-batch, the count of a mean.

    Raises:
        TrainError: another type, or more than one number.
    """
    if isinstance(value, tuple) and len(value) == 2:
        value = Loss(*value)
    elif not isinstance(value, Loss):
        mean = value.get("loss") if isinstance(value, Mapping) else getattr(value, "loss", value)
        value = Loss.mean(mean, samples) if isinstance(mean, Tensor) else value
    if not isinstance(value, Loss) or not isinstance(value.sum, Tensor) or value.sum.numel() != 1:
        shape = tuple(value.sum.shape) if isinstance(value, Loss) and isinstance(value.sum, Tensor) else None
        raise TrainError(
            f"train_step: found {type(value).__name__}{f' of shape {shape}' if shape else ''}; expected "
            "Loss(sum, count), a pair (sum, count), or a mean as a tensor with one element, alone or as 'loss'.",
            found=type(value).__name__,
        )
    return value


def batch_len(batch: Any) -> int:
    """Return the number of samples in a batch.

    It is the attribute ``num_rows``, else the length of dimension 0 of the first tensor with a dimension, else the
    length of the first list of texts or numbers, else 1.
    """
    said = getattr(batch, "num_rows", None)
    if isinstance(said, int):
        return said
    found = _first_len(batch, lambda part: isinstance(part, Tensor) and part.dim() > 0)
    found = _first_len(batch, is_column) if found is None else found
    return 1 if found is None else found


def _first_len(batch: Any, counts: Callable[[Any], bool]) -> int | None:
    """Return the length of the first part of a batch for which ``counts`` is true, searching in order."""
    if counts(batch):
        return len(batch)
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    if not parts and hasattr(batch, "__dict__"):
        parts = [v for v in vars(batch).values() if isinstance(v, Tensor)]
    for part in parts:
        if isinstance(part, (Tensor, Mapping, list, tuple)):
            found = _first_len(part, counts)
            if found is not None:
                return found
    return None


def is_column(part: Any) -> bool:
    """Return True if a part of a batch is a list with one value for each row; tuples of numbers are sizes."""
    if isinstance(part, list):
        return bool(part) and all(isinstance(value, (str, bytes, int, float, type(None))) for value in part)
    return isinstance(part, tuple) and bool(part) and all(isinstance(value, (str, bytes)) for value in part)


def decide(loss: float, count: float, grad_norm: float) -> str:
    """Return why a step with these figures is not applied; an empty text if it is."""
    if not count:
        return NOTHING_COUNTED
    return LOSS_FAULT if not math.isfinite(loss) else "" if math.isfinite(grad_norm) else GRADIENT_FAULT

"""The interface of metrics, and metrics with one row of numbers as state.

A metric stores counts or sums, never logits, so that metrics of batches and of ranks can be added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

import torch
from torch import Tensor

from flodl.errors import DataError


@runtime_checkable
class Metric(Protocol):
    """Interface of an object that receives batches and returns named figures.

    The arguments of ``update`` differ between metrics.
    """

    def merge(self, other: Any) -> None:
        """Add the counts of ``other``, a metric of the same class and settings."""
        ...

    def compute(self) -> dict[str, float]:
        """Return the named figures."""
        ...

    def reset(self) -> None:
        """Set all counts to zero."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as JSON values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the counts."""
        ...


M = TypeVar("M", bound=Metric)


def merged(metric: M, states: Iterable[Mapping[str, Any]]) -> M:
    """Return ``metric`` with the sum of ``states``, for example from all ranks.

    Args:
        metric: a metric with the right settings; its counts are replaced.
        states: from :meth:`Metric.state_dict`, in rank order. Sums of floating-point numbers may differ in the last bit
            for another order.
    """
    metric.reset()
    part = deepcopy(metric)
    for state in states:
        part.load_state_dict(state)
        metric.merge(part)
    return metric


class Sums:
    """Base of metrics with one row of numbers as state, stored on the device of the batches.

    Args:
        size: how many numbers there are.
        dtype: int64 for counts, float64 for sums.
        key: name of the numbers in `state_dict`.
    """

    def __init__(self, size: int, *, dtype: torch.dtype = torch.int64, key: str = "counts") -> None:
        self._size, self._dtype, self._key = size, dtype, key
        self.reset()

    def reset(self) -> None:
        """Set all numbers to zero."""
        self._sums = torch.zeros(self._size, dtype=self._dtype)

    def _add(self, more: Tensor) -> None:
        self._sums = self._sums.to(more.device) + more

    def merge(self, other: Self) -> None:
        """Add the numbers of another rank."""
        self._add(other._sums.to(self._sums.device))

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers as JSON values."""
        return {self._key: self._sums.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the numbers.

        Raises:
            DataError: the state belongs to a metric with other settings.
        """
        sums = torch.tensor(state[self._key], dtype=self._dtype)
        if sums.numel() != self._size:
            raise DataError(
                f"{type(self).__name__}: found a saved state with {sums.numel()} {self._key}, expected {self._size}. "
                "Use equal settings, such as the number of classes.",
            )
        self._sums = sums

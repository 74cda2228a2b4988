"""What metrics keep whose state is one row of numbers that add up: batches, micro-batches and ranks alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from flodl.errors import DataError

__all__ = ["Sums"]


class Sums:
    """A row of counts or sums, on the device that batches come from; no update waits for it.

    Args:
        size: how many there are.
        dtype: int64 for counts, float64 for sums.
        key: what `state_dict` calls them.
    """

    def __init__(self, size: int, *, dtype: torch.dtype = torch.int64, key: str = "counts") -> None:
        self._size, self._dtype, self._key = size, dtype, key
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._sums = torch.zeros(self._size, dtype=self._dtype)

    def _add(self, more: Tensor) -> None:
        self._sums = self._sums.to(more.device) + more

    def merge(self, other: Self) -> None:
        """Add what another rank has counted."""
        self._add(other._sums.to(self._sums.device))

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers; JSON-able."""
        return {self._key: self._sums.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was counted elsewhere.

        Raises:
            DataError: it is of a metric with other settings.
        """
        sums = torch.tensor(state[self._key], dtype=self._dtype)
        if sums.numel() != self._size:
            raise DataError(
                f"{type(self).__name__}: the saved state has {sums.numel()} {self._key}, this metric has "
                f"{self._size}; the number of classes differs",
                found=sums.numel(),
                expected=self._size,
            )
        self._sums = sums

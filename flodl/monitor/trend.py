"""The history of a metric, and questions about it: falling, stalled, converged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from flodl.errors import GraphError


class Trend:
    """One value of a metric for each epoch, oldest first; does not change when the history grows.

    In every method ``window`` is a number of values from the end; 0 means all.

    Args:
        values: the history.
        name: name of the metric.
        epochs: epoch of each value, from 0; without gaps if None.
    """

    def __init__(self, values: Iterable[float], name: str = "", epochs: Iterable[int] | None = None) -> None:
        self.name = name
        self._values = tuple(values)
        self._epochs = tuple(range(len(self._values)) if epochs is None else epochs)

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[float]:
        return iter(self._values)

    def __repr__(self) -> str:
        return f"Trend({self.name!r}, {len(self)} values, latest={self.latest():g})"

    def values(self) -> list[float]:
        """Return all values."""
        return list(self._values)

    def by_epoch(self) -> dict[int, float]:
        """Return the values by epoch, from 0; epochs without a value are absent."""
        return dict(zip(self._epochs, self._values, strict=True))

    def last(self, window: int) -> list[float]:
        """Return the last ``window`` values, or fewer if there are not as many."""
        return list(self._values[-window:] if window > 0 else self._values)

    def latest(self) -> float:
        """Return the newest value, 0.0 if there is none."""
        return self._values[-1] if self._values else 0.0

    def mean(self, window: int = 0) -> float:
        """Return the mean, 0.0 if there is no value."""
        return mean(self.last(window))

    def min(self, window: int = 0) -> float:
        """Return the lowest value, infinity if there is none."""
        return min(self.last(window), default=math.inf)

    def max(self, window: int = 0) -> float:
        """Return the highest value, minus infinity if there is none."""
        return max(self.last(window), default=-math.inf)

    def slope(self, window: int = 0) -> float:
        """Return the slope of the least-squares line, for epochs at distance 1; 0.0 with fewer than two values."""
        values = self.last(window)
        if len(values) < 2:
            return 0.0
        middle, average = (len(values) - 1) / 2, mean(values)
        above = _total((x - middle) * (y - average) for x, y in enumerate(values))
        return above / _total((x - middle) ** 2 for x in range(len(values)))

    def improving(self, window: int = 0, *, mode: str = "min") -> bool:
        """Return whether the slope is negative for ``mode="min"``, positive for ``"max"``.

        Raises:
            GraphError: ``mode`` is neither.
        """
        if mode not in ("min", "max"):
            raise GraphError(f"improving: mode is {mode!r}, expected 'min' or 'max'", mode=mode)
        return self.slope(window) < 0 if mode == "min" else self.slope(window) > 0

    def stalled(self, window: int, tolerance: float) -> bool:
        """Return whether the absolute slope is below ``tolerance``."""
        return abs(self.slope(window)) < tolerance

    def converged(self, window: int, tolerance: float) -> bool:
        """Return whether the population variance is below ``tolerance``; False with fewer than two values."""
        values = self.last(window)
        average = mean(values)
        return len(values) > 1 and _total((value - average) ** 2 for value in values) / len(values) < tolerance


class TrendGroup(tuple[Trend, ...]):
    """Several trends. ``all_...`` of no trends is False."""

    def all_improving(self, window: int = 0, *, mode: str = "min") -> bool:
        """Return whether every trend improves."""
        return bool(self) and all(trend.improving(window, mode=mode) for trend in self)

    def any_improving(self, window: int = 0, *, mode: str = "min") -> bool:
        """Return whether any trend improves."""
        return any(trend.improving(window, mode=mode) for trend in self)

    def all_stalled(self, window: int, tolerance: float) -> bool:
        """Return whether every trend is stalled."""
        return bool(self) and all(trend.stalled(window, tolerance) for trend in self)

    def any_stalled(self, window: int, tolerance: float) -> bool:
        """Return whether any trend is stalled."""
        return any(trend.stalled(window, tolerance) for trend in self)

    def all_converged(self, window: int, tolerance: float) -> bool:
        """Return whether every trend has converged."""
        return bool(self) and all(trend.converged(window, tolerance) for trend in self)

    def any_converged(self, window: int, tolerance: float) -> bool:
        """Return whether any trend has converged."""
        return any(trend.converged(window, tolerance) for trend in self)

    def slopes(self, window: int = 0) -> list[float]:
        """Return the slopes."""
        return [trend.slope(window) for trend in self]

    def mean_slope(self, window: int = 0) -> float:
        """Return the mean of the slopes, 0.0 for no trends."""
        return mean(self.slopes(window))


def mean(values: Iterable[float]) -> float:
    """Return the mean, 0.0 of no values."""
    listed = list(values)
    return _total(listed) / len(listed) if listed else 0.0


def _total(values: Iterable[float]) -> float:
    """Return the sum, rounded once if it is finite; a diverging run produces infinity and NaN."""
    listed = list(values)
    try:
        return math.fsum(listed)
    except (OverflowError, ValueError):
        return sum(listed)

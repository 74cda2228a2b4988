"""The history of a metric, and what it says: falling, standing still, settled.

Formulas only; who fills the history is decided in `record`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from flodl.errors import GraphError
from flodl.monitor import sums

__all__ = ["Trend", "TrendGroup"]


class Trend:
    """One value an epoch of one metric, oldest first; it does not change when the history grows.

    In every method ``window`` counts values from the end, 0 meaning all.

    Args:
        values: the history.
        name: the metric.
        epochs: the epoch of each value, from 0; without gaps when None.
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
        """Return the whole history."""
        return list(self._values)

    def by_epoch(self) -> dict[int, float]:
        """Return each value under its epoch, from 0; an epoch without the metric is not there."""
        return dict(zip(self._epochs, self._values, strict=True))

    def last(self, window: int) -> list[float]:
        """Return the last ``window`` values, fewer when there are not as many; all for 0."""
        return list(self._values[-window:] if window > 0 else self._values)

    def latest(self) -> float:
        """Return the newest value, 0.0 when there is none."""
        return self._values[-1] if self._values else 0.0

    def mean(self, window: int = 0) -> float:
        """Return the mean, 0.0 when there is no value."""
        return sums.mean(self.last(window))

    def min(self, window: int = 0) -> float:
        """Return the lowest value, infinity when there is none."""
        return min(self.last(window), default=math.inf)

    def max(self, window: int = 0) -> float:
        """Return the highest value, minus infinity when there is none."""
        return max(self.last(window), default=-math.inf)

    def slope(self, window: int = 0) -> float:
        """Return the slope of the least-squares line through the values, an epoch being 1.

        0.0 when there are fewer than two.
        """
        values = self.last(window)
        if len(values) < 2:
            return 0.0
        middle, mean = (len(values) - 1) / 2, sums.mean(values)
        above = sums.total((x - middle) * (y - mean) for x, y in enumerate(values))
        return above / sums.total((x - middle) ** 2 for x in range(len(values)))

    def improving(self, window: int = 0, *, mode: str = "min") -> bool:
        """Return whether the slope goes the good way: down for ``mode="min"``, up for ``"max"``.

        Raises:
            GraphError: ``mode`` is neither.
        """
        if mode not in ("min", "max"):
            raise GraphError(f"improving: mode {mode!r}, expected 'min' or 'max'", mode=mode)
        return self.slope(window) < 0 if mode == "min" else self.slope(window) > 0

    def stalled(self, window: int, tolerance: float) -> bool:
        """Return whether the slope is nearer to 0 than ``tolerance``."""
        return abs(self.slope(window)) < tolerance

    def converged(self, window: int, tolerance: float) -> bool:
        """Return whether the population variance is below ``tolerance``; False with fewer than two values."""
        values = self.last(window)
        if len(values) < 2:
            return False
        mean = sums.mean(values)
        return sums.total((value - mean) ** 2 for value in values) / len(values) < tolerance


class TrendGroup:
    """Several trends asked one question. ``all_...`` of no trends is False.

    Args:
        trends: the members.
    """

    def __init__(self, trends: Sequence[Trend]) -> None:
        self._trends = tuple(trends)

    def __len__(self) -> int:
        return len(self._trends)

    def __iter__(self) -> Iterator[Trend]:
        return iter(self._trends)

    def _all(self, question: Callable[[Trend], bool]) -> bool:
        return bool(self._trends) and all(map(question, self._trends))

    def all_improving(self, window: int = 0, *, mode: str = "min") -> bool:
        """Return whether every trend improves."""
        return self._all(lambda trend: trend.improving(window, mode=mode))

    def any_improving(self, window: int = 0, *, mode: str = "min") -> bool:
        """Return whether a trend improves."""
        return any(trend.improving(window, mode=mode) for trend in self._trends)

    def all_stalled(self, window: int, tolerance: float) -> bool:
        """Return whether every trend stands still."""
        return self._all(lambda trend: trend.stalled(window, tolerance))

    def any_stalled(self, window: int, tolerance: float) -> bool:
        """Return whether a trend stands still."""
        return any(trend.stalled(window, tolerance) for trend in self._trends)

    def all_converged(self, window: int, tolerance: float) -> bool:
        """Return whether every trend has settled."""
        return self._all(lambda trend: trend.converged(window, tolerance))

    def any_converged(self, window: int, tolerance: float) -> bool:
        """Return whether a trend has settled."""
        return any(trend.converged(window, tolerance) for trend in self._trends)

    def slopes(self, window: int = 0) -> list[float]:
        """Return each slope."""
        return [trend.slope(window) for trend in self._trends]

    def mean_slope(self, window: int = 0) -> float:
        """Return the mean of the slopes, 0.0 for no trends."""
        return sums.mean(self.slopes(window))

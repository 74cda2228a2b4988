"""A curve of any length in bounded memory: neighbouring points are merged as it grows, and their range is kept.

The page's script has the same rules, so that it can continue a received curve.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

MAX_POINTS = 2000

Point = list[Any]
"""``[step, epoch, t, mean, low, high, count]``; a single value has the first four only when it is sent."""


class Series:
    """Values in order, each with a step, an epoch (a fraction) and a time in seconds. Steps never decrease.

    A value that is not finite is a gap: its mean is None.

    Attributes:
        points: stored points, oldest first: ``[step, epoch, t, mean, low, high, count]``.
        stride: number of values that one point may stand for.
    """

    __slots__ = ("max_points", "points", "stride")

    def __init__(self, max_points: int = MAX_POINTS, stride: int = 1, points: Iterable[Sequence[Any]] = ()) -> None:
        self.max_points, self.stride = max_points, stride
        self.points: list[Point] = []
        for point in points:
            self.add(point)

    def __len__(self) -> int:
        return len(self.points)

    @property
    def latest(self) -> float | None:
        """The mean of the last point."""
        return self.points[-1][3] if self.points else None

    def add(self, point: Sequence[Any]) -> None:
        """Add a value ``[step, epoch, t, value]``, or a point of merged values."""
        step, epoch, t, mean, *rest = point
        low, high, count = rest or (mean, mean, 1)
        last = self.points[-1] if self.points else None
        # Ranks that step on their own may report steps out of order.
        new = [step if last is None else max(step, last[0]), epoch, t, mean, low, high, count]
        if last is not None and last[6] + count <= self.stride:
            self.points[-1] = _merged(last, new)
            return
        self.points.append(new)
        while len(self.points) > self.max_points:
            points, self.stride = self.points, self.stride * 2
            even = len(points) // 2 * 2
            self.points = [_merged(points[i], points[i + 1]) for i in range(0, even, 2)] + points[even:]

    def cut(self, step: int) -> None:
        """Remove points after ``step``, which a resumed run repeats."""
        self.points = [point for point in self.points if point[0] <= step]

    def thinned(self, max_points: int) -> Series:
        """Return the series with at most so many points."""
        return self if len(self) <= max_points else Series(max_points, self.stride, self.points)

    def packed(self, digits: int = 6) -> list[Point]:
        """Return rounded points for JSON."""
        found = []
        for step, epoch, t, *values, count in self.points:
            rounded = [None if v is None or not math.isfinite(v) else float(f"{v:.{digits}g}") for v in values]
            found.append([step, round(epoch, 4), round(t, 2), *(rounded[:1] if count == 1 else [*rounded, count])])
        return found


def _merged(a: Point, b: Point) -> Point:
    """Return two neighbouring points as one, at the position of the later."""
    count = a[6] + b[6]
    if a[3] is None or b[3] is None:
        mean, low, high = (b if a[3] is None else a)[3:6]
    else:
        mean = (a[3] * a[6] + b[3] * b[6]) / count
        low, high = min(a[4], b[4]), max(a[5], b[5])
    return [b[0], b[1], b[2], mean, low, high, count]

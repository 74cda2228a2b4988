"""A curve of any length in bounded memory: neighbours are merged as it grows, and their range is kept.

The page has the same rules in its script, so that it may go on by itself from what it was sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

__all__ = ["MOST_POINTS", "Series"]

MOST_POINTS = 2000
"""Points that a curve has at most; one more, and each two neighbours become one."""

Point = list[Any]
"""``[step, epoch, t, mean, low, high, count]``; the last three are left out of a single value."""


class Series:
    """Values of a run in order, each at a step, an epoch (as a fraction) and a time. Steps never fall.

    A value that is not finite leaves a gap: its mean is None.

    Attributes:
        points: what is kept, oldest first: ``[step, epoch, t, mean, low, high, count]``.
        stride: values that one point stands for by now.
        changes: rises with everything that is added, for those who keep what they made of the points.
    """

    __slots__ = ("changes", "most", "points", "stride")

    def __init__(self, most: int = MOST_POINTS, stride: int = 1) -> None:
        self.most, self.stride = most, stride
        self.points: list[Point] = []
        self.changes = 0

    def __len__(self) -> int:
        return len(self.points)

    @property
    def latest(self) -> float | None:
        """The mean of the last point."""
        return self.points[-1][3] if self.points else None

    def add(self, point: Sequence[Any]) -> None:
        """Take in a value ``[step, epoch, t, value]``, or several that were merged (`Point`)."""
        step, epoch, t, mean, *rest = point
        low, high, count = rest or (mean, mean, 1)
        self.changes += 1
        if self.points and step < self.points[-1][0]:
            step = self.points[-1][0]  # ranks that step on their own know of each other's steps in between
        if self.points and self.points[-1][6] + count <= self.stride:
            self.points[-1] = _merged(self.points[-1], [step, epoch, t, mean, low, high, count])
            return
        self.points.append([step, epoch, t, mean, low, high, count])
        while len(self.points) > self.most:
            self._halve()

    def _halve(self) -> None:
        points, self.stride = self.points, self.stride * 2
        whole = len(points) // 2 * 2
        self.points = [_merged(points[i], points[i + 1]) for i in range(0, whole, 2)] + points[whole:]

    def cut(self, step: int) -> None:
        """Forget what lies behind ``step``: a run that is taken up again does those steps anew."""
        self.points = [point for point in self.points if point[0] <= step]
        self.changes += 1

    def packed(self, digits: int = 6) -> list[Point]:
        """Return the points as they are sent: rounded, single values without their range."""
        return [_packed(point, digits) for point in self.points]


def _merged(a: Point, b: Point) -> Point:
    """Return two neighbours as one, at the place of the later."""
    count = a[6] + b[6]
    if a[3] is None or b[3] is None:
        mean, low, high = (b if a[3] is None else a)[3:6]
    else:
        mean = (a[3] * a[6] + b[3] * b[6]) / count
        low, high = min(a[4], b[4]), max(a[5], b[5])
    return [b[0], b[1], b[2], mean, low, high, count]


def _packed(point: Point, digits: int) -> Point:
    step, epoch, t, mean, low, high, count = point
    head = [step, round(epoch, 4), round(t, 2), _rounded(mean, digits)]
    return head if count == 1 else [*head, _rounded(low, digits), _rounded(high, digits), count]


def _rounded(value: float | None, digits: int) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")

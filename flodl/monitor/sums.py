"""Sums of metrics, which may be anything a diverging run produces."""

from __future__ import annotations

import math
from collections.abc import Iterable

__all__ = ["mean", "total"]


def total(values: Iterable[float]) -> float:
    """Return the sum, rounded once where it is finite, else infinity or NaN as addition gives."""
    listed = list(values)
    try:
        return math.fsum(listed)
    except (OverflowError, ValueError):
        return sum(listed)


def mean(values: Iterable[float]) -> float:
    """Return the mean; 0.0 of nothing."""
    listed = list(values)
    return total(listed) / len(listed) if listed else 0.0

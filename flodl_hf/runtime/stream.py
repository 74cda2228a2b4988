"""Any iterable in, answers out in its order, a bounded number of texts in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

__all__ = ["WINDOW", "stream"]

T = TypeVar("T")
R = TypeVar("R")

# Enough texts to sort by length with little left over, few enough that the first answers come soon.
WINDOW = 1024


def stream(items: Iterable[T], step: Callable[[list[T]], list[R]], window: int = WINDOW) -> list[R] | Iterator[R]:
    """Return ``step`` of all items: a list for a list, an iterator for an iterator.

    Args:
        items: a sequence, or any iterable of any length.
        step: answers for some neighbouring items, in their order.
        window: how many items are answered at once.
    """
    if isinstance(items, Sequence):
        results: list[R] = []
        for start in range(0, len(items), window):
            results += step(list(items[start : start + window]))
        return results
    return _lazily(iter(items), step, window)


def _lazily(items: Iterator[T], step: Callable[[list[T]], list[R]], window: int) -> Iterator[R]:
    while chunk := list(islice(items, window)):
        yield from step(chunk)

"""Which rows run together. Pure functions of lengths."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["plan_batches"]


def plan_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return the rows' indices in batches, longest rows first, each batch of at most ``budget`` tokens.

    Sorting puts rows of one length side by side, which is what attention over a packed batch wants;
    the longest come first so that memory reaches its peak at once. A row above the budget runs alone.

    Args:
        lengths: tokens of each row.
        budget: most tokens of a batch.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches: list[list[int]] = []
    current: list[int] = []
    tokens = 0
    for index in order:
        if current and tokens + lengths[index] > budget:
            batches.append(current)
            current, tokens = [], 0
        current.append(index)
        tokens += lengths[index]
    if current:
        batches.append(current)
    return batches

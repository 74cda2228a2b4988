"""Which rows run together. Pure functions of lengths, and of the kind of a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["plan_batches", "usual_budget"]

# Small chunks keep activations in a processor's cache; an accelerator wants large products.
CPU_BUDGET = 1024
CUDA_BUDGET = 65_536


def usual_budget(kind: str) -> int:
    """Return how many tokens of a batch suit a kind of device, as ``device.type`` names it."""
    return CUDA_BUDGET if kind == "cuda" else CPU_BUDGET


def plan_batches(
    lengths: Sequence[int] | np.ndarray, budget: int, *, equal: bool = False, alone: bool = False
) -> list[np.ndarray]:
    """Return the rows' indices in batches, longest rows first, each batch of at most ``budget`` tokens.

    Sorting puts rows of one length side by side, which is what attention over a packed batch wants;
    the longest run first so that memory reaches its peak immediately. A row above the budget runs alone.

    Args:
        lengths: tokens of each row.
        budget: most tokens of a batch.
        equal: rows of one batch have one length.
        alone: each row is a batch.
    """
    if len(lengths) == 1:
        return [np.zeros(1, np.int64)]
    sizes = np.asarray(lengths, np.int64)
    order = np.argsort(-sizes, kind="stable")
    if alone or not len(order):
        return [order[i : i + 1] for i in range(len(order))]
    ends = np.cumsum(sizes[order])
    ordered = sizes[order]
    # The start of the next length, for each row; without ``equal`` only the budget ends a batch.
    limits = np.searchsorted(-ordered, -ordered, side="right") if equal else np.full(len(order), len(order))
    batches = []
    start = 0
    while start < len(order):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + budget, side="right"))
        stop = min(max(stop, start + 1), int(limits[start]))
        batches.append(order[start:stop])
        start = stop
    return batches

"""Batches of examples from one table each, without repeated texts; tables are mixed in proportion or alternate.

A pure function of seed and epoch, like all batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flodl.data.batches import EpochPlan
from flodl.data.rng import Rng
from flodl.data.samplers import digest

__all__ = ["TextBatches"]


@dataclass(frozen=True)
class TextBatches:
    """Batches for losses over the whole batch.

    Args:
        texts: for each table the text numbers, ``(rows, texts)``; -1 for a missing text.
        batch_size: examples of a batch.
        seed: decides the order.
        apart: for each table whether no text may come twice in a batch.
        mixing: "proportional" takes all batches of all tables in random order; "round_robin" one of each table in
            turn, until one is used up.
        least: minimum number of examples in a batch; a smaller rest of an epoch is dropped.
    """

    texts: Sequence[NDArray[np.int64]] = field(repr=False)
    batch_size: int
    seed: int = 42
    apart: Sequence[bool] = ()
    mixing: str = "proportional"
    least: int = 1

    def plan(self, epoch: int) -> EpochPlan:
        """Return the batches of ``epoch``."""
        found = self.by_table(epoch)
        if len(found) == 1:
            return EpochPlan.of(found[0])
        if self.mixing == "round_robin":
            return EpochPlan.of([part for turn in zip(*found, strict=False) for part in turn])
        batches = [part for parts in found for part in parts]
        return EpochPlan.of([batches[k] for k in Rng(self.seed, "tables", epoch).permutation(len(batches))])

    def by_table(self, epoch: int) -> list[list[NDArray[np.int64]]]:
        """Return the batches of ``epoch`` for each table, before they are mixed."""
        starts = np.cumsum([0, *(len(one) for one in self.texts)])
        found = []
        for i, texts in enumerate(self.texts):
            order = self._order(epoch, i)
            cut = _cut_apart(order, texts, self.batch_size) if self.apart and self.apart[i] else None
            cut = cut or [order[k : k + self.batch_size] for k in range(0, len(order), self.batch_size)]
            found.append([np.asarray(part) + starts[i] for part in cut if len(part) >= self.least])
        return found

    def notes(self) -> tuple[str, ...]:
        """Return, as a note, how many rows of the first epoch are moved or skipped because a text occurs twice."""
        moved = skipped = total = 0
        for i, batches in enumerate(self.by_table(0)):
            if not (self.apart and self.apart[i]):
                continue
            start, count = sum(map(len, self.texts[:i])), len(self.texts[i])
            planned = dict(zip(self._order(0, i).tolist(), range(count), strict=True))
            late = [
                planned[row - start] // self.batch_size < n for n, part in enumerate(batches) for row in part.tolist()
            ]
            moved, skipped, total = moved + sum(late), skipped + count - len(late), total + count
        if not moved:
            return ()
        return (
            f"no_duplicates: {moved:,} of {total:,} rows are in a later batch of the first epoch because the same text "
            f"is in their own, and {skipped:,} rows are skipped; no_duplicates=False keeps the batches",
        )

    def _order(self, epoch: int, table: int) -> NDArray[Any]:
        return Rng(self.seed, "order", epoch, table).permutation(len(self.texts[table]))

    def identity(self) -> dict[str, Any]:
        """Return the definition of the batches as JSON values."""
        return {
            "batches": "texts",
            "batch_size": self.batch_size,
            "batch_seed": self.seed,
            "apart": list(self.apart),
            "mixing": self.mixing,
            "least": self.least,
            "texts": [digest(one) for one in self.texts],
        }


def _cut_apart(order: NDArray[np.int64], texts: NDArray[np.int64], size: int) -> list[list[int]] | None:
    """Return batches in which no text comes twice, as near to the order as that allows; None where none ever would.

    A postponed example is the first candidate for the next batch.
    """
    there = texts[texts >= 0]
    if len(np.unique(there)) == there.size:
        return None
    rows = {row: {*texts[row].tolist()} - {-1} for row in order.tolist()}
    waiting, coming = deque[int](), deque(order.tolist())
    batches: list[list[int]] = []
    while waiting or coming:
        batch: list[int] = []
        seen: set[int] = set()
        held: list[int] = []
        while (waiting or coming) and len(batch) < size:
            row = waiting.popleft() if waiting else coming.popleft()
            if rows[row] & seen:
                held.append(row)
                continue
            batch.append(row)
            seen |= rows[row]
        waiting = deque([*held, *waiting])
        batches.append(batch)
    return batches

"""The counts of a whole optimiser step, for losses that are the sum of two means over different items.

Such a loss is a mean over masked tokens plus a mean over other items (all tokens, or pairs of texts). A micro-batch, or
the share of one rank, contains other proportions of both than the whole step. `CollateShares` therefore gives each
batch the factor with which its mean over masked tokens enters, so that the step does not depend on how it is split. The
length of a row determines how many of its tokens are masked; whole words are drawn once more to count them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from flodl.data import Where
from flodl_hf.tokenization.alignment import IGNORE, num_masked
from flodl_hf.training.rows import SPECIAL, CollateRows, EncodedRows, Masking, TakenRows

__all__ = ["CollateShares", "Counts", "MaskedTokens", "StepCounts"]


@dataclass(frozen=True)
class Counts:
    """Items of some rows (tokens, or the rows themselves), and how many tokens are masked."""

    items: int
    masked: int


@dataclass(frozen=True)
class MaskedTokens:
    """Returns the number of masked tokens of rows in a batch.

    Args:
        rows: all rows.
        masking: masks them; of whole words as many tokens as are drawn, otherwise by a row's length alone.
    """

    rows: EncodedRows
    masking: Masking
    _numbers: NDArray[np.int64] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        starts = self.rows.ends - self.rows.lengths
        free = np.add.reduceat((self.rows.columns["words"] != SPECIAL).astype(np.int64), starts).tolist()
        numbers = np.asarray([num_masked(count, self.masking.probability) for count in free], np.int64)
        object.__setattr__(self, "_numbers", numbers)

    def __call__(self, where: Where, indices: NDArray[np.int64]) -> int:
        """Return the number."""
        if not self.masking.whole_words:
            return int(self._numbers[indices].sum())
        return sum(self.masking.number(self.rows.get(i), where, i) for i in indices.tolist())


@dataclass(frozen=True)
class StepCounts:
    """Called with the place of a batch in a run, returns the counts of the optimiser step that it is part of.

    Args:
        batches: which rows form a batch.
        items: counted items of each row.
        masked: returns how many tokens are masked.
        accumulate: batches of a step.
    """

    batches: Any
    items: NDArray[np.int64]
    masked: MaskedTokens
    accumulate: int
    _plans: dict[int, Any] = field(default_factory=dict, compare=False, repr=False)
    _steps: dict[tuple[int, int, int], Counts] = field(default_factory=dict, compare=False, repr=False)

    def __call__(self, where: Where) -> Counts:
        """Return the counts."""
        key = where.seed, where.epoch, where.number // self.accumulate
        if key not in self._steps:
            if where.epoch not in self._plans:
                self._plans.clear()
                self._plans[where.epoch] = self.batches.plan(where.epoch)
            plan, first = self._plans[where.epoch], key[2] * self.accumulate
            rows = np.concatenate([plan[i] for i in range(first, min(first + self.accumulate, len(plan)))])
            self._steps.clear()
            self._steps[key] = Counts(int(self.items[rows].sum()), self.masked(where, rows))
        return self._steps[key]


@dataclass(frozen=True)
class CollateShares(CollateRows):
    """Makes batches with ``words_share``, the factor of the mean over masked tokens of a batch.

    Args:
        by_rows: the other mean is over rows; by default over tokens.
        counts: returns the counts of the step that a batch is part of.
    """

    by_rows: bool = False
    counts: Callable[[Where], Counts] | None = None

    @classmethod
    def of_step(
        cls, usual: CollateRows, rows: EncodedRows, batches: Any, accumulate: int, *, by_rows: bool, **given: Any
    ) -> Self:
        """Return a collate function with the layout of ``usual``, for steps of ``accumulate`` batches."""
        masking: Any = usual.masking
        items = np.ones(len(rows), np.int64) if by_rows else rows.lengths
        counts = StepCounts(batches, items, MaskedTokens(rows, masking), accumulate)
        same: dict[str, Any] = {f.name: getattr(usual, f.name) for f in fields(CollateRows)}
        return cls(**same, by_rows=by_rows, counts=counts, **given)

    def __call__(self, rows: Sequence[Mapping[str, Any]], where: Where) -> dict[str, Any]:
        """Return the parts of one batch."""
        batch = super().__call__(rows, where)
        lengths = rows.lengths if isinstance(rows, TakenRows) else [len(row["input_ids"]) for row in rows]
        items, masked, share = len(rows) if self.by_rows else int(np.sum(lengths)), _masked(batch), 1.0
        if self.counts is not None:
            whole = self.counts(where)
            share = (masked * whole.items) / (items * max(whole.masked, 1))
        return {**batch, "words_share": torch.tensor([share], dtype=torch.float64)}


def _masked(batch: Mapping[str, Any]) -> int:
    return int((batch["labels"] != IGNORE).sum())

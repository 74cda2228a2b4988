"""Batches for a generator and a discriminator: masked texts, where the masks are, and what words weigh in a step.

The loss is a mean over masked tokens and one over all tokens. For a step to be the same however it is cut, each part of
it has to know how many of both the whole step has. The length of a row says how many of its tokens are masked; whole
words are drawn once more for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flodl.data.collate import Where
from flodl_hf.alignment import IGNORE, num_masked
from flodl_hf.finetuning.noise import row_seeds
from flodl_hf.finetuning.rows import SPECIAL, CollateRows, EncodedRows, Masking, TakenRows

__all__ = ["CollateMasked", "Counts", "MaskedTokens", "StepCounts"]


@dataclass(frozen=True)
class Counts:
    """Tokens of some rows, and how many of them are masked."""

    tokens: int
    masked: int


@dataclass(frozen=True)
class MaskedTokens:
    """Called with the place of a batch and rows, returns how many tokens of these are masked there.

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
        batches: which rows come together.
        tokens: of each row.
        masked: tells how many are masked.
        accumulate: batches of a step.
    """

    batches: Any
    tokens: NDArray[np.int64]
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
            self._steps[key] = Counts(int(self.tokens[rows].sum()), self.masked(where, rows))
        return self._steps[key]


@dataclass(frozen=True)
class CollateMasked(CollateRows):
    """Makes a batch of masked texts; ``labels`` has the words behind masks.

    Besides there are, for each mask, ``mask_places``, where its token lies in the batch, ``mask_labels``, its word,
    ``mask_offsets``, its place in its row, and ``mask_seeds``, the seed of its row; ``attended``, which tokens are the
    rows' own; and ``words_share``, by which the mean over this batch's masks counts beside that over its tokens.
    Where batches come in few shapes masks are filled up to as many as a shape may have, with the word -100.

    Args:
        probability: share of tokens that are masked.
        counts: of the step that a batch is part of.
    """

    probability: float = 0.15
    counts: Callable[[Where], Counts] | None = None

    def __call__(self, rows: Sequence[Mapping[str, Any]], where: Where) -> dict[str, Any]:
        """Return the parts of one batch."""
        batch = super().__call__(rows, where)
        lengths = np.asarray(
            rows.lengths if isinstance(rows, TakenRows) else [len(row["input_ids"]) for row in rows], np.int64
        )
        labels = batch["labels"].numpy().reshape(-1)
        flat = np.flatnonzero(labels != IGNORE)
        if "attention_mask" in batch:
            attended = batch["attention_mask"].numpy() != 0
            row, offsets = np.divmod(flat, attended.shape[1])
            slots = len(attended)
        else:
            attended = np.arange(len(labels)) < lengths.sum()
            ends = np.cumsum(lengths)
            row = np.searchsorted(ends, flat, side="right")
            offsets = flat - (ends - lengths)[row]
            slots = len(batch["cu_seqlens"]) - 1
        # of each row a share, and one at least; more where the shortest word has more
        room = max(int(self.probability * labels.size) + slots, len(flat)) if self.settled else len(flat)
        seeds = row_seeds(where, where.indices, "sample")
        per_mask = {
            "mask_places": flat,
            "mask_labels": labels[flat],
            "mask_offsets": offsets,
            "mask_seeds": seeds[row],
        }
        for name, value in per_mask.items():
            filler = IGNORE if name == "mask_labels" else 0
            batch[name] = torch.from_numpy(np.pad(value, (0, room - len(flat)), constant_values=filler))
        batch["attended"] = torch.from_numpy(attended)
        batch["words_share"] = torch.tensor([self._share(int(lengths.sum()), len(flat), where)], dtype=torch.float64)
        return batch

    def _share(self, tokens: int, masked: int, where: Where) -> float:
        if self.counts is None:
            return 1.0
        whole = self.counts(where)
        return (masked * whole.tokens) / (tokens * whole.masked)

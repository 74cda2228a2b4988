"""Batches for a generator and a discriminator: masked texts, and the places of the masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from flodl.data import Where
from flodl_hf.tokenization.alignment import IGNORE
from flodl_hf.training.noise import row_seeds
from flodl_hf.training.rows import TakenRows
from flodl_hf.training.step_counts import CollateShares

__all__ = ["CollateMasked"]


@dataclass(frozen=True)
class CollateMasked(CollateShares):
    """Makes a batch of masked texts; ``labels`` has the words behind masks.

    Besides there are, for each mask, ``mask_places``, where its token lies in the batch, ``mask_labels``, its word,
    ``mask_offsets``, its place in its row, and ``mask_seeds``, the seed of its row; and ``attended``, which tokens are
    the rows' own. Where batches come in few shapes masks are filled up to as many as a shape may have, with the word
    -100.

    Args:
        probability: share of tokens that are masked.
    """

    probability: float = 0.15

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
        return batch

"""Vectors of texts put in place as they come: one array for all, each number written once.

Arrays, not tensors; the reason is in `flodl_hf.inference.batch`: a tensor operation on so many numbers would
wake a thread for every core, which then waits busily and slows down the threads that tokenise.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flodl_hf.inference.batch import Pending
from flodl_hf.inference.inputs import Encoded
from flodl_hf.inference.pooling import finish_embeddings

ALONE = 32_768
"""Numbers of which torch computes at most so many on one thread (``at::internal::GRAIN_SIZE``)."""


class Vectors:
    """The vectors of one call.

    Args:
        total: number of texts; None if unknown, and each part then has a separate array.
        normalize: scale vectors to length 1; the pass then gives lengths too (`Pooled.norm`).
    """

    def __init__(self, total: int | None, *, normalize: bool) -> None:
        self._total = total
        self._normalize = normalize
        self._whole: np.ndarray | None = None
        self._at = 0

    def take(self, texts: Sequence[str], encoded: Encoded, pending: Pending) -> Tensor:
        """Return the vectors of the next texts, ``(texts, features)``.

        Args:
            texts: the texts.
            encoded: their windows.
            pending: what `Pooled` gives of those.
        """
        owners = encoded.table.owners
        seen = np.bincount(owners, minlength=encoded.texts)
        split = len(owners) != encoded.texts
        out: np.ndarray | None = None
        # Windows of texts that have several, to be averaged before anything else.
        several: list[tuple[np.ndarray, np.ndarray]] = []
        for rows, _, values in pending.parts():
            width = values.shape[1] - self._normalize
            if out is None:
                out = self._room(len(texts), width)
            mine = owners[rows]
            if split:
                more = np.flatnonzero(seen[mine] > 1)
                several.append((rows[more], values[more, :width]))
            if self._normalize:
                # In place: the result of a batch is not shared, and no new memory is touched.
                np.divide(values[:, :width], values[:, width:], out=values[:, :width])
            # Vectors of several windows are overwritten below.
            out[mine] = values[:, :width]
        assert out is not None
        found = torch.from_numpy(out)
        if split:
            rows, values = (np.concatenate(parts) for parts in zip(*several, strict=True))
            # In the order of rows, regardless of the number of batches and devices: sums are then the same.
            order = np.argsort(rows)
            rows, values = rows[order], values[order]
            where, owner = np.unique(owners[rows], return_inverse=True)
            mean = _mean(values, owner, encoded.table.counts[rows])
            # So few numbers at a time that torch wakes no other thread.
            step = max(1, ALONE // mean.shape[1])
            for first in range(0, len(mean), step):
                part = torch.from_numpy(mean[first : first + step])
                out[where[first : first + step]] = finish_embeddings(part, normalize=self._normalize).numpy()
        return found

    def joined(self, parts: list[Tensor]) -> Tensor:
        """Return the vectors of all texts, ``(texts, features)``."""
        if self._whole is not None:
            return torch.from_numpy(self._whole)
        return torch.cat(parts)

    def _room(self, texts: int, width: int) -> np.ndarray:
        if self._total is None:
            return np.empty((texts, width), np.float32)
        if self._whole is None:
            self._whole = np.empty((self._total, width), np.float32)
        self._at += texts
        return self._whole[self._at - texts : self._at]


def _mean(vectors: np.ndarray, owner: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return one vector per text: the mean over its adjacent windows, weighted by their tokens."""
    if not len(owner):
        return vectors
    # A window without content still must count as one.
    weight = np.maximum(counts, 1).astype(np.float32)[:, None]
    starts = np.flatnonzero(np.diff(owner, prepend=-1))
    return np.add.reduceat(vectors * weight, starts, axis=0) / np.add.reduceat(weight, starts, axis=0)

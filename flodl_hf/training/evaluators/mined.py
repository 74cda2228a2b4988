"""How well texts that say the same are found among all texts of a collection."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from flodl.errors import DataError
from flodl_hf.inference.mining import paraphrase_mining

__all__ = ["mining_figures"]


def mining_figures(vectors: Any, duplicates: Iterable[tuple[int, int]], **mining: Any) -> dict[str, float]:
    """Return the average precision of mined pairs, and the best F1 with its threshold, precision and recall.

    Args:
        vectors: ``(texts, size)``.
        duplicates: pairs of places whose texts say the same.
        **mining: how many pairs are looked at, see `flodl_hf.inference.mining.paraphrase_mining`.

    Raises:
        DataError: there are no duplicates.
    """
    known = {(min(pair), max(pair)) for pair in duplicates}
    if not known:
        raise DataError("mining: found no duplicates; expected at least one pair", rows=0)
    names = ("average_precision", "f1", "precision", "recall", "threshold")
    pairs = paraphrase_mining(vectors, **mining)
    if not pairs:
        return dict.fromkeys(names, 0.0)
    scores = np.asarray([score for score, _, _ in pairs])
    right = np.cumsum([(i, j) in known for _, i, j in pairs])
    # pairs of one score are taken together
    ends = np.flatnonzero(np.append(scores[1:] != scores[:-1], True))
    found = right[ends]
    gained = np.diff(found, prepend=0)
    precision, recall = found / (ends + 1), found / len(known)
    f1 = np.where(gained > 0, 2 * found / (ends + 1 + len(known)), 0.0)
    best = int(f1.argmax())
    at = int(ends[best])
    if not f1[best]:
        return dict.fromkeys(names, 0.0)
    threshold = (scores[at] + scores[min(at + 1, len(scores) - 1)]) / 2
    average = float((precision * gained).sum() / len(known))
    figures = (average, f1[best], precision[best], recall[best], threshold)
    return dict(zip(names, map(float, figures), strict=True))

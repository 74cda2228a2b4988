"""How well candidates of a query are ordered by scores: MAP, MRR and nDCG of each query's own list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flodl.errors import DataError
from flodl_hf.inference.search import as_vectors
from flodl_hf.inference.similarity import MEASURES
from flodl_hf.training.evaluators.pairs import average_precision

__all__ = ["ranking_figures", "reranking_figures"]


def ranking_figures(scores: Sequence[Any], relevance: Sequence[Any], *, at: int = 10) -> dict[str, float]:
    """Return ``map``, ``mrr@k`` and ``ndcg@k``, means over the queries whose candidates differ in relevance.

    Args:
        scores: for each query the scores of its candidates.
        relevance: for each query what they are worth: 0 or 1, or grades from 0 on. MAP and MRR count all above 0.
        at: how many first candidates MRR and nDCG look at.

    Raises:
        DataError: a query has more or fewer scores than candidates, or none has anything to order.
    """
    rows = []
    for i, (one, worth) in enumerate(zip(scores, relevance, strict=True)):
        said, true = np.asarray(one, np.float64).ravel(), np.asarray(worth, np.float64).ravel()
        if len(said) != len(true):
            raise DataError(f"ranking: query {i} has {len(said)} scores for {len(true)} candidates; expected one each")
        if len(set(true.tolist())) < 2:
            continue
        first = np.flatnonzero(true[np.argsort(-said, kind="stable")][:at] > 0)
        reciprocal = 1.0 / (first[0] + 1) if len(first) else 0.0
        rows.append((average_precision(said, true > 0), reciprocal, _gain(said, true, at) / _gain(true, true, at)))
    if not rows:
        raise DataError("ranking: no query has candidates of different relevance; expected at least one")
    mean = np.mean(rows, axis=0)
    return {"map": float(mean[0]), f"mrr@{at}": float(mean[1]), f"ndcg@{at}": float(mean[2])}


def _gain(scores: Any, worth: Any, at: int) -> float:
    """Return the discounted gain; candidates with equal scores share what their places give (McSherry 2008)."""
    discounts = np.zeros(len(scores))
    discounts[:at] = 1.0 / np.log2(np.arange(2, min(at, len(scores)) + 2))
    _, groups, counts = np.unique(-scores, return_inverse=True, return_counts=True)
    means = np.bincount(groups, weights=worth) / counts
    ends = np.cumsum(counts) - 1
    shares = np.diff(np.cumsum(discounts)[ends], prepend=0.0)
    return float((means * shares).sum())


def reranking_figures(
    queries: Any, positives: Sequence[Any], negatives: Sequence[Any], *, at: int = 10, measure: str = "cosine"
) -> dict[str, float]:
    """Return the figures of `ranking_figures` where candidates are ordered by their vectors' similarity to the query's.

    Args:
        queries: ``(queries, size)``.
        positives: for each query the vectors of what belongs to it, ``(n, size)``.
        negatives: for each query those of other candidates.
    """
    asked = as_vectors(queries, "queries").float()
    scores, relevance = [], []
    for query, good, bad in zip(asked, positives, negatives, strict=True):
        if not len(good) or not len(bad):
            continue
        parts = [MEASURES[measure](query[None], as_vectors(part, "candidates").float())[0] for part in (good, bad)]
        scores.append(np.concatenate([part.cpu().numpy() for part in parts]))
        relevance.append([1] * len(good) + [0] * len(bad))
    return ranking_figures(scores, relevance, at=at)

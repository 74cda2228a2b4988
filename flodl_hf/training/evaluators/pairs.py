"""How alike pairs are, beside what is said of them: correlations, thresholds, triplets."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from flodl.errors import DataError
from flodl.metrics import Pearson, Spearman
from flodl_hf.inference.search import as_vectors
from flodl_hf.inference.similarity import PAIRWISE

__all__ = ["average_precision", "binary_figures", "similarity_figures", "threshold_figures", "triplet_figures"]


def similarity_figures(first: Any, second: Any, labels: Any, *, measure: str = "cosine") -> dict[str, float]:
    """Return ``pearson`` and ``spearman`` of the pairs' similarities with their numbers, as for STS.

    Args:
        first: ``(pairs, size)``.
        second: ``(pairs, size)``.
        labels: how alike they are said to be, ``(pairs,)``.
        measure: a name of `flodl_hf.inference.similarity.PAIRWISE`.
    """
    scores = _scores(first, second, measure, labels)
    pearson, spearman = Pearson(), Spearman()
    truth = torch.as_tensor(np.asarray(labels, dtype=np.float64))
    for metric in (pearson, spearman):
        metric.update(scores.double(), truth)
    return {"pearson": pearson.compute()["pearson"], "spearman": spearman.compute()["spearman"]}


def triplet_figures(anchors: Any, positives: Any, negatives: Any, *, measure: str = "cosine") -> dict[str, float]:
    """Return ``triplet_accuracy``, the share of anchors that are more like their positive than their negative."""
    near, far = _scores(anchors, positives, measure), _scores(anchors, negatives, measure)
    return {"triplet_accuracy": (near > far).double().mean().item()}


def binary_figures(first: Any, second: Any, labels: Any, *, measure: str = "cosine") -> dict[str, float]:
    """Return what a threshold on similarity can do for pairs that are alike (1) or not (0).

    ``accuracy`` and ``f1``, each with the threshold that is best for it, ``precision``, ``recall`` and ``mcc`` at that
    of F1, and ``ap``, the average precision, which needs none.
    """
    scores = _scores(first, second, measure, labels).double().numpy()
    return threshold_figures(scores, np.asarray(labels).astype(bool))


def threshold_figures(scores: Any, truth: Any) -> dict[str, float]:
    """Return the figures of `binary_figures` for scores and truth, numpy arrays ``(pairs,)``."""
    order = np.argsort(-scores, kind="stable")
    ranked, alike = scores[order], truth[order]
    ends = np.append(np.flatnonzero(np.diff(ranked)), len(ranked) - 1)  # the last pair above each threshold
    hits = np.cumsum(alike)[ends]
    taken, total, count = ends + 1, int(truth.sum()), len(truth)
    midway = [(ranked[end] + ranked[end + 1]) / 2 for end in ends[:-1]]
    bounds = np.array([*midway, ranked[-1]])
    right = hits + (count - total) - (taken - hits)
    best = int(right.argmax())
    nothing = count - total  # that none is alike may be the best that can be said
    all_apart = nothing >= right[best]
    accuracy = (nothing if all_apart else right[best]) / count
    f1 = np.where(hits > 0, 2 * hits / (taken + total), 0.0)
    at = int(f1.argmax())
    wrong, missed = taken[at] - hits[at], total - hits[at]
    sure = count - total - wrong
    square = float(taken[at]) * total * (count - total) * (sure + missed)
    return {
        "accuracy": float(accuracy),
        "accuracy_threshold": float(np.nextafter(ranked[0], np.inf) if all_apart else bounds[best]),
        "f1": float(f1[at]),
        "f1_threshold": float(bounds[at]),
        "precision": float(hits[at] / taken[at]),
        "recall": float(hits[at] / total) if total else 0.0,
        "ap": average_precision(scores, truth),
        "mcc": float((hits[at] * sure - wrong * missed) / np.sqrt(square)) if square else 0.0,
    }


def average_precision(scores: Any, truth: Any) -> float:
    """Return the mean precision at each recall that is reached; equal scores are taken together."""
    order = np.argsort(-scores, kind="stable")
    ranked, alike = scores[order], truth[order]
    ends = np.append(np.flatnonzero(np.diff(ranked)), len(ranked) - 1)
    hits = np.cumsum(alike)[ends]
    if not hits[-1]:
        return 0.0
    steps = np.diff(hits, prepend=0) / hits[-1]
    return float((steps * hits / (ends + 1)).sum())


def _scores(first: Any, second: Any, measure: str, labels: Any = None) -> torch.Tensor:
    """Return how alike each pair is, on the processor.

    Raises:
        DataError: there are not as many of each, or none.
    """
    a, b = as_vectors(first, "first"), as_vectors(second, "second")
    if len(a) != len(b) or not len(a) or (labels is not None and len(labels) != len(a)):
        labelled = "" if labels is None else f" and {len(labels)} labels"
        raise DataError(f"pairs: {len(a)} vectors beside {len(b)}{labelled}; expected as many of each, and some")
    return PAIRWISE[measure](a.float(), b.to(a.device).float()).cpu()

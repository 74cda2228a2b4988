"""Metrics of embeddings, with the names and values of sentence-transformers' evaluators.

Each function takes vectors and truth; nothing here runs a model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from flodl.errors import DataError
from flodl.metrics import Pearson, Spearman
from flodl_hf.inference.mining import paraphrase_mining
from flodl_hf.inference.search import as_vectors, semantic_search
from flodl_hf.inference.similarity import MEASURES, PAIRWISE

ROUNDS = 100


def clustering_figures(vectors: Any, labels: Sequence[Any], *, seed: int = 0, tries: int = 4) -> dict[str, float]:
    """Return ``neighbour_accuracy`` and ``v_measure`` of vectors with classes.

    The first is the share of texts with the class of their nearest neighbour; the second compares the classes with
    the same number of k-means clusters, the best of some tries.

    Args:
        vectors: ``(texts, size)``; only directions matter.
        labels: their classes.
        seed: seed of the initial centres.
        tries: number of k-means runs.

    Raises:
        DataError: there is not one class for each vector.
    """
    given = as_vectors(vectors, "vectors").float()
    _expect_equal("clustering", vectors=given, labels=labels)
    names, classes = np.unique(np.asarray(labels), return_inverse=True)
    unit = F.normalize(given, dim=-1)
    near = semantic_search(unit, unit, top_k=2, measure="dot").indices.numpy()
    other = np.where(near[:, 0] == np.arange(len(given)), near[:, 1], near[:, 0])
    groups = _groups(unit, len(names), seed, tries)
    accuracy = float((classes[other] == classes).mean())
    return {"neighbour_accuracy": accuracy, "v_measure": v_measure(classes, groups)}


def _expect_equal(what: str, **parts: Any) -> None:
    """Raise a `DataError` unless the parts have equal lengths."""
    if len({len(part) for part in parts.values()}) > 1:
        found = ", ".join(f"{len(part)} {name}" for name, part in parts.items())
        raise DataError(f"{what}: found {found}; expected equal numbers")


def v_measure(classes: Any, groups: Any) -> float:
    """Return the harmonic mean of homogeneity and completeness, from 0 to 1."""
    _, rows = np.unique(np.asarray(classes), return_inverse=True)
    _, columns = np.unique(np.asarray(groups), return_inverse=True)
    table = np.zeros((rows.max() + 1, columns.max() + 1))
    np.add.at(table, (rows, columns), 1.0 / len(rows))
    of_rows, of_columns = table.sum(1), table.sum(0)
    apart = of_rows[:, None] * of_columns[None]
    shared = float((table[table > 0] * np.log(table[table > 0] / apart[table > 0])).sum())
    entropies = [float(-(p * np.log(p)).sum()) for p in (of_rows, of_columns)]
    pure, whole = (shared / entropy if entropy else 1.0 for entropy in entropies)
    return 2 * pure * whole / (pure + whole) if pure + whole else 0.0


def _groups(unit: Tensor, count: int, seed: int, tries: int) -> Any:
    """Return the group of each vector, by k-means from far-apart beginnings (Arthur and Vassilvitskii 2007)."""
    draw = torch.Generator().manual_seed(seed)
    best, found = np.inf, torch.zeros(len(unit), dtype=torch.int64)
    for _ in range(tries):
        centres = unit[torch.randint(len(unit), (1,), generator=draw).to(unit.device)]
        while len(centres) < count:
            far = torch.cdist(unit, centres).amin(1).square().double().cpu()
            at = torch.multinomial(far if far.sum() > 0 else torch.ones_like(far), 1, generator=draw)
            centres = torch.cat([centres, unit[at.to(unit.device)]])
        groups = None
        for _ in range(ROUNDS):
            distances = torch.cdist(unit, centres)
            nearest = distances.argmin(1)
            if groups is not None and torch.equal(nearest, groups):
                break
            groups = nearest
            sums = torch.zeros_like(centres).index_add_(0, groups, unit)
            sizes = torch.bincount(groups, minlength=count)[:, None]
            centres = torch.where(sizes > 0, sums / sizes.clamp(min=1), centres)
        spread = float(torch.cdist(unit, centres).amin(1).square().sum())
        if groups is not None and spread < best:
            best, found = spread, groups
    return found.cpu().numpy()


def mining_figures(vectors: Any, duplicates: Iterable[tuple[int, int]], **mining: Any) -> dict[str, float]:
    """Return the average precision of mined pairs, and the best F1 with its threshold, precision and recall.

    Args:
        vectors: ``(texts, size)``.
        duplicates: pairs of indices of paraphrases.
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
    scores, ends, found = hits_above(
        np.asarray([score for score, _, _ in pairs]), np.asarray([(i, j) in known for _, i, j in pairs])
    )
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


def similarity_figures(first: Any, second: Any, labels: Any, *, measure: str = "cosine") -> dict[str, float]:
    """Return ``pearson`` and ``spearman`` of the pairs' similarities with their numbers, as for STS.

    Args:
        first: ``(pairs, size)``.
        second: ``(pairs, size)``.
        labels: labelled similarities, ``(pairs,)``.
        measure: a name of `flodl_hf.inference.similarity.PAIRWISE`.
    """
    scores, truth = _scores(first, second, measure, labels), torch.as_tensor(np.asarray(labels, dtype=np.float64))
    found = {}
    for name, metric in (("pearson", Pearson()), ("spearman", Spearman())):
        metric.update(scores.double(), truth)
        found[name] = metric.compute()[name]
    return found


def triplet_figures(anchors: Any, positives: Any, negatives: Any, *, measure: str = "cosine") -> dict[str, float]:
    """Return ``triplet_accuracy``, the share of anchors that are more like their positive than their negative."""
    near, far = _scores(anchors, positives, measure), _scores(anchors, negatives, measure)
    return {"triplet_accuracy": (near > far).double().mean().item()}


def binary_figures(first: Any, second: Any, labels: Any, *, measure: str = "cosine") -> dict[str, float]:
    """Return metrics of the best similarity threshold for pairs with the label 1 (similar) or 0.

    ``accuracy`` and ``f1``, each with the threshold that is best for it, ``precision``, ``recall`` and ``mcc`` at that
    of F1, and ``ap``, the average precision, which needs none.
    """
    scores = _scores(first, second, measure, labels).double().numpy()
    return threshold_figures(scores, np.asarray(labels).astype(bool))


def threshold_figures(scores: Any, truth: Any) -> dict[str, float]:
    """Return the figures of `binary_figures` for scores and truth, numpy arrays ``(pairs,)``."""
    ranked, ends, hits = hits_above(scores, truth)
    taken, total, count = ends + 1, int(truth.sum()), len(truth)
    midway = [(ranked[end] + ranked[end + 1]) / 2 for end in ends[:-1]]
    bounds = np.array([*midway, ranked[-1]])
    right = hits + (count - total) - (taken - hits)
    best = int(right.argmax())
    nothing = count - total  # predicting no similar pair may be best
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


def hits_above(scores: Any, truth: Any) -> tuple[Any, Any, Any]:
    """Return scores from the highest, the last place of each distinct one, and the true ones up to there."""
    order = np.argsort(-scores, kind="stable")
    ranked = scores[order]
    ends = np.append(np.flatnonzero(np.diff(ranked)), len(ranked) - 1)[: len(ranked)]  # without scores, none
    return ranked, ends, np.cumsum(truth[order])[ends]


def average_precision(scores: Any, truth: Any) -> float:
    """Return the mean precision at each recall that is reached; equal scores are taken together."""
    _, ends, hits = hits_above(scores, truth)
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
        raise DataError(f"pairs: {len(a)} vectors and {len(b)}; expected equal numbers of vectors and labels, above 0")
    return PAIRWISE[measure](a.float(), b.to(a.device).float()).cpu()


def ranking_figures(scores: Sequence[Any], relevance: Sequence[Any], *, at: int = 10) -> dict[str, float]:
    """Return ``map``, ``mrr@k`` and ``ndcg@k``, means over queries with candidates of different relevance.

    Args:
        scores: for each query the scores of its candidates.
        relevance: for each query the relevance of candidates: 0 or 1, or grades from 0. MAP and MRR count all above 0.
        at: how many first candidates MRR and nDCG look at.

    Raises:
        DataError: no query has anything to order, or there are more scores or fewer than candidates.
    """
    rows = []
    _expect_equal("ranking", scores=scores, relevance=relevance)
    for index, pair in enumerate(zip(scores, relevance, strict=True)):
        _expect_equal(f"ranking: query {index}", scores=np.ravel(pair[0]), relevance=np.ravel(pair[1]))
        said, true = np.stack([np.ravel(part) for part in pair]).astype(np.float64)
        if len(set(true.tolist())) < 2:
            continue
        first = np.flatnonzero(true[np.argsort(-said, kind="stable")][:at] > 0)
        reciprocal = 1.0 / (first[0] + 1) if len(first) else 0.0
        rows.append((average_precision(said, true > 0), reciprocal, _dcg(said, true, at) / _dcg(true, true, at)))
    if not rows:
        raise DataError("ranking: no query has candidates of different relevance; expected at least one")
    mean = np.mean(rows, axis=0)
    return {"map": float(mean[0]), f"mrr@{at}": float(mean[1]), f"ndcg@{at}": float(mean[2])}


def _dcg(scores: Any, worth: Any, at: int) -> float:
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
    """Return the metrics of `ranking_figures` for candidates ordered by similarity to the query.

    Args:
        queries: ``(queries, size)``.
        positives: for each query the vectors of what belongs to it, ``(n, size)``.
        negatives: for each query the vectors of other candidates.

    Raises:
        DataError: there are not as many of each, or no query has both.
    """
    asked = as_vectors(queries, "queries").float()
    _expect_equal("reranking", queries=asked, positives=positives, negatives=negatives)
    scores, relevance = [], []
    for query, good, bad in zip(asked, positives, negatives, strict=True):
        if not len(good) or not len(bad):
            continue
        parts = [MEASURES[measure](query[None], as_vectors(part, "candidates").float())[0] for part in (good, bad)]
        scores.append(np.concatenate([part.cpu().numpy() for part in parts]))
        relevance.append([1] * len(good) + [0] * len(bad))
    return ranking_figures(scores, relevance, at=at)


AT = {"accuracy": (1, 3, 5, 10), "precision": (1, 3, 5, 10), "recall": (1, 3, 5, 10), "mrr": (10,), "ndcg": (10,),
      "map": (100,)}  # fmt: skip


def retrieval_figures(
    queries: Any,
    corpus: Any,
    relevant: Sequence[Collection[int]],
    *,
    at: dict[str, Sequence[int]] | None = None,
    measure: str = "cosine",
    corpus_chunk_size: int = 50_000,
    device: torch.device | str | None = None,
) -> dict[str, float]:
    """Return figures such as ``ndcg@10``, means over the queries that have something to find.

    Args:
        queries: ``(queries, size)``.
        corpus: ``(texts, size)``.
        relevant: for each query the places in the corpus that belong to it.
        at: for each figure the numbers of first texts that it looks at, as `AT`.
        measure: a name of `flodl_hf.inference.similarity.MEASURES`.
        corpus_chunk_size: number of corpus vectors per chunk; does not change metrics.
        device: where to compute; None is where the corpus is.

    Raises:
        DataError: there is not one entry of ``relevant`` for each query, or none has anything to find.
    """
    asked = as_vectors(queries, "queries")
    sets = [frozenset(map(int, one)) for one in relevant]
    known = [i for i, one in enumerate(sets) if one]
    if not known or len(sets) != len(asked):
        raise DataError(
            f"retrieval: no query has a relevant text, or {len(asked)} queries have {len(sets)} sets of them"
        )
    wanted = {**AT, **(at or {})}
    deepest = max(k for numbers in wanted.values() for k in numbers)
    found = semantic_search(
        asked[known], corpus, top_k=deepest, measure=measure, corpus_chunk_size=corpus_chunk_size, device=device
    )
    return figures_of_found(found.indices.tolist(), [sets[i] for i in known], wanted)


def figures_of_found(
    results: Sequence[Sequence[int]], relevant: Sequence[Collection[int]], at: Mapping[str, Sequence[int]]
) -> dict[str, float]:
    """Return metrics such as ``ndcg@10`` of search results.

    Args:
        results: for each query places in the corpus, the best first.
        relevant: for each query the indices of relevant texts, at least one.
        at: for each figure the numbers of first texts that it looks at.
    """
    hits = np.array([[place in mine for place in row] for mine, row in zip(relevant, results, strict=True)])
    hits = hits.reshape(len(relevant), -1)
    counts = np.array([len(mine) for mine in relevant])
    wanted = [(name, k) for name, numbers in at.items() for k in numbers]
    return {f"{name}@{k}": float(_FIGURES[name](hits[:, :k], counts, k).mean()) for name, k in wanted}


def _gain(hits: Any, counts: Any, k: int) -> Any:
    discounts = 1.0 / np.log2(np.arange(k) + 2)
    best = np.cumsum(discounts)[np.minimum(counts, k) - 1]
    return (hits * discounts[: hits.shape[1]]).sum(1) / best


_FIGURES: dict[str, Any] = {
    "accuracy": lambda hits, counts, k: hits.any(1),
    "precision": lambda hits, counts, k: hits.sum(1) / k,
    "recall": lambda hits, counts, k: hits.sum(1) / counts,
    "mrr": lambda hits, counts, k: np.where(hits.any(1), 1.0 / (hits.argmax(1) + 1), 0.0),
    "ndcg": _gain,
    "map": lambda hits, counts, k: (
        (np.cumsum(hits, 1) / (np.arange(hits.shape[1]) + 1) * hits).sum(1) / np.minimum(k, counts)
    ),
}


def matryoshka_curve(
    figures: Callable[..., Mapping[str, float]],
    vectors: Sequence[Any],
    dims: Sequence[int],
    *further: Any,
    **named: Any,
) -> dict[int, dict[str, float]]:
    """Return the metrics of vectors truncated to each size.

    ::

        matryoshka_curve(retrieval_figures, [queries, corpus], [256, 128, 64], relevant)

    Args:
        figures: a function of this package.
        vectors: its first arguments, each ``(n, size)``.
        dims: sizes.
        *further: its arguments after the vectors.
        **named: its keyword arguments.
    """
    whole = [as_vectors(part, "vectors") for part in vectors]
    return {dim: dict(figures(*(part[:, :dim] for part in whole), *further, **named)) for dim in dims}

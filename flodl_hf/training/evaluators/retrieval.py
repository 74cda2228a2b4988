"""Whether queries find what belongs to them: accuracy, precision, recall, MRR, nDCG and MAP at k."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from flodl.errors import DataError
from flodl_hf.inference.search import as_vectors, semantic_search

__all__ = ["figures_of_found", "retrieval_figures"]

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
        corpus_chunk_size: vectors of the corpus at once; changes no figure.
        device: where to compute; None is where the corpus is.

    Raises:
        DataError: there is not one entry of ``relevant`` for each query, or none has anything to find.
    """
    asked = as_vectors(queries, "queries")
    if len(relevant) != len(asked):
        raise DataError(f"retrieval: {len(relevant)} lists of what belongs to {len(asked)} queries; expected one each")
    sets = [frozenset(map(int, one)) for one in relevant]
    known = [i for i, one in enumerate(sets) if one]
    if not known:
        raise DataError("retrieval: no query has a text that belongs to it; expected at least one")
    wanted = {**AT, **(at or {})}
    deepest = max(k for numbers in wanted.values() for k in numbers)
    found = semantic_search(
        asked[known], corpus, top_k=deepest, measure=measure, corpus_chunk_size=corpus_chunk_size, device=device
    )
    return figures_of_found(found.indices.tolist(), [sets[i] for i in known], wanted)


def figures_of_found(
    found: Sequence[Sequence[int]], relevant: Sequence[Collection[int]], at: Mapping[str, Sequence[int]]
) -> dict[str, float]:
    """Return figures such as ``ndcg@10`` of what was found, however it was searched.

    Args:
        found: for each query places in the corpus, the best first.
        relevant: for each query those that belong to it, one at least.
        at: for each figure the numbers of first texts that it looks at.
    """
    hits = np.array([[place in mine for place in row] for mine, row in zip(relevant, found, strict=True)])
    hits = hits.reshape(len(relevant), -1)
    counts = np.array([len(mine) for mine in relevant])
    figures = {}
    for name, numbers in at.items():
        for k in numbers:
            figures[f"{name}@{k}"] = float(_FIGURES[name](hits[:, :k], counts, k).mean())
    return figures


def _reciprocal(hits: Any, counts: Any, k: int) -> Any:
    return np.where(hits.any(1), 1.0 / (hits.argmax(1) + 1), 0.0)


def _gain(hits: Any, counts: Any, k: int) -> Any:
    discounts = 1.0 / np.log2(np.arange(k) + 2)
    best = np.cumsum(discounts)[np.minimum(counts, k) - 1]
    return (hits * discounts[: hits.shape[1]]).sum(1) / best


def _average_precision(hits: Any, counts: Any, k: int) -> Any:
    precisions = np.cumsum(hits, 1) / (np.arange(hits.shape[1]) + 1)
    return (precisions * hits).sum(1) / np.minimum(k, counts)


_FIGURES: dict[str, Any] = {
    "accuracy": lambda hits, counts, k: hits.any(1),
    "precision": lambda hits, counts, k: hits.sum(1) / k,
    "recall": lambda hits, counts, k: hits.sum(1) / counts,
    "mrr": _reciprocal,
    "ndcg": _gain,
    "map": _average_precision,
}

"""Mine pairs from a corpus: paraphrases, and hard negatives for training."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch

from flodl.errors import DataError
from flodl_hf.inference.search import as_vectors, semantic_search
from flodl_hf.inference.similarity import PAIRWISE

__all__ = ["hard_negatives", "paraphrase_mining"]


def paraphrase_mining(
    embeddings: Any, *, top_k: int = 100, max_pairs: int = 500_000, measure: str = "cosine", **search: Any
) -> list[tuple[float, int, int]]:
    """Return the most alike pairs of one collection, ``(score, i, j)`` with i below j, the most alike first.

    Args:
        embeddings: ``(texts, size)``.
        top_k: for each text so many others are looked at.
        max_pairs: most pairs.
        measure: a name of `flodl_hf.inference.similarity.MEASURES`.
        **search: sizes of blocks and the device, see `semantic_search`.
    """
    vectors = as_vectors(embeddings, "embeddings")
    found = semantic_search(vectors, vectors, top_k=top_k + 1, measure=measure, **search)
    first = torch.arange(len(vectors))[:, None].expand_as(found.indices)
    kept = first != found.indices
    kept &= kept.cumsum(1) <= top_k  # where a text is not found by itself, others like it stood before
    low, high = torch.minimum(first, found.indices)[kept], torch.maximum(first, found.indices)[kept]
    _, at = np.unique((low * len(vectors) + high).numpy(), return_index=True)
    scores, low, high = found.scores[kept][at], low[at], high[at]
    order = scores.sort(descending=True, stable=True).indices[:max_pairs]
    return list(zip(scores[order].tolist(), low[order].tolist(), high[order].tolist(), strict=True))


def hard_negatives(
    anchors: Any,
    corpus: Any,
    positives: Sequence[Collection[int]],
    *,
    count: int = 3,
    range_min: int = 0,
    range_max: int = 100,
    max_score: float | None = None,
    min_score: float | None = None,
    absolute_margin: float | None = None,
    relative_margin: float | None = None,
    sampling: str = "top",
    seed: int = 42,
    measure: str = "cosine",
    **search: Any,
) -> list[list[int]]:
    """Return for each anchor texts of the corpus that are near to it and do not belong to it, at most ``count``.

    Texts nearer than the anchor's positive, or nearly as near, may be unlabelled positives: margins exclude them.

    Args:
        anchors: ``(anchors, size)``.
        corpus: ``(texts, size)``.
        positives: for each anchor the places of what belongs to it; margins are measured from the least alike of them.
        count: negatives for each anchor.
        range_min: leave out so many of the nearest others.
        range_max: look no further than so many of the nearest others.
        max_score: exclude candidates with a higher score.
        min_score: exclude candidates with a lower score.
        absolute_margin: minimum score gap to the anchor's positive.
        relative_margin: the same as a share of how alike that is.
        sampling: "top" takes the nearest remaining candidates, "random" draws.
        seed: seed of the draw.
        measure: a name of `flodl_hf.inference.similarity.MEASURES`.
        **search: sizes of blocks and the device, see `semantic_search`.

    Raises:
        DataError: there is not one entry of ``positives`` for each anchor, or a sampling that is unknown.
    """
    asked, texts = as_vectors(anchors, "anchors").float(), as_vectors(corpus, "corpus").float()
    if len(positives) != len(asked) or not all(positives):
        raise DataError(f"mine: {len(positives)} lists of positives for {len(asked)} anchors; expected some for each")
    if sampling not in ("top", "random"):
        raise DataError(f"mine: sampling is {sampling!r}; expected top or random")
    most = range_max + max(len(set(one)) for one in positives)
    found = semantic_search(asked, texts, top_k=most, measure=measure, **search)
    draw = np.random.default_rng(seed)
    chosen = []
    for i, (scores, places) in enumerate(zip(found.scores.tolist(), found.indices.tolist(), strict=True)):
        own = sorted(set(positives[i]))
        near = float(PAIRWISE[measure](asked[i][None], texts[own].to(asked.device)).min())
        bounds = [bound for bound in (max_score,) if bound is not None]
        bounds += [near - absolute_margin] if absolute_margin is not None else []
        bounds += [near - abs(near) * relative_margin] if relative_margin is not None else []
        others = [(score, place) for score, place in zip(scores, places, strict=True) if place not in own]
        left = [
            place
            for score, place in others[range_min:range_max]
            if all(score <= bound for bound in bounds) and (min_score is None or score >= min_score)
        ]
        if sampling == "random" and len(left) > count:
            left = [left[k] for k in sorted(draw.choice(len(left), count, replace=False).tolist())]
        chosen.append(left[:count])
    return chosen

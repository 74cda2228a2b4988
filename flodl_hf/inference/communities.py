"""Groups of texts that are alike, found by a threshold alone: no number of groups has to be known.

A group contains all texts near its centre; the largest groups are formed first and remove their texts.
Scores are made in blocks, twice: once to count neighbours, once for the centres that are still free, so that neither
a table of all scores nor all lists of neighbours are ever there.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch

from flodl_hf.inference.search import CORPUS, as_vectors, check_numbers

__all__ = ["community_detection"]

CENTRES = 64
"""Centres with neighbours listed together; an earlier centre in the block may remove later ones."""


def community_detection(
    embeddings: Any,
    threshold: float = 0.75,
    min_community_size: int = 10,
    batch_size: int = 1024,
    *,
    device: torch.device | str | None = None,
) -> list[list[int]]:
    """Return groups of texts with a cosine of at least ``threshold`` to their centre, the largest group first.

    The groups equal sentence-transformers' for its function of this name; of equal scores the text with the lower index
    comes first.

    Args:
        embeddings: ``(texts, size)``.
        threshold: least cosine with the centre.
        min_community_size: leave out smaller groups; the centre counts.
        batch_size: rows of a block of scores.
        device: where to compute; None is where the embeddings are.

    Returns:
        Indices of texts; in each group the centre is first, then the others from the nearest on.

    Raises:
        PredictError: a size below 1, or no vectors.
    """
    vectors = as_vectors(embeddings, "embeddings")
    check_numbers("community_detection", {"min_community_size": min_community_size, "batch_size": batch_size})
    if len(vectors) < min_community_size:
        return []
    place = torch.device(device) if device is not None else vectors.device
    unit = torch.nn.functional.normalize(vectors.to(place, torch.float32), dim=-1)
    counts = torch.cat(
        [
            torch.stack([(block @ texts.T >= threshold).sum(1) for texts in unit.split(CORPUS)]).sum(0)
            for block in unit.split(batch_size)
        ]
    ).cpu()
    order = [i for i in counts.sort(descending=True, stable=True).indices.tolist() if counts[i] >= min_community_size]
    taken = torch.zeros(len(unit), dtype=torch.bool)
    found: list[list[int]] = []
    rest = iter(order)
    # Whether a centre is removed is checked when its block begins, and again at its turn.
    while chosen := list(islice((centre for centre in rest if not taken[centre]), CENTRES)):
        scores = unit[chosen] @ unit.T
        for centre, row in zip(chosen, scores, strict=True):
            if taken[centre]:
                continue
            near = (row >= threshold).nonzero().flatten()
            near = near[row[near].sort(descending=True, stable=True).indices].cpu()
            free = near[~taken[near]]
            if len(free) >= min_community_size:
                found.append([centre, *free[free != centre].tolist()])
                taken[found[-1]] = True
    return sorted(found, key=len, reverse=True)

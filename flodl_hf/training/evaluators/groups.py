"""Whether vectors of a class lie together: the nearest neighbour's class, and groups found without looking at classes.

The V-measure is that of Rosenberg and Hirschberg 2007.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from flodl.errors import DataError
from flodl_hf.inference.search import as_vectors, semantic_search

__all__ = ["clustering_figures", "v_measure"]

ROUNDS = 100


def clustering_figures(vectors: Any, labels: Sequence[Any], *, seed: int = 0, tries: int = 4) -> dict[str, float]:
    """Return ``neighbour_accuracy`` and ``v_measure`` of vectors with classes.

    The first is the share of texts whose most alike other text is of their class; the second compares the classes with
    as many groups found by k-means, the tightest of some tries.

    Args:
        vectors: ``(texts, size)``; directions alone count.
        labels: their classes.
        seed: decides where groups begin.
        tries: how often they are sought.

    Raises:
        DataError: there is not a class for each text, or fewer than two texts.
    """
    given = as_vectors(vectors, "vectors").float()
    names, classes = np.unique(np.asarray(labels), return_inverse=True)
    if len(given) != len(classes) or len(given) < 2:
        raise DataError(f"clustering: {len(given)} vectors with {len(classes)} classes; expected as many, and some")
    unit = F.normalize(given, dim=-1)
    near = semantic_search(unit, unit, top_k=2, measure="dot").indices.numpy()
    other = np.where(near[:, 0] == np.arange(len(given)), near[:, 1], near[:, 0])
    groups = _groups(unit, len(names), seed, tries)
    accuracy = float((classes[other] == classes).mean())
    return {"neighbour_accuracy": accuracy, "v_measure": v_measure(classes, groups)}


def v_measure(classes: Any, groups: Any) -> float:
    """Return the harmonic mean of how pure groups are and how whole classes are, from 0 to 1."""
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

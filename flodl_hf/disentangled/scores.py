"""Scores of disentangled attention: content to content, content to position, position to content.

``score[i, j] = (q_i . k_j + q_i . pk[r(i - j)] + k_j . pq[r(i - j)]) / sqrt(H * terms)`` with ``r`` the table
row of a distance (He et al. 2020, section 3.1). Decides how that is computed; masks, softmax and
dropout are the attention's.

Shapes: G rows of the batch times heads, S tokens of a row, N heads, H width of a head, R table rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["IMPLEMENTATIONS", "PositionTables", "disentangled_scores", "score_scale"]

IMPLEMENTATIONS = ("eager",)


class PositionTables(NamedTuple):
    """One layer's projections of the table of distances, heads apart.

    Attributes:
        key: what queries look up, ``(N, R, H)``; None where content does not attend to position.
        query: what keys look up, ``(N, R, H)``; None where position does not attend to content.
    """

    key: Tensor | None
    query: Tensor | None


def score_scale(head_size: int, terms: int, dtype: torch.dtype) -> Tensor:
    """Return ``sqrt(head_size * terms)``, a scalar on the CPU, rounded by way of float32 as the reference does."""
    return torch.sqrt(torch.tensor(head_size, dtype=torch.float32) * terms).to(dtype)


def disentangled_scores(
    query: Tensor, key: Tensor, tables: PositionTables | None, index: Tensor | None, terms: int
) -> Tensor:
    """Return the scores of every query for every key, ``(G, S, S)``, computed as the reference does.

    In float16 the projected positions are divided before the product rather than the product after
    it, because the product can pass 65504; other dtypes keep the reference's order.

    Args:
        query: ``(G, S, H)``, heads of one text next to each other.
        key: like ``query``.
        tables: projected positions; None for scores of content alone.
        index: table row for each query and key, ``(S, S)``.
        terms: how many kinds of score there are, content included; it scales all of them.
    """
    scale = score_scale(query.shape[-1], terms, query.dtype)
    scores = torch.bmm(query, key.transpose(-1, -2) / scale)
    if tables is None or index is None:
        return scores
    position: Tensor | None = None
    if tables.key is not None:
        position = _looked_up(query, tables.key, index, scale)
    if tables.query is not None:
        # Read by key, so the distance changes sign; that is the transposed index.
        from_keys = _looked_up(key, tables.query, index, scale, by_key=True)
        position = from_keys if position is None else position + from_keys
    return scores if position is None else scores + position


def _looked_up(
    states: Tensor, table: Tensor, index: Tensor, scale: Tensor, *, by_key: bool = False
) -> Tensor:
    """Return ``states . table[index] / scale`` for every pair, query by key, ``(G, S, S)``."""
    narrow = states.dtype == torch.float16
    rows = (table / scale if narrow else table).repeat(states.shape[0] // table.shape[0], 1, 1)
    products = torch.bmm(states, rows.transpose(-1, -2))
    pairs = (index.t() if by_key else index).expand(states.shape[0], -1, -1)
    found = torch.gather(products, dim=-1, index=pairs)
    if by_key:
        found = found.transpose(-1, -2)
    return found if narrow else found / scale

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

from flodl_hf.nn.attention.disentangled.positions import Relative

# "eager" is the reference to the bit; "fast" is `fast`. Any other word means the reference.
IMPLEMENTATIONS = ("eager", "fast")


class PositionTables(NamedTuple):
    """One layer's projections of the table of distances, heads apart.

    Attributes:
        key: what queries look up, ``(N, R, H)``; None where content does not attend to position.
        query: what keys look up, ``(N, R, H)``; None where position does not attend to content.
    """

    key: Tensor | None
    query: Tensor | None

    def divided(self, scale: float) -> PositionTables:
        """Return the tables divided by ``scale``."""
        return PositionTables(*(None if table is None else table / scale for table in self))

    def to(self, dtype: torch.dtype) -> PositionTables:
        """Return the tables in another dtype."""
        return PositionTables(*(None if table is None else table.to(dtype) for table in self))

    def rows(self, window: slice) -> PositionTables:
        """Return some rows of the tables, as views."""
        return PositionTables(*(None if table is None else table[:, window] for table in self))

    def heads(self, some: slice) -> PositionTables:
        """Return the tables of some heads, as views."""
        return PositionTables(*(None if table is None else table[some] for table in self))

    def fits(self, states: Tensor) -> bool:
        """Return whether the tables are of the dtype and on the device of ``states``."""
        return all(t is None or (t.dtype == states.dtype and t.device == states.device) for t in self)


def score_scale(head_size: int, terms: int, dtype: torch.dtype) -> Tensor:
    """Return ``sqrt(head_size * terms)`` as a scalar on the CPU, rounded in float32 first like the reference's."""
    return torch.sqrt(torch.tensor(head_size, dtype=torch.float32) * terms).to(dtype)


def disentangled_scores(
    query: Tensor, key: Tensor, tables: PositionTables | None, relative: Relative | None, terms: int
) -> Tensor:
    """Return the scores of every query for every key, ``(G, S, S)``, computed as the reference does.

    In float16 the projected positions are divided before the product rather than the product after
    it, because the product can pass 65504; other dtypes keep the reference's order.

    Args:
        query: ``(G, S, H)``, heads of one text next to each other.
        key: like ``query``.
        tables: projected positions; None for scores of content alone.
        relative: which table row belongs to each pair of tokens.
        terms: how many kinds of score there are, content included; it scales all of them.
    """
    scale = score_scale(query.shape[-1], terms, query.dtype)
    length = query.shape[1]
    scores = torch.bmm(query, key.transpose(-1, -2) / scale)
    if tables is None or relative is None:
        return scores
    position: Tensor | None = None
    if tables.key is not None:
        position = _looked_up(query, tables.key, relative.index_for(length), scale)
    if tables.query is not None:
        index = relative.index_for(length, by_key=True)
        from_keys = _looked_up(key, tables.query, index, scale).transpose(-1, -2)
        position = from_keys if position is None else position + from_keys
    return scores if position is None else scores + position


def query_scaled_scores(
    query: Tensor, key: Tensor, tables: PositionTables | None, relative: Relative | None, terms: int
) -> Tensor:
    """Return the scores of every query for every key, ``(B, N, S, S)``, computed as the first version's reference does.

    It divides queries and position queries rather than scores.

    Args:
        query: ``(B, N, S, H)``; ``key`` alike.
        key: like ``query``.
        tables: projected positions, the rows of ``relative.reached``, queries divided; None for content alone.
        relative: which table row belongs to each pair of tokens.
        terms: how many kinds of score there are, content included; it scales all of them.
    """
    length = query.shape[2]
    scale = score_scale(query.shape[-1], terms, query.dtype)
    query = query / scale
    scores = torch.matmul(query, key.transpose(-1, -2))
    if tables is None or relative is None:
        return scores
    shape = (*query.shape[:3], length)
    position: Tensor | None = None
    if tables.key is not None:
        index = relative.index_for(length) - relative.reached.start
        position = torch.gather(torch.matmul(query, tables.key[None].transpose(-1, -2)), -1, index.expand(shape))
    if tables.query is not None:
        index = relative.index_for(length, by_key=True) - relative.reached.start
        products = torch.matmul(key, tables.query[None].transpose(-1, -2))
        from_keys = torch.gather(products, -1, index.expand(shape)).transpose(-1, -2)
        position = from_keys if position is None else position + from_keys
    return scores if position is None else scores + position


def _looked_up(states: Tensor, table: Tensor, index: Tensor, scale: Tensor) -> Tensor:
    """Return ``states . table[index] / scale``, row by the token that looks up, ``(G, S, S)``."""
    narrow = states.dtype == torch.float16
    rows = (table / scale if narrow else table).repeat(states.shape[0] // table.shape[0], 1, 1)
    products = torch.bmm(states, rows.transpose(-1, -2))
    found = torch.gather(products, dim=-1, index=index.expand(states.shape[0], -1, -1))
    return found if narrow else found / scale

"""Scores of disentangled attention: content to content, content to position, position to content.

`disentangled_scores` and `query_scaled_scores` have the reference's bits. `attend_fast` computes the same sums in
another order, equal up to rounding, for inference on CPUs and where no kernel fits: projected positions are not
repeated for every text, rows of the table that no distance of the batch reaches are not projected, near distances are
read by strides instead of gathered, and one fused kernel does softmax and mix.

``score[i, j] = (q_i . k_j + q_i . pk[r(i - j)] + k_j . pq[r(i - j)]) / sqrt(H * terms)`` with ``r`` the table
row of a distance (He et al. 2020, section 3.1). Decides how that is computed; masks, softmax and
dropout are the attention's.

Shapes: G rows of the batch times heads, S tokens of a row, N heads, H width of a head, R table rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from flodl_hf.nn.disentangled.parts import Relative


class PositionTables(NamedTuple):
    """One layer's projections of the table of distances, heads apart.

    Attributes:
        key: what queries look up, ``(N, R, H)``; None where content does not attend to position.
        query: what keys look up, ``(N, R, H)``; None where position does not attend to content.
    """

    key: Tensor | None
    query: Tensor | None

    def each(self, change: Callable[[Tensor], Tensor]) -> PositionTables:
        """Return the tables changed by a function."""
        return PositionTables(*(None if table is None else change(table) for table in self))

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
    scores = torch.bmm(query, key.transpose(-1, -2) / scale)
    return _with_positions(scores, query, key, tables, relative, partial(_looked_up, scale=scale))


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
    query = query / score_scale(query.shape[-1], terms, query.dtype)
    scores = torch.matmul(query, key.transpose(-1, -2))

    def look_up(states: Tensor, table: Tensor, index: Tensor) -> Tensor:
        assert relative is not None
        products = torch.matmul(states, table[None].transpose(-1, -2))
        return torch.gather(products, -1, (index - relative.reached.start).expand(scores.shape))

    return _with_positions(scores, query, key, tables, relative, look_up)


def _with_positions(
    scores: Tensor, query: Tensor, key: Tensor, tables: PositionTables | None, relative: Relative | None,
    look_up: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:  # fmt: skip
    """Return scores with those of distances; ``look_up(states, table, index)`` has a row by the token that looks up."""
    if tables is None or relative is None:
        return scores
    position: Tensor | None = None
    if tables.key is not None:
        position = look_up(query, tables.key, relative.index_for(query.shape[-2]))
    if tables.query is not None:
        index = relative.index_for(query.shape[-2], by_key=True)
        from_keys = look_up(key, tables.query, index).transpose(-1, -2)
        position = from_keys if position is None else position + from_keys
    return scores if position is None else scores + position


def _looked_up(states: Tensor, table: Tensor, index: Tensor, scale: Tensor) -> Tensor:
    """Return ``states . table[index] / scale``, row by the token that looks up, ``(G, S, S)``."""
    narrow = states.dtype == torch.float16
    rows = (table / scale if narrow else table).repeat(states.shape[0] // table.shape[0], 1, 1)
    products = torch.bmm(states, rows.transpose(-1, -2))
    found = torch.gather(products, dim=-1, index=index.expand(states.shape[0], -1, -1))
    return found if narrow else found / scale


# Numbers in one block of position scores: 8 MB stay in a core's share of the last cache level.
_CPU_BLOCK = 1 << 21
# Cache size of one core: 4 MB.
_THREAD_BLOCK = 1 << 20
# A head of 512 tokens, 1 MB: measured, one a thread at a time is 3 % quicker for the whole encoder.
_LONG_HEAD = 1 << 18
_DEVICE_BLOCK = 1 << 26
# Rows with a power of two as length share few cache sets when read by columns; this padding avoids it.
_STAGGER = 16


def attend_fast(
    keep: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *,
    tables: PositionTables | None, relative: Relative | None, num_heads: int, scale: float, dropout: float,
) -> Tensor:  # fmt: skip
    """Return the mixed values of texts of one length, ``(B, S, N*H)`` in and out.

    Args:
        keep: True for keys that are real tokens, ``(B, S)``; None for all.
        query: ``(B, S, N*H)``; ``key`` and ``value`` alike.
        tables: projected positions already divided by ``scale``, the rows of ``relative.window``.
        relative: distances of the call.
        num_heads: N.
        scale: what scores are divided by.
        dropout: probability of dropping an attention weight.
    """
    batch, length, width = query.shape
    split = (batch, length, num_heads, width // num_heads)
    q, k, v = query.view(split), key.view(split), value.view(split)
    if tables is None or relative is None or (tables.key is None and tables.query is None):
        mask = None if keep is None else keep[:, None, None, :]
        return _mix(q, k, v, mask, scale, dropout)
    limit = _CPU_BLOCK if query.device.type == "cpu" else _DEVICE_BLOCK
    columns = 2 * length if length - 1 <= relative.reach else max(t.shape[1] for t in tables if t is not None)
    step = max(1, limit // (num_heads * length * columns))
    heads = _heads_at_once(num_heads, length * columns, query.device)
    parts = []
    for start in range(0, batch, step):
        rows = slice(start, start + step)
        drop = None if keep is None else ~keep[rows, None, None, :]
        mixed = []
        for first in range(0, num_heads, heads):
            some = slice(first, first + heads)
            bias = _bias(q[rows, :, some], k[rows, :, some], tables.each(itemgetter(some)), relative)
            if drop is not None:
                bias = bias.masked_fill(drop, torch.finfo(bias.dtype).min)
            mixed.append(_mix(q[rows, :, some], k[rows, :, some], v[rows, :, some], bias, scale, dropout))
        parts.append(torch.cat(mixed, -1) if len(mixed) > 1 else mixed[0])
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _heads_at_once(num_heads: int, numbers: int, device: torch.device) -> int:
    """Return how many heads to score together, each of so many numbers.

    One thread works through few heads at a time, which fit into its cache. Several wait for each other at the end of
    every step, which costs them more than that saves, unless a head alone is long work.
    """
    if device.type != "cpu":
        return num_heads
    threads = torch.get_num_threads()
    if numbers >= _LONG_HEAD:
        return min(num_heads, threads)
    if threads > 1:
        return num_heads
    return max(1, min(num_heads, _THREAD_BLOCK // numbers))


def _mix(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, dropout: float) -> Tensor:
    """Return ``softmax(q k^T / scale + bias) v`` for ``(B, S, N, H)`` as ``(B, S, N*H)``."""
    q4, k4, v4 = (x.transpose(1, 2) for x in (q, k, v))
    mixed = F.scaled_dot_product_attention(q4, k4, v4, attn_mask=bias, dropout_p=dropout, scale=1.0 / scale)
    return mixed.transpose(1, 2).reshape(*q.shape[:2], -1)


def _bias(q: Tensor, k: Tensor, tables: PositionTables, relative: Relative) -> Tensor:
    """Return the position scores of every query for every key, ``(B, N, S, S)``."""
    near = q.shape[1] - 1 <= relative.reach
    look_up = _sheared if near else _gathered
    from_keys = None
    if tables.query is not None:
        from_keys = look_up(k, tables.query, relative, by_key=True).transpose(-1, -2)
    if tables.key is None:
        assert from_keys is not None
        return from_keys.contiguous()
    bias = look_up(q, tables.key, relative, by_key=False)
    if from_keys is None:
        return bias.contiguous()
    # A gathered tensor is not shared; a sheared one is a view with overlapping entries.
    own = look_up is _gathered and not torch.is_grad_enabled()
    return bias.add_(from_keys) if own else bias + from_keys


def _products(states: Tensor, table: Tensor) -> Tensor:
    """Return ``states . table`` for ``(B, S, N, H)`` and ``(N, R, H)``, one product a head, as ``(N, B*S, R)``."""
    batch, length, heads, size = states.shape
    flat = states.reshape(batch * length, heads, size).transpose(0, 1)
    return torch.bmm(flat, table.transpose(1, 2))


def _sheared(states: Tensor, table: Tensor, relative: Relative, *, by_key: bool) -> Tensor:
    """Return position scores ``(B, N, S, S)``, row by the token that looks up, where each distance has a row.

    Column ``c`` of the product belongs to the partner ``row + c - (S - 1)``, so row ``i`` starts one column
    earlier than row ``i - 1``: a view with a smaller row stride.
    """
    batch, length, heads, _ = states.shape
    width = 2 * length - 1
    middle = table.shape[1] // 2
    rows = table[:, middle - length + 1 : middle + length]
    # Columns are ordered by partner minus token: for keys that is query minus key, for queries its opposite.
    products = _products(states, rows if by_key else rows.flip(1))
    strides = (length * width, batch * length * width, width - 1, 1)
    return products.as_strided((batch, heads, length, length), strides, products.storage_offset() + length - 1)


def _gathered(states: Tensor, table: Tensor, relative: Relative, *, by_key: bool) -> Tensor:
    """Return position scores ``(B, N, S, S)``, row by the token that looks up, where far distances share rows."""
    batch, length, heads, _ = states.shape
    products = _products(states, table).view(heads, batch, length, -1).transpose(0, 1)
    index = relative.index_for(length, by_key=by_key)
    if relative.window.start:
        index = index - relative.window.start
    shape = (batch, heads, length, length)
    if not by_key or torch.is_grad_enabled():
        return torch.gather(products, -1, index.expand(shape))
    # Its columns are read next; a staggered row keeps those reads in different cache sets.
    out = products.new_empty(batch, heads, length, length + _STAGGER)[..., :length]
    return torch.gather(products, -1, index.expand(shape), out=out)

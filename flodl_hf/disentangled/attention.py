"""The attention module of DeBERTa-v2 and v3: projections, scores, mask, softmax, mix.

Knows both layouts and the order of dropouts; the scores themselves are `scores`', distances are
`positions`'. Shapes: B texts, S tokens of a row, T tokens in all, N heads, H width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flodl_hf.attention import equal_runs
from flodl_hf.disentangled.positions import Relative
from flodl_hf.disentangled.scores import PositionTables, disentangled_scores
from flodl_hf.layout import Layout, Packed

__all__ = ["DisentangledAttention"]


class DisentangledAttention(nn.Module):
    """Self-attention over content and relative position, with its output projection.

    Args:
        hidden_size: width of a token's state.
        num_heads: heads; divides ``hidden_size``.
        attention_dropout: probability of dropping a weight, in [0, 1).
        hidden_dropout: probability of dropping an output value or a value of the table of distances, in [0, 1).
        kinds: which position scores there are: "c2p" (content to position), "p2c" (position to content).
        relative: whether positions are scored at all; without it ``kinds`` still scales the scores.
        share_keys: positions go through the projections of content rather than through their own.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        attention_dropout: float,
        hidden_dropout: float,
        *,
        kinds: tuple[str, ...],
        relative: bool = True,
        share_keys: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.relative = relative
        self.content_to_position = "c2p" in kinds
        self.position_to_content = "p2c" in kinds
        self.terms = 1 + self.content_to_position + self.position_to_content
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        own = relative and not share_keys
        self.pos_key = nn.Linear(hidden_size, hidden_size) if own and self.content_to_position else None
        self.pos_query = nn.Linear(hidden_size, hidden_size) if own and self.position_to_content else None
        self.position_dropout = nn.Dropout(hidden_dropout)
        self.attention_dropout = nn.Dropout(attention_dropout)
        self.output = nn.Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(hidden_dropout)

    def forward(self, hidden: Tensor, layout: Layout, relative: Relative | None = None) -> Tensor:
        """Return the attended states, shaped like ``hidden``: ``(B, S, hidden)`` or ``(T, hidden)``."""
        query, key, value = self.query(hidden), self.key(hidden), self.value(hidden)
        tables = self.position_tables(relative.table) if self.relative and relative is not None else None
        if isinstance(layout, Packed):
            parts: list[Tensor] = []
            for start, count, length in equal_runs(layout.lengths):
                rows = slice(start, start + count * length)
                shape = (count, length, -1)
                run = (query[rows].view(shape), key[rows].view(shape), value[rows].view(shape))
                parts.append(self._rows(*run, None, tables, relative).view(count * length, -1))
            mixed = torch.cat(parts) if len(parts) > 1 else parts[0]
        else:
            mixed = self._rows(query, key, value, _pairs(layout.mask), tables, relative)
        return self.dropout(self.output(mixed))

    def position_tables(self, table: Tensor) -> PositionTables:
        """Return this layer's projections of the table of distances, ``(2 * span, hidden)`` in."""
        # The view makes one point a layer where gradients of both projections meet before layers add up: the
        # reference's order, and so its bits.
        table = self.position_dropout(table).view_as(table)
        pos_key = pos_query = None
        if self.position_to_content:
            pos_query = self._heads((self.pos_query or self.query)(table))
        if self.content_to_position:
            pos_key = self._heads((self.pos_key or self.key)(table))
        return PositionTables(pos_key, pos_query)

    def _heads(self, table: Tensor) -> Tensor:
        return table.view(table.shape[0], self.num_heads, -1).transpose(0, 1).contiguous()

    def _rows(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pairs: Tensor | None,
        tables: PositionTables | None,
        relative: Relative | None,
    ) -> Tensor:
        """Return the mixed values of texts of one length, ``(B, S, hidden)`` in and out."""
        batch, length, width = query.shape
        q, k, v = (x.view(batch, length, self.num_heads, -1).transpose(1, 2).reshape(batch * self.num_heads, length, -1)
                   for x in (query, key, value))  # fmt: skip
        index = None if relative is None else relative.index_for(length)
        scores = disentangled_scores(q, k, tables, index, self.terms).view(
            batch, self.num_heads, length, length
        )
        if pairs is not None:
            # The dtype's lowest number rather than -inf: a row without any real token stays finite.
            scores = scores.masked_fill(~pairs, torch.finfo(scores.dtype).min)
        weights = self.attention_dropout(F.softmax(scores, dim=-1))
        mixed = torch.bmm(weights.view(batch * self.num_heads, length, length), v)
        return mixed.view(batch, self.num_heads, length, -1).transpose(1, 2).reshape(batch, length, width)


def _pairs(mask: Tensor | None) -> Tensor | None:
    """Return which query may look at which key, ``(B, 1, S, S)``: both have to be real tokens."""
    return None if mask is None else mask[:, None, None, :] & mask[:, None, :, None]

"""Disentangled attention for prediction: fused products, and positions projected once for a model.

What `flodl_hf.runtime.prepared` puts in the place of `DisentangledAttention` when a model predicts in
anything but "exact". Weights must not change; what is prepared is made anew when they do.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flodl_hf.attention import joined
from flodl_hf.disentangled.attention import DisentangledAttention
from flodl_hf.disentangled.positions import Relative
from flodl_hf.disentangled.scores import PositionTables
from flodl_hf.layout import Layout

__all__ = ["FusedDisentangledAttention"]


class FusedDisentangledAttention(DisentangledAttention):
    """`DisentangledAttention` whose weights stay: nothing is dropped, and projected positions are kept.

    Args:
        source: where weights come from; query, key and value are copied, the rest is shared. Its "sdpa"
            becomes "fast", its "eager" stays.
    """

    def __init__(self, source: DisentangledAttention) -> None:
        nn.Module.__init__(self)
        self.num_heads = source.num_heads
        self.relative = source.relative
        self.content_to_position = source.content_to_position
        self.position_to_content = source.position_to_content
        self.implementation = "fast" if source.implementation == "sdpa" else source.implementation
        self.held = None
        self.terms = source.terms
        self.scale = source.scale
        self.position_dropout = nn.Identity()
        self.attention_dropout = nn.Dropout(0.0)
        self.qkv = joined(source.query, source.key, source.value)
        self.pos_key = source.pos_key
        self.pos_query = source.pos_query
        self.output = source.output

    def forward(self, hidden: Tensor, layout: Layout, relative: Relative | None = None) -> Tensor:
        """Return the attended states, shaped like ``hidden``: ``(B, S, hidden)`` or ``(T, hidden)``."""
        query, key, value = self.qkv(hidden).chunk(3, dim=-1)
        return self.output(self.mixed(query, key, value, layout, relative))

    def position_tables(self, table: Tensor) -> PositionTables:
        """Return this layer's projections of the table of distances, ``(2 * span, hidden)`` in."""
        shared = self.pos_key is None and self.pos_query is None
        query, key, _ = self.qkv(table).chunk(3, dim=-1) if shared else (None, None, None)
        if self.pos_query is not None:
            query = self.pos_query(table)
        if self.pos_key is not None:
            key = self.pos_key(table)
        return PositionTables(
            self._heads(key) if key is not None and self.content_to_position else None,
            self._heads(query) if query is not None and self.position_to_content else None,
        )

    def _scaled_tables(self, relative: Relative, states: Tensor) -> PositionTables:
        if torch.is_grad_enabled():
            return super()._scaled_tables(relative, states)
        held = self.held
        if held is None or not held.fits(states):
            held = self.position_tables(relative.table).divided(self.scale).to(states.dtype)
            # Numbers made during a recording exist only while it is replayed.
            if not (states.is_cuda and torch.cuda.is_current_stream_capturing()):
                self.held = held
        return held.rows(relative.window)

"""The encoder layer: attention and a feed-forward part, each added to its input, and norms.

Defines the computation of a layer, for all families: the order of norms, gated or plain feed-forward parts, with
or without biases. A table computes each operation (`flodl_hf.nn.backends`): the reference arithmetic unless
another table is assigned. All families use the names given here: ``attention.query``, ``feed_forward.up``, ...
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from flodl_hf.nn.layers.activations import Activation
from flodl_hf.nn.layers.parts import products
from flodl_hf.nn.layers.table import TORCH, Table
from flodl_hf.nn.layout.layouts import Layout

Order = Literal["post", "pre"]


class FeedForward(nn.Module):
    """Two projections with an activation between, applied to each token alone.

    Args:
        hidden_size: width in and out.
        intermediate_size: width between.
        activation: a name of `flodl_hf.nn.layers.activations.ACTIVATIONS`.
        dropout: probability of dropping an output value, in [0, 1).
        gated: multiply by a third projection: ``down(activation(gate(x)) * up(x))`` (Shazeer 2020) in place of
            ``down(activation(up(x)))``.
        bias: whether projections add a bias.
        down_bias: the same for the last one alone; None as ``bias``.
        inner_dropout: probability of dropping a value between the projections, in [0, 1); None where there is none.
        joined: whether the reference has one matrix for gate and up.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        dropout: float,
        *,
        gated: bool = False,
        bias: bool = True,
        down_bias: bool | None = None,
        inner_dropout: float | None = None,
        joined: bool = False,
    ) -> None:
        super().__init__()
        self.joined = joined
        self.gate = nn.Linear(hidden_size, intermediate_size, bias=bias) if gated else None
        self.up = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.activation = Activation(activation)
        self.inner_dropout = inner_dropout
        self.down = nn.Linear(intermediate_size, hidden_size, bias=bias if down_bias is None else down_bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the transformed states, shaped like ``hidden``."""
        if self.gate is None:
            wide = self.activation(self.up(hidden))
        else:
            both = (self.gate, self.up)
            opened, wide = products(hidden, *both) if self.joined else (part(hidden) for part in both)
            wide = self.activation(opened) * wide
        return self.dropout(self.down(self.dropped(wide)))

    def dropped(self, wide: Tensor) -> Tensor:
        """Return the input of the last projection."""
        return F.dropout(wide, self.inner_dropout, self.training) if self.inner_dropout else wide


class EncoderLayer(nn.Module):
    """One layer of an encoder.

    Args:
        attention: mixes states; called with states, ``layout`` and the layer's further keyword arguments.
        feed_forward: transforms each state.
        attention_norm: after the sum with attention ("post"), or before attention ("pre").
        feed_forward_norm: the same for the feed-forward part.
        order: "post" normalises sums (Devlin et al. 2018), "pre" the input of each part.

    Attributes:
        table: computes the operations; never saved, copied or pickled with the layer.
        first_only: whether only the state of each text's first token is wanted; set on the last layer of a graph
            that predicts, where nothing else is read.
    """

    def __init__(
        self,
        attention: nn.Module,
        feed_forward: FeedForward,
        attention_norm: nn.Module,
        feed_forward_norm: nn.Module,
        order: Order = "post",
    ) -> None:
        super().__init__()
        self.attention = attention
        self.attention_norm = attention_norm
        self.feed_forward = feed_forward
        self.feed_forward_norm = feed_forward_norm
        self.order: Order = order
        self.table: Table = TORCH
        self.first_only = False

    def forward(self, hidden: Tensor, layout: Layout, **kwargs: Any) -> Tensor:
        """Return the layer's states, shaped like ``hidden``; ``(texts, hidden)`` with ``first_only``.

        Args:
            hidden: ``(batch, seq, hidden)`` or ``(tokens, hidden)``.
            layout: which tokens belong together.
            **kwargs: further keyword arguments of attention.
        """
        table = self.table.begin(self, hidden, layout, kwargs)
        first = self.first_only
        if self.order == "post":
            branch = table.attend(self, hidden, layout, kwargs, first)
            residual = layout.first(hidden) if first else hidden
            hidden = table.add_norm(self, self.attention_norm, branch, residual, layout)
            branch = table.transform(self, hidden, layout)
            return table.add_norm(self, self.feed_forward_norm, branch, hidden, layout)
        branch = table.attend(self, table.norm(self.attention_norm, hidden, layout), layout, kwargs, first)
        residual = layout.first(hidden) if first else hidden
        hidden, normed = table.add_then_norm(self, self.feed_forward_norm, branch, residual, layout)
        return table.add(self, table.transform(self, normed, layout), hidden, layout)

    def extra_repr(self) -> str:
        """Show the order of norms, and the table where it is not torch's, in ``print(model)``."""
        return f"order={self.order}" + ("" if self.table is TORCH else f", table={self.table.name}")

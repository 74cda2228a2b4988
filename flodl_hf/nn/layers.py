"""The encoder layer: attention and a feed-forward part, each added to its input, norms, and activations.

Defines the computation of a layer, for all families: the order of norms, gated or plain feed-forward parts, with or
without biases. A table computes each operation: `Table` is the reference arithmetic, in the order of the reference
implementation; `flodl_hf.nn.backends` has subclasses that override operations. What attention and feed-forward hand to
the sum that follows them, a branch, is the table's own affair: in `Table` it is the finished tensor; a table that adds
the residual inside the last product leaves that product undone.

Names of activations that share a curve but not their rounding (``gelu_new`` and ``gelu_pytorch_tanh``) are kept apart,
because equality to the bit is decided by the order of operations. One name of transformers is missing: ``xielu`` keeps
constants as stored buffers, and no checkpoint of these families uses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flodl_hf.nn.adapter_layers import hooked
from flodl_hf.nn.joined_tensors import products
from flodl_hf.nn.layout import Layout

_TANH_SCALE = math.sqrt(2.0 / math.pi)


def _gelu_new(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(_TANH_SCALE * (x + 0.044715 * torch.pow(x, 3.0))))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_10": lambda x: torch.clip(F.gelu(x), -10, 10),
    "gelu_accurate": _gelu_new,
    "gelu_fast": lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
    "gelu_new": _gelu_new,
    "gelu_python": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "gelu_python_tanh": _gelu_new,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardswish": F.hardswish,
    "laplace": lambda x: 0.5 * (1.0 + torch.erf((x - 0.707107).div(0.282095 * math.sqrt(2.0)))),
    "leaky_relu": F.leaky_relu,
    "linear": lambda x: x,
    "mish": F.mish,
    "prelu": lambda x: F.prelu(x, x.new_full((1,), 0.25)),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: torch.square(F.relu(x)),
    "relu6": F.relu6,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "sqrtsoftplus": lambda x: F.softplus(x).sqrt(),
    "swish": F.silu,
    "tanh": torch.tanh,
}


GELUS = {"gelu": False, "gelu_python": False, "gelu_new": True, "gelu_pytorch_tanh": True, "gelu_accurate": True}
GELUS |= {"gelu_fast": True, "gelu_python_tanh": True}
"""The names of variants of GELU, and whether they use its tanh form; they differ in rounding alone."""


class Activation(nn.Module):
    """An activation by its name in `ACTIVATIONS`, shapes kept; "prelu" has a trained slope."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        if name == "prelu":
            self.weight = nn.Parameter(torch.full((1,), 0.25))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the activation of ``hidden``, same shape."""
        if self.name == "prelu":
            return F.prelu(hidden, self.weight)
        return ACTIVATIONS[self.name](hidden)

    def extra_repr(self) -> str:
        """Show the name in ``print(model)``."""
        return self.name


class StepwiseNorm(nn.LayerNorm):
    """The layer norm of DeBERTa v1: each step by itself, in float32, and gain and shift in the dtype of the states."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised states, in their dtype."""
        wide = input.float()
        mean = wide.mean(-1, keepdim=True)
        variance = (wide - mean).pow(2).mean(-1, keepdim=True)
        wide = (wide - mean) / torch.sqrt(variance + self.eps)
        return self.weight * wide.to(input.dtype) + self.bias


def normalised(norm: nn.Module, hidden: Tensor) -> Tensor:
    """Return the normalised states by the quickest way that torch has, equal up to rounding."""
    return nn.LayerNorm.forward(norm, hidden) if type(norm) is StepwiseNorm else norm(hidden)


class Table:
    """Runs layers by torch's operations, to the bit as the reference implementation does.

    Each ``layer`` is a `flodl_hf.nn.layers.EncoderLayer`. States are ``(batch, seq, hidden)`` or
    ``(tokens, hidden)``, as the layout has them.
    """

    name = "torch"

    def lacks(self, layer: Any) -> str | None:
        """Return why this table cannot run a layer, as half a sentence; None where it can."""
        return None

    def begin(self, layer: Any, hidden: Tensor, layout: Layout, kwargs: Mapping[str, Any]) -> Table:
        """Return the table that runs this call: this one, or `TORCH` if it does not support the call."""
        return self

    def attend(self, layer: Any, hidden: Tensor, layout: Layout, kwargs: Mapping[str, Any], first: bool) -> Any:
        """Return the attention branch over ``hidden``; with ``first`` only for each text's first token."""
        branch = layer.attention(hidden, layout=layout, **kwargs)
        return layout.first(branch) if first else branch

    def transform(self, layer: Any, hidden: Tensor, layout: Layout) -> Any:
        """Return the branch of the feed-forward part."""
        return layer.feed_forward(hidden)

    def add(self, layer: Any, branch: Any, residual: Tensor, layout: Layout) -> Tensor:
        """Return ``residual`` plus the result of a branch."""
        return residual + branch

    def norm(self, norm: nn.Module, hidden: Tensor, layout: Layout) -> Tensor:
        """Return the normalised states."""
        return norm(hidden)

    def add_norm(
        self, layer: Any, norm: nn.Module, branch: Any, residual: Tensor, layout: Layout
    ) -> tuple[Tensor, Tensor]:
        """Return what the next sum adds to, and what the next part reads: the sum and its norm, or the norm twice."""
        total = self.add(layer, branch, residual, layout)
        normed = self.norm(norm, total, layout)
        return total if layer.order == "pre" else normed, normed

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of a layer is run by torch until a table is assigned to it.
        return _reference, ()


TORCH = Table()


def _reference() -> Table:
    return TORCH


def watched(layer: Any) -> bool:
    """Return whether a part of a layer has hooks, which are called only with torch's operations."""
    return any(hooked(module) for part in layer.children() for module in part.modules())


Order = Literal["post", "pre"]


class FeedForward(nn.Module):
    """Two projections with an activation between, applied to each token alone.

    Args:
        hidden_size: width in and out.
        intermediate_size: width between.
        activation: a name of `flodl_hf.nn.layers.ACTIVATIONS`.
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
        first, pre = self.first_only, self.order == "pre"
        given = table.norm(self.attention_norm, hidden, layout) if pre else hidden
        branch = table.attend(self, given, layout, kwargs, first)
        residual = layout.first(hidden) if first else hidden
        norm = self.feed_forward_norm if pre else self.attention_norm
        hidden, given = table.add_norm(self, norm, branch, residual, layout)
        branch = table.transform(self, given, layout)
        if pre:
            return table.add(self, branch, hidden, layout)
        return table.add_norm(self, self.feed_forward_norm, branch, hidden, layout)[0]

    def extra_repr(self) -> str:
        """Show the order of norms, and the table where it is not torch's, in ``print(model)``."""
        return f"order={self.order}" + ("" if self.table is TORCH else f", table={self.table.name}")

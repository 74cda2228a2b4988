"""Encoder parts as a processor runs them: one module for a whole block, and linear maps with a chosen product.

The arithmetic is the reference path's up to the order of sums. Modules here are made from modules of a prepared
graph, hold those as children, and read their weights at the first use, so a cast between making and using counts.
Inference only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flodl_hf.activations import Activation
from flodl_hf.attention import SelfAttention, attend, equal_runs
from flodl_hf.encoder import FeedForward
from flodl_hf.layout import Layout, Packed
from flodl_hf.runtime.cpu_products import Product

__all__ = ["CpuBlock", "CpuLinear", "MakeProduct"]

MakeProduct = Callable[[Tensor, Tensor | None], Product]


class CpuLinear(nn.Module):
    """A linear map with a product chosen for the processor.

    Args:
        source: whose weight and bias, shared.
        make: makes the product, at the first use.
    """

    def __init__(self, source: nn.Linear, make: MakeProduct) -> None:
        super().__init__()
        self.in_features, self.out_features = source.in_features, source.out_features
        self.weight = source.weight
        self.bias = source.bias
        self._make = make
        self._product: Product | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(..., out_features)``."""
        if self._product is None:
            self._product = self._make(self.weight, self.bias)
        return self._product(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


class CpuBlock(nn.Module):
    """One post-norm encoder layer: sums ride along with products, activations happen in place, buffers are kept.

    Args:
        attention: the layer's attention.
        attention_norm: the norm after it.
        feed_forward: the layer's feed-forward part.
        feed_forward_norm: the norm after it.
        make: makes the products, at the first use.
        fused: one product for query, key and value; costs a copy of their weights.
    """

    def __init__(
        self,
        attention: SelfAttention,
        attention_norm: nn.LayerNorm,
        feed_forward: FeedForward,
        feed_forward_norm: nn.LayerNorm,
        make: MakeProduct,
        *,
        fused: bool,
    ) -> None:
        super().__init__()
        self.query, self.key, self.value = attention.query, attention.key, attention.value
        self.output = attention.output
        self.attention_norm = attention_norm
        self.up, self.down = feed_forward.up, feed_forward.down
        self.activation: Activation = feed_forward.activation
        self.feed_forward_norm = feed_forward_norm
        self.num_heads = attention.num_heads
        self.implementation = attention.implementation
        self.fused = fused
        self.first_only = False
        """Whether only the state of each text's first token is wanted; set on a last layer."""
        self._make = make
        self._products: dict[str, Product] = {}

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        """Return the layer's states, shaped like ``hidden``; ``(texts, hidden)`` with ``first_only``."""
        mixed, hidden = self._opening(hidden, layout) if self.first_only else (self._mixed(hidden, layout), hidden)
        shape = hidden.shape
        states = self.attention_norm(self._product("output", self.output).plus(_flat(mixed), _flat(hidden)))
        wide = self._widened(states)
        return self.feed_forward_norm(self._product("down", self.down).plus(wide, states)).view(shape)

    def _mixed(self, hidden: Tensor, layout: Layout) -> Tensor:
        flat = _flat(hidden)
        if self.fused:
            query, key, value = self._together(self.query, self.key, self.value)(flat, "qkv").chunk(3, 1)
        else:
            query, key, value = (
                self._product(name, part)(flat, name)
                for name, part in (("query", self.query), ("key", self.key), ("value", self.value))
            )
        query, key, value = (x.view(hidden.shape) for x in (query, key, value))
        return attend(query, key, value, layout, num_heads=self.num_heads, implementation=self.implementation)

    def _opening(self, hidden: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Return mixed values and states of first tokens, ``(texts, hidden)``: one query a text."""
        first = layout.first(hidden)
        flat, heads = _flat(hidden), self.num_heads
        query = self._product("query", self.query)(first).view(first.shape[0], 1, heads, -1).transpose(1, 2)
        if self.fused:
            key, value = self._together(self.key, self.value)(flat, "qkv").chunk(2, 1)
        else:
            key = self._product("key", self.key)(flat, "key")
            value = self._product("value", self.value)(flat, "value")
        if isinstance(layout, Packed):
            runs, mask = equal_runs(layout.lengths), None
        else:
            runs, mask = iter([(0, hidden.shape[0], hidden.shape[1])]), layout.attention_mask
        parts: list[Tensor] = []
        done = 0
        for start, count, length in runs:
            ks, vs = (
                x[start : start + count * length].view(count, length, heads, -1).transpose(1, 2) for x in (key, value)
            )
            parts.append(F.scaled_dot_product_attention(query[done : done + count], ks, vs, attn_mask=mask))
            done += count
        return torch.cat(parts).view(first.shape), first

    def _together(self, *parts: nn.Linear) -> Product:
        """Return one product for several maps of the same states."""
        found = self._products.get("together")
        if found is None:
            weight, bias = torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts])
            found = self._products["together"] = self._make(weight, bias)
        return found

    def _widened(self, states: Tensor) -> Tensor:
        up = self._product("up", self.up)
        if self.activation.name == "prelu":
            return self.activation(up(states, "wide"))
        return up.activated(states, self.activation.name, "wide")

    def _product(self, name: str, part: nn.Linear) -> Product:
        found = self._products.get(name)
        if found is None:
            found = self._products[name] = self._make(part.weight, part.bias)
        return found


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])

"""The table of a processor: sums ride along with products, activations happen in place, buffers are kept.

The arithmetic is the reference's up to the order of sums. Products of weights are made at their first use, so a cast
between making the table and running a layer counts. Inference only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from flodl_hf.nn.attention import Kernel, SelfAttention, attend_first
from flodl_hf.nn.disentangled.attention import DisentangledAttention
from flodl_hf.nn.joined_tensors import joined_bias
from flodl_hf.nn.layers import EncoderLayer as Layer
from flodl_hf.nn.layers import FeedForward, Table, normalised, watched
from flodl_hf.nn.layout import Layout
from flodl_hf.nn.prompts import PrefixedAttention

if TYPE_CHECKING:
    from flodl_hf.nn.backends.cpu_products import Product


MakeProduct = Callable[[Tensor, Tensor | None], "Product"]


class Branch(NamedTuple):
    """States, as the table has them, with a pending last product, inside of which the residual is added."""

    states: Any
    linear: nn.Linear


def plain_parts(layer: Layer, also: type[nn.Module] = nn.Linear) -> str | None:
    """Return why a layer is unsupported by this backend, or None.

    Args:
        layer: a layer.
        also: a further supported kind of projection.
    """
    if isinstance(layer.attention, PrefixedAttention):
        return "its attention has learned keys and values (prefix tuning), which have no kernel"
    if type(layer.attention) not in (SelfAttention, DisentangledAttention):
        return f"its attention is a {type(layer.attention).__name__}"
    if type(layer.feed_forward) is not FeedForward:
        return f"its feed-forward part is a {type(layer.feed_forward).__name__}"
    strange = [type(m).__name__ for m in layer_linears(layer) if type(m) not in (nn.Linear, also)]
    if strange:
        return f"a projection is a {strange[0]}"
    if watched(layer):
        return "a hook watches its parts"
    return None


def layer_linears(layer: Layer) -> list[nn.Module]:
    """Return the projections of a layer of known parts."""
    attention: Any = layer.attention
    feed_forward: Any = layer.feed_forward
    parts = [attention.query, attention.key, attention.value, attention.output]
    return parts + [p for p in (feed_forward.gate, feed_forward.up, feed_forward.down) if p is not None]


class ProcessorTable(Table):
    """Runs the layers of one graph that predicts, by products chosen for the processor.

    Args:
        make: makes the product of a weight and a bias.
        joined: one product for query, key and value; costs a copy of their weights.
        kernel: takes the place of torch's fused attention; None for none.
    """

    name = "processor"

    def __init__(self, make: MakeProduct, *, joined: bool, kernel: Kernel | None = None) -> None:
        self._make = make
        self._kernel = kernel
        self.joined = joined
        self.products: dict[tuple[int, ...], Product] = {}

    def lacks(self, layer: Layer) -> str | None:
        """Return why this table cannot run a layer."""
        return plain_parts(layer)

    def attend(self, layer: Layer, hidden: Tensor, layout: Layout, kwargs: Mapping[str, Any], first: bool) -> Branch:
        """Return mixed values, before their output projection."""
        attention: Any = layer.attention
        flat = _flat(hidden)
        if first and type(attention) is SelfAttention and attention.rotary is None:
            # Only a text's first token queries; all tokens are keys.
            key, value = self._projected(flat, attention.key, attention.value)
            opening = layout.first(hidden)
            mixed = attend_first(
                self.product(attention.query)(opening), key.view(*hidden.shape[:-1], -1),
                value.view(*hidden.shape[:-1], -1), layout,
                num_heads=attention.num_heads, kv_heads=attention.kv_heads, window=attention.window, **kwargs,
            )  # fmt: skip
            return Branch(mixed, attention.output)
        parts = self._projected(flat, attention.query, attention.key, attention.value)
        query, key, value = (x.view(*hidden.shape[:-1], -1) for x in parts)
        more: dict[str, Any] = {"kernel": self._kernel} if type(attention) is SelfAttention else {}
        mixed = attention.mixed(query, key, value, layout, **kwargs, fast=True, **more)
        return Branch(_flat(layout.first(mixed) if first else mixed), attention.output)

    def transform(self, layer: Layer, hidden: Tensor, layout: Layout) -> Branch:
        """Return the widened states, before their last projection."""
        feed_forward: Any = layer.feed_forward
        name, flat = feed_forward.activation.name, _flat(hidden)
        opened = feed_forward.up if feed_forward.gate is None else feed_forward.gate
        product = self.product(opened)
        if name == "prelu":
            wide = feed_forward.activation(product(flat, "wide"))
        else:
            wide = product.activated(flat, name, "wide")
        if feed_forward.gate is not None:
            wide = wide.mul_(self.product(feed_forward.up)(flat, "gated"))
        return Branch(wide, feed_forward.down)

    def add(self, layer: Layer, branch: Branch, residual: Tensor, layout: Layout) -> Tensor:
        """Return ``residual`` plus the branch, summed inside its last product."""
        return self.product(branch.linear).plus(branch.states, _flat(residual)).view(residual.shape)

    def norm(self, norm: nn.Module, hidden: Tensor, layout: Layout) -> Tensor:
        """Return the normalised states."""
        return normalised(norm, hidden)

    def product(self, linear: nn.Linear) -> Product:
        """Return the product with one weight."""
        found = self.products.get((id(linear),))
        if found is None:
            found = self.products[(id(linear),)] = self._make(linear.weight, linear.bias)
        return found

    def _projected(self, flat: Tensor, *parts: nn.Linear) -> tuple[Tensor, ...]:
        """Return several projections of the same states."""
        if not self.joined:
            names = ("query", "key", "value")[-len(parts) :]
            return tuple(self.product(part)(flat, name) for part, name in zip(parts, names, strict=True))
        key = tuple(map(id, parts))
        found = self.products.get(key)
        if found is None:
            weights: list[Tensor] = [part.weight for part in parts]
            found = self.products[key] = self._make(torch.cat(weights), joined_bias(parts))
        return found(flat, "qkv").split([part.out_features for part in parts], 1)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])

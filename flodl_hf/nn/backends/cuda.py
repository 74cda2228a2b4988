"""The tables of a CUDA device for prediction: few kernels a layer. Inference only.

Query, key and value are one product, and so are gate and up. In half precision sums and norms run on our kernels, and
so are rotary positions, gates and attention among texts up to `SHORT` tokens, within windows, and where scores are
added something by distance; torch's variable-length attention serves other longer ones. In bf16 an exact GELU
becomes its tanh form, which the product or the gate computes on its way out: the two differ by at most 5e-4, less than
bf16's step at the values where they do. In fp16 GELU stays exact.

In float32 `SplitTable` multiplies by the matrix units, which have no products of float32. Each is three of fp16
(`flodl_hf.nn.kernels.fp16_split`), which these units compute twelve times as fast as others compute one; the results
differ from exact ones about as much as float32's own do. Norms and activations pass their results on in parts. Few rows
use ordinary products, for which the weights have to be read once rather than in parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from flodl_hf.nn.adapter_layers import hooked
from flodl_hf.nn.attention import SelfAttention
from flodl_hf.nn.backends.cpu import Branch, plain_parts
from flodl_hf.nn.joined_tensors import joined_bias
from flodl_hf.nn.layers import GELUS, StepwiseNorm, Table, normalised
from flodl_hf.nn.layers import EncoderLayer as Layer
from flodl_hf.nn.layout import Layout, Packed
from flodl_hf.nn.positions import DistanceBias

if TYPE_CHECKING:
    from flodl_hf.nn.kernels.split_products import Halves

# Up to this length a block of tokens covers about a text, and iterating over tokens beats iterating over texts.
SHORT = 128
HEAD_WIDTHS = (16, 32, 64, 128)
WIDEST = 8192
OFFSETS = 1 << 31
"""Maximum number of elements for attention's kernels: offsets in a tensor are 32-bit."""
GATES = {**dict.fromkeys(GELUS, "gelu"), "silu": "silu", "swish": "silu"}
"""The activations of gates that a kernel computes, and by which curve."""


def walks(layout: Layout, window: int | None) -> bool:
    """Return whether attention may walk over blocks of tokens: few keys for each query, texts end to end and known."""
    if not isinstance(layout, Packed) or layout.places is None:
        return False
    return layout.max_length <= SHORT or (window is not None and window <= SHORT)


def norm_kind(norm: nn.Module) -> tuple[Tensor, Tensor | None, float, bool] | None:
    """Return gain, shift, epsilon and whether the mean is subtracted; None for a norm that our kernels do not know."""
    if hooked(norm):
        return None
    if type(norm) is StepwiseNorm or (type(norm) is nn.LayerNorm and norm.weight is not None):
        return (norm.weight, norm.bias, norm.eps, True) if len(norm.normalized_shape) == 1 else None
    if type(norm) is nn.RMSNorm and norm.weight is not None and norm.eps is not None:
        return norm.weight, None, norm.eps, False
    return None


class Weights(NamedTuple):
    """The weight and bias of one product, joined of several projections'."""

    weight: Tensor
    bias: Tensor | None


class CudaTable(Table):
    """Runs the layers of one graph that predicts on a CUDA device.

    Args:
        kernels: use our kernels, which are for half precision and for devices that are trusted with them.
        distances: the same, of attention with biases by distance.
    """

    name = "cuda"

    def __init__(self, *, kernels: bool, distances: bool = False) -> None:
        self.kernels = kernels
        self.distances = kernels and distances
        self._joined: dict[int, Weights] = {}
        self._follows: dict[int, nn.Module] = {}

    def lacks(self, layer: Layer) -> str | None:
        """Return why this table cannot run a layer."""
        return plain_parts(layer)

    def join(self, layer: Layer) -> None:
        """Concatenate the weights of query, key and value, and those of gate and up: one product computes all of them.

        The layer's own parameters become views of the joined ones: no number is stored twice.
        """
        attention: Any = layer.attention
        feed_forward: Any = layer.feed_forward
        self._join(attention, (attention.query, attention.key, attention.value))
        if self.kernels and feed_forward.gate is not None and feed_forward.activation.name in GATES:
            self._join(feed_forward, (feed_forward.gate, feed_forward.up))

    def _join(self, owner: nn.Module, parts: tuple[Any, ...]) -> None:
        if id(owner) in self._joined:
            return
        sizes = [part.out_features for part in parts]
        with torch.no_grad():
            weight, bias = torch.cat([part.weight for part in parts]), joined_bias(parts)
        for leaf, whole in (("weight", weight), ("bias", bias)):
            for part, piece in zip(parts, () if whole is None else whole.split(sizes), strict=False):
                if getattr(part, leaf) is not None:
                    setattr(part, leaf, nn.Parameter(piece, requires_grad=False))
        self._joined[id(owner)] = Weights(weight, bias)

    def follow(self, layers: Iterable[Layer]) -> None:
        """Compute the norm of a layer's final sum in the same kernel, for the layer after it.

        Args:
            layers: all layers in order, including those of other tables.
        """
        for layer, after in pairwise(layers):
            if self.kernels and layer.order == after.order == "pre":
                self._follows[id(layer)] = after.attention_norm

    def attend(self, layer: Layer, hidden: Tensor, layout: Layout, kwargs: Mapping[str, Any], first: bool) -> Branch:
        """Return mixed values, before their output projection."""
        attention: Any = layer.attention
        sizes = [part.out_features for part in (attention.query, attention.key, attention.value)]
        joined = self.times(hidden, self._joined[id(attention)], layout)
        ours = self._serves(attention, layout)
        rotary = attention.rotary if ours else None
        mixes = ours and joined.numel() < OFFSETS and self._mixes(attention, hidden, layout, kwargs)
        angles = None if rotary is None else rotary.angles(joined, layout)
        if rotary is not None and angles is not None and not (mixes and rotary.width >= 32 and not rotary.values):
            from flodl_hf.nn.kernels.operations import turn

            heads = attention.num_heads + attention.kv_heads * (1 + rotary.values)
            turn(joined, *angles, heads=heads, width=rotary.width, wide=rotary.widened, halves=rotary.halves)
            angles = None
        query, key, value = joined.split(sizes, dim=-1)
        if mixes:
            from flodl_hf.nn.kernels.operations import mix

            assert isinstance(layout, Packed)
            assert layout.places is not None
            distances = kwargs.get("bias")
            mixed = mix(
                query, key, value, layout.places, layout.segment_ends(), heads=attention.num_heads,
                kv_heads=attention.kv_heads, window=attention.window, angles=angles,
                wide=rotary is not None and rotary.widened, halves=rotary is None or rotary.halves,
                bias=None if distances is None else distances.along(layout.max_length, hidden.device),
            )  # fmt: skip
        else:
            turned = {} if rotary is None else {"placed": True}
            mixed = attention.mixed(query, key, value, layout, **kwargs, **turned, fast=True)
        return Branch(layout.first(mixed) if first else mixed, attention.output)

    def times(self, states: Any, linear: nn.Linear | Weights, layout: Layout) -> Tensor:
        """Return ``states @ weight.T + bias``."""
        return nn.functional.linear(states, linear.weight, linear.bias)

    def _serves(self, attention: Any, layout: Layout) -> bool:
        """Return whether our kernels take queries and keys as they are."""
        return self.kernels and type(attention) is SelfAttention and isinstance(layout, Packed)

    def _mixes(self, attention: Any, hidden: Tensor, layout: Layout, kwargs: Mapping[str, Any]) -> bool:
        """Return whether attention runs on our kernel."""
        if attention.implementation == "eager" or hidden.shape[-1] // attention.num_heads not in HEAD_WIDTHS:
            return False
        if kwargs.get("bias") is None:
            return walks(layout, attention.window) and not set(kwargs) - {"bias"}
        known = set(kwargs) == {"bias"} and isinstance(kwargs["bias"], DistanceBias)
        return self.distances and known and isinstance(layout, Packed) and layout.places is not None

    def transform(self, layer: Layer, hidden: Tensor, layout: Layout) -> Branch:
        """Return the widened states, before their last projection."""
        feed_forward: Any = layer.feed_forward
        if id(feed_forward) in self._joined:
            from flodl_hf.nn.kernels.operations import gated

            both = self.times(hidden, self._joined[id(feed_forward)], layout)
            name = feed_forward.activation.name
            tanh = GELUS.get(name, False) or hidden.dtype == torch.bfloat16
            wide = gated(both.view(-1, both.shape[-1]), activation=GATES[name], tanh=tanh)
            wide = wide.view(*hidden.shape[:-1], -1)
        elif feed_forward.gate is not None:
            opened = feed_forward.activation(self.times(hidden, feed_forward.gate, layout))
            wide = opened * self.times(hidden, feed_forward.up, layout)
        elif self._fuses_gelu(feed_forward, hidden):
            weight, bias = feed_forward.up.weight, feed_forward.up.bias
            flat = hidden.reshape(-1, hidden.shape[-1])
            wide = torch.ops.aten._addmm_activation(bias, flat, weight.t(), use_gelu=True)
            wide = wide.view(*hidden.shape[:-1], -1)
        else:
            wide = feed_forward.activation(self.times(hidden, feed_forward.up, layout))
        return Branch(wide, feed_forward.down)

    def _fuses_gelu(self, feed_forward: Any, hidden: Tensor) -> bool:
        return (
            self.kernels
            and hidden.dtype == torch.bfloat16
            and feed_forward.activation.name in GELUS
            and feed_forward.up.bias is not None
        )

    def add(self, layer: Layer, branch: Branch, residual: Tensor, layout: Layout) -> Tensor:
        """Return ``residual`` plus the branch; the next norm is computed by the same kernel and kept."""
        norm = self._follows.get(id(layer))
        kind = None if norm is None else self._kind(norm, residual)
        if kind is None:
            return residual + self.times(branch.states, branch.linear, layout).view(residual.shape)
        total, normed = self._summed(branch, residual, kind, layout, pre=True)
        layout.memo["normed"] = (norm, total, normed)
        return total

    def norm(self, norm: nn.Module, hidden: Tensor, layout: Layout) -> Tensor:
        """Return the normalised states."""
        kept = layout.memo.pop("normed", None)
        if kept is not None and kept[0] is norm and kept[1] is hidden:
            return kept[2]
        return normalised(norm, hidden)

    def add_norm(
        self, layer: Layer, norm: nn.Module, branch: Branch, residual: Tensor, layout: Layout
    ) -> tuple[Tensor, Tensor]:
        """Return the sum and its norm; post: the norm twice. By one kernel in half precision."""
        kind = self._kind(norm, residual)
        if kind is None:
            return super().add_norm(layer, norm, branch, residual, layout)
        pre = layer.order == "pre"
        total, normed = self._summed(branch, residual, kind, layout, pre=pre)
        return total if pre else normed, normed

    def _kind(self, norm: nn.Module, states: Tensor) -> tuple[Tensor, Tensor | None, float, bool] | None:
        return norm_kind(norm) if self.kernels and states.shape[-1] <= WIDEST else None

    def _summed(
        self,
        branch: Branch,
        residual: Tensor,
        kind: tuple[Tensor, Tensor | None, float, bool],
        layout: Layout,
        *,
        pre: bool,
    ) -> tuple[Tensor, Tensor]:
        from flodl_hf.nn.kernels.operations import norm_of_sum

        weight, bias, eps, center = kind
        width = residual.shape[-1]
        x = self.times(branch.states, branch.linear, layout).reshape(-1, width).contiguous()
        flat = residual.reshape(-1, width).contiguous()
        total, normed = norm_of_sum(x, flat, weight, bias, eps=eps, center=center, pre=pre)
        return total.view(residual.shape), normed.view(residual.shape)


# Rows from which three products cost less than one.
FEWEST = 256
# A row has to fit into the registers of one program.
WIDEST_SPLIT = 16384


class SplitTable(CudaTable):
    """Runs the layers of one graph that predicts in float32 on a CUDA device that is trusted with the kernels."""

    name = "cuda"

    def __init__(self, *, fewest: int = FEWEST) -> None:
        super().__init__(kernels=True)
        self.fewest = fewest
        self._weights: dict[int, Halves] = {}

    def join(self, layer: Layer) -> None:
        """Concatenate weights as for half precision, and keep the parts of those that products read."""
        from flodl_hf.nn.kernels.split_products import split

        super().join(layer)
        feed_forward: Any = layer.feed_forward
        attention: Any = layer.attention
        linears = (attention.output, feed_forward.gate, feed_forward.up, feed_forward.down)
        weights = [self._joined[id(attention)].weight, *(linear.weight for linear in linears if linear is not None)]
        if id(feed_forward) in self._joined:
            weights = [*weights[:2], self._joined[id(feed_forward)].weight, feed_forward.down.weight]
        for weight in weights:
            if id(weight) not in self._weights:
                self._weights[id(weight)] = split(weight.detach(), weight=True)

    def transform(self, layer: Layer, hidden: Tensor, layout: Layout) -> Branch:
        """Return the widened states, in parts where the activation is a GELU."""
        feed_forward: Any = layer.feed_forward
        name, up = feed_forward.activation.name, feed_forward.up
        if feed_forward.gate is not None or name not in GELUS or not self._many(hidden):
            return super().transform(layer, hidden, layout)
        from flodl_hf.nn.kernels.split_products import finished_and_split, products

        given, weight = self._parts(hidden, layout), self._weights[id(up.weight)]
        wide = finished_and_split(products(given, weight), given, weight, up.bias, tanh=GELUS[name])
        return Branch(wide, feed_forward.down)

    def times(self, states: Any, linear: nn.Linear | Weights, layout: Layout) -> Tensor:
        """Return ``states @ weight.T + bias``; states may come in parts."""
        if isinstance(states, Tensor) and not self._many(states):
            return super().times(states, linear, layout)
        from flodl_hf.nn.kernels.split_products import finished, products

        given, split = self._parts(states, layout), self._weights[id(linear.weight)]
        found = finished(products(given, split), given, split, linear.bias)
        return found.view(*states.shape[:-1], -1) if isinstance(states, Tensor) else found

    def _mixes(self, attention: Any, hidden: Tensor, layout: Layout, kwargs: Mapping[str, Any]) -> bool:
        # torch's attention is as fast here, and no less exact than the rest.
        return False

    def _summed(
        self,
        branch: Branch,
        residual: Tensor,
        kind: tuple[Tensor, Tensor | None, float, bool],
        layout: Layout,
        *,
        pre: bool,
    ) -> tuple[Tensor, Tensor]:
        states, linear = branch
        if isinstance(states, Tensor) and not self._many(states):
            return super()._summed(branch, residual, kind, layout, pre=pre)
        from flodl_hf.nn.kernels.split_products import normed_and_split, products

        given, weight = self._parts(states, layout), self._weights[id(linear.weight)]
        flat = residual.reshape(-1, residual.shape[-1]).contiguous()
        found = normed_and_split(products(given, weight), given, weight, linear.bias, flat, kind, pre=pre)
        total, normed = found[0].view(residual.shape), found[1].view(residual.shape)
        layout.memo["parts"] = (normed, found[2])
        return total, normed

    def _many(self, states: Tensor) -> bool:
        return states.numel() >= self.fewest * states.shape[-1]

    def _parts(self, states: Any, layout: Layout) -> Halves:
        from flodl_hf.nn.kernels.split_products import split

        if not isinstance(states, Tensor):
            return states
        kept = layout.memo.pop("parts", None)
        if kept is not None and kept[0] is states:
            return kept[1]
        return split(states.reshape(-1, states.shape[-1]).contiguous())

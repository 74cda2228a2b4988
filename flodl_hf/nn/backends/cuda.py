"""The table of a CUDA device for prediction: few kernels a layer.

Query, key and value are one product, and so are gate and up. In half precision sums and norms run on our kernels, and
so are rotary positions, gates and attention among texts up to `SHORT` tokens, within windows, and where scores are
added something by distance; torch's variable-length attention serves other longer ones. In bf16 an exact GELU
becomes its tanh form, which the product or the gate computes on its way out: the two differ by at most 5e-4, less than
bf16's step at the values where they do. In fp16 GELU stays exact. Inference only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

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
        self._joined: dict[int, tuple[Tensor, Tensor | None]] = {}
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
        self._joined[id(owner)] = (weight, bias)

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
        weight, bias = self._joined[id(attention)]
        sizes = [part.out_features for part in (attention.query, attention.key, attention.value)]
        joined = self.times(hidden, weight, bias, layout)
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

    def times(self, states: Any, weight: Tensor, bias: Tensor | None, layout: Layout | None = None) -> Tensor:
        """Return ``states @ weight.T + bias``."""
        return nn.functional.linear(states, weight, bias)

    def _by(self, linear: nn.Linear, states: Any, layout: Layout) -> Tensor:
        return self.times(states, linear.weight, linear.bias, layout)

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

            both = self.times(hidden, *self._joined[id(feed_forward)], layout)
            name = feed_forward.activation.name
            tanh = GELUS.get(name, False) or hidden.dtype == torch.bfloat16
            wide = gated(both.view(-1, both.shape[-1]), activation=GATES[name], tanh=tanh)
            wide = wide.view(*hidden.shape[:-1], -1)
        elif feed_forward.gate is not None:
            opened = feed_forward.activation(self._by(feed_forward.gate, hidden, layout))
            wide = opened * self._by(feed_forward.up, hidden, layout)
        elif self._fuses_gelu(feed_forward, hidden):
            weight, bias = feed_forward.up.weight, feed_forward.up.bias
            flat = hidden.reshape(-1, hidden.shape[-1])
            wide = torch.ops.aten._addmm_activation(bias, flat, weight.t(), use_gelu=True)
            wide = wide.view(*hidden.shape[:-1], -1)
        else:
            wide = feed_forward.activation(self._by(feed_forward.up, hidden, layout))
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
            return residual + self._by(branch.linear, branch.states, layout).view(residual.shape)
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
        x = self._by(branch.linear, branch.states, layout).reshape(-1, width).contiguous()
        flat = residual.reshape(-1, width).contiguous()
        total, normed = norm_of_sum(x, flat, weight, bias, eps=eps, center=center, pre=pre)
        return total.view(residual.shape), normed.view(residual.shape)

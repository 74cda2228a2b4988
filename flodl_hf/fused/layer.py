"""One encoder layer in training, over the operations of `flodl_hf.fused.operations`.

Decides when a layer is computed that way: where a gradient is wanted, under autocast in half precision. Everything
else goes through the layer as it was built. Attention among short texts in buckets is a kernel of ours, disentangled
attention has its own; other layouts take torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flodl.graph import Graph
from flodl_hf.activations import GELUS
from flodl_hf.attention import attend
from flodl_hf.disentangled.attention import DisentangledAttention
from flodl_hf.layout import Layout, Packed
from flodl_hf.runtime.cuda import SHORT

__all__ = ["FusedLayer"]

WIDTHS = (16, 32, 64, 128)
WIDEST = 8192
# Streams of random numbers of one layer: its heads, then what follows attention and what ends the layer.
AFTER_ATTENTION, AFTER_FEED_FORWARD = 1 << 20, (1 << 20) + 1
STREAMS = 1 << 21


@dataclass(frozen=True)
class _Carried:
    """What one layer hands to the next beside the states.

    Attributes:
        half: the states in half precision.
        seed: of what is dropped, ``(1,)``, int64.
        ends: index after the last token of each token's text, ``(tokens,)``, int32; None of layouts without buckets.
        depth: layers before.
        version: how often the states had been written to when they were handed on.
    """

    half: Tensor
    seed: Tensor
    ends: Tensor | None
    depth: int
    version: int


class FusedLayer:
    """Stands in for the forward pass of a layer.

    Args:
        block: the layer, whose parameters are used and whose mode decides what is dropped.
        plain: its own forward pass.
    """

    def __init__(self, block: Graph, plain: Callable[..., Tensor]) -> None:
        self.plain = plain
        part: Any = block.get_submodule
        self.block, self.inner = block, list(block.modules())
        self.attention, self.feed_forward = part("attention"), part("feed_forward")
        self.attention_norm: nn.LayerNorm = part("attention_norm")
        self.feed_forward_norm: nn.LayerNorm = part("feed_forward_norm")

    def __call__(self, hidden: Tensor, layout: Layout, **others: Any) -> Tensor:
        """Return the layer's states, float32, shaped like ``hidden``."""
        if not self.fits(hidden) or self.watched(others):
            return self.plain(hidden, layout=layout, **others)
        kind, width = hidden.device.type, hidden.shape[-1]
        dtype = torch.get_autocast_dtype(kind)
        carried: _Carried | None = getattr(hidden, "_carried", None)
        if carried is None or carried.half.dtype != dtype or carried.version != hidden._version:
            seed = torch.empty(1, dtype=torch.int64, device=hidden.device).random_(1 << 48)
            carried = _Carried(hidden.to(dtype), seed, ends_of(layout), 0, 0)
        stream = carried.depth * STREAMS
        if type(self.attention) is DisentangledAttention:
            mix = self.attention._joined(carried.half, layout, others["relative"])
            halves = self._halves(self._others(), dtype)[1]
        else:
            parts = [self.attention.query, self.attention.key, self.attention.value]
            room, halves = self._halves([*(p.weight for p in parts), *(p.bias for p in parts), *self._others()], dtype)
            with torch.autocast(kind, enabled=False):
                mix = self._mixed(room, carried, layout, stream)
            halves = halves[6:]
        with torch.autocast(kind, enabled=False):
            found = self._finished(mix.view(-1, width), hidden.reshape(-1, width), carried, halves, stream)
            states, half = (part.view(hidden.shape) for part in found)
        # The graph passes states alone from layer to layer, so what else there is travels on them.
        vars(states)["_carried"] = _Carried(half, carried.seed, carried.ends, carried.depth + 1, states._version)
        return states

    def watched(self, others: dict[str, Any]) -> bool:
        """Return whether somebody wants to see what lies between the parts, which kernels never give."""
        return (
            others.get("outputs") is not None
            or bool(self.block._watched)
            or any(
                m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
                for m in self.inner
            )
        )

    def fits(self, hidden: Tensor) -> bool:
        """Return whether the kernels compute this."""
        kind = hidden.device.type
        if type(self.attention) is DisentangledAttention:
            attends = self.attention._joins(hidden)
        else:
            attends = self.attention.implementation == "sdpa"
        return (
            attends
            and torch.is_grad_enabled()
            and torch.is_autocast_enabled(kind)
            and torch.get_autocast_dtype(kind) in (torch.bfloat16, torch.float16)
            and hidden.dtype == torch.float32
            and self.attention.query.weight.dtype == torch.float32
        )

    def _mixed(self, room: Tensor, carried: _Carried, layout: Layout, stream: int) -> Tensor:
        """Return what attention mixes, shaped like the states; ``room`` begins with its weights and biases."""
        from flodl_hf.fused.operations import mixed, projected

        attention: Any = self.attention
        parts = (attention.query, attention.key, attention.value)
        width, shape = attention.query.in_features, carried.half.shape
        weights, outputs = 3 * attention.query.weight.numel(), 3 * attention.query.out_features
        qkv = projected(
            carried.half.view(-1, width), room[:weights].view(-1, width), room[weights : weights + outputs],
            [part.weight for part in parts], [part.bias for part in parts],
        )  # fmt: skip
        p = attention.attention_dropout if attention.training else 0.0
        if isinstance(layout, Packed) and layout.places is not None and layout.max_length <= SHORT:
            assert carried.ends is not None
            return mixed(qkv, layout.places, carried.ends, carried.seed, heads=attention.num_heads, p=p, stream=stream)
        query, key, value = qkv.view(*shape[:-1], -1).chunk(3, dim=-1)
        return attend(query, key, value, layout, num_heads=attention.num_heads, dropout=p)

    def _finished(
        self, mix: Tensor, hidden: Tensor, carried: _Carried, halves: list[Tensor], stream: int
    ) -> tuple[Tensor, Tensor]:
        """Return the states after the output projection, both norms and the feed-forward part, in both dtypes."""
        from flodl_hf.fused.operations import activated, added_and_normed, projected

        out, up, down = self.attention.output, self.feed_forward.up, self.feed_forward.down

        def normed(
            x: Tensor, residual: Tensor, norm: nn.LayerNorm, bias: Tensor, dropout: nn.Dropout, at: int
        ) -> tuple[Tensor, Tensor]:
            return added_and_normed(
                x, residual, norm.weight, norm.bias, bias, carried.seed, eps=norm.eps,
                p=dropout.p if dropout.training else 0.0, stream=stream + at,
            )  # fmt: skip

        x = projected(mix, halves[0], halves[1], [out.weight], [])
        states, half = normed(x, hidden, self.attention_norm, out.bias, self.attention.dropout, AFTER_ATTENTION)
        x = projected(half, halves[2], halves[3], [up.weight], [])
        x = activated(x, up.bias, tanh=GELUS[self.feed_forward.activation.name])
        x = projected(x, halves[4], halves[5], [down.weight], [])
        return normed(x, states, self.feed_forward_norm, down.bias, self.feed_forward.dropout, AFTER_FEED_FORWARD)

    def _others(self) -> list[Tensor]:
        """Return weights and biases of the projections behind attention, in order."""
        parts = (self.attention.output, self.feed_forward.up, self.feed_forward.down)
        return [tensor for part in parts for tensor in (part.weight, part.bias)]

    def _halves(self, parameters: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """Return copies in half precision: the memory in which they lie in order, and each."""
        sizes = [parameter.numel() for parameter in parameters]
        room = torch.empty(sum(sizes), dtype=dtype, device=parameters[0].device)
        copies = [part.view(p.shape) for part, p in zip(room.split(sizes), parameters, strict=True)]
        with torch.no_grad():
            torch._foreach_copy_(copies, parameters)  # pyright: ignore[reportPrivateImportUsage]
        return room, copies


def ends_of(layout: Layout) -> Tensor | None:
    """Return the index after the last token of each token's text, ``(tokens,)``, int32; None where nobody needs it."""
    if not isinstance(layout, Packed) or layout.places is None:
        return None
    if layout.ends is not None:
        return layout.ends
    text = (layout.places == 0).cumsum(0) - 1
    return layout.offsets[1:][text]

"""One shared encoder layer in training, over the operations of `flodl_hf.fused.operations`.

Decides when a layer is computed that way: packed buckets on a CUDA device under autocast in half precision, with
the parts and the activation that the kernels know. Everything else goes through the layer as it was built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flodl.graph import Graph
from flodl_hf.attention import attend
from flodl_hf.layout import Layout, Packed

__all__ = ["FusedLayer"]

# Up to here a block of tokens meets little beyond its own texts, and walking over tokens beats walking over texts.
SHORT = 128
WIDTHS = (16, 32, 64, 128)
GELUS = {"gelu": False, "gelu_python": False, "gelu_new": True, "gelu_pytorch_tanh": True, "gelu_accurate": True}
GELUS |= {"gelu_fast": True, "gelu_python_tanh": True}
WIDEST = 8192


@dataclass(frozen=True)
class _Carried:
    """What one layer hands to the next beside the states.

    Attributes:
        half: the states in half precision.
        seed: of what is dropped, ``(1,)``, int64.
        ends: index after the last token of each token's text, ``(tokens,)``, int32.
        depth: layers before.
    """

    half: Tensor
    seed: Tensor
    ends: Tensor
    depth: int


class FusedLayer:
    """Stands in for the forward pass of a layer.

    Args:
        block: the layer, whose parameters are used and whose mode decides what is dropped.
        plain: its own forward pass.
    """

    def __init__(self, block: Graph, plain: Callable[..., Tensor]) -> None:
        self.plain = plain
        part: Any = block.get_submodule
        self.attention, self.feed_forward = part("attention"), part("feed_forward")
        self.attention_norm: nn.LayerNorm = part("attention_norm")
        self.feed_forward_norm: nn.LayerNorm = part("feed_forward_norm")

    def __call__(self, hidden: Tensor, layout: Layout) -> Tensor:
        """Return the layer's states, float32, shaped like ``hidden``."""
        if not (isinstance(layout, Packed) and self.fits(hidden, layout)):
            return self.plain(hidden, layout=layout)
        with torch.autocast(hidden.device.type, enabled=False):
            return self._fused(hidden, layout, torch.get_autocast_dtype(hidden.device.type))

    def fits(self, hidden: Tensor, layout: Packed) -> bool:
        """Return whether the kernels compute this."""
        kind = hidden.device.type
        return (
            layout.bucketed
            and torch.is_grad_enabled()
            and torch.is_autocast_enabled(kind)
            and torch.get_autocast_dtype(kind) in (torch.bfloat16, torch.float16)
            and hidden.dtype == torch.float32
            and self.attention.implementation == "sdpa"
            and self.attention.query.weight.dtype == torch.float32
        )

    def _fused(self, hidden: Tensor, layout: Packed, dtype: torch.dtype) -> Tensor:
        from flodl_hf.fused.operations import STREAMS, mixed, projected

        carried: _Carried | None = getattr(hidden, "_carried", None)
        if carried is None or carried.half.dtype != dtype:
            seed = torch.empty(1, dtype=torch.int64, device=hidden.device).random_(1 << 48)
            carried = _Carried(hidden.to(dtype), seed, ends_of(layout), 0)
        attention, seed, stream = self.attention, carried.seed, carried.depth * STREAMS
        learns = attention.training
        in_weights, in_biases, others = self._halves(dtype)
        parts = (attention.query, attention.key, attention.value)
        qkv = projected(
            carried.half, in_weights, in_biases, [part.weight for part in parts], [part.bias for part in parts]
        )  # fmt: skip
        p = attention.attention_dropout if learns else 0.0
        if layout.max_length <= SHORT:
            assert layout.places is not None
            mix = mixed(qkv, layout.places, carried.ends, seed, heads=attention.num_heads, p=p, stream=stream)
        else:
            query, key, value = qkv.chunk(3, dim=-1)
            mix = attend(query, key, value, layout, num_heads=attention.num_heads, dropout=p)
        return self._finished(mix, hidden, carried, others, stream)

    def _finished(self, mix: Tensor, hidden: Tensor, carried: _Carried, halves: list[Tensor], stream: int) -> Tensor:
        """Return the states after the output projection, both norms and the feed-forward part."""
        from flodl_hf.fused.operations import (
            AFTER_ATTENTION,
            AFTER_FEED_FORWARD,
            activated,
            added_and_normed,
            projected,
        )  # fmt: skip

        out, up, down = self.attention.output, self.feed_forward.up, self.feed_forward.down

        def normed(x: Tensor, residual: Tensor, norm: nn.LayerNorm, bias: Tensor, dropout: nn.Dropout, at: int) -> Any:
            return added_and_normed(
                x, residual, norm.weight, norm.bias, bias, carried.seed, eps=norm.eps,
                p=dropout.p if dropout.training else 0.0, stream=stream + at,
            )  # fmt: skip

        x = projected(mix, halves[0], halves[1], [out.weight], [])
        states, half = normed(x, hidden, self.attention_norm, out.bias, self.attention.dropout, AFTER_ATTENTION)
        x = projected(half, halves[2], halves[3], [up.weight], [])
        x = activated(x, up.bias, tanh=GELUS[self.feed_forward.activation.name])
        x = projected(x, halves[4], halves[5], [down.weight], [])
        states, half = normed(
            x, states, self.feed_forward_norm, down.bias, self.feed_forward.dropout, AFTER_FEED_FORWARD
        )
        states._carried = _Carried(half, carried.seed, carried.ends, carried.depth + 1)
        return states

    def _halves(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return weights and biases of query, key and value joined, then those of the others, in half precision."""
        attention, feed_forward = self.attention, self.feed_forward
        first = [attention.query, attention.key, attention.value]
        rest = [attention.output, feed_forward.up, feed_forward.down]
        parameters = [part.weight.detach() for part in first] + [part.bias.detach() for part in first]
        parameters += [tensor.detach() for part in rest for tensor in (part.weight, part.bias)]
        room = torch.empty(sum(p.numel() for p in parameters), dtype=dtype, device=parameters[0].device)
        flats = list(room.split([p.numel() for p in parameters]))
        views = [flat.view(p.shape) for flat, p in zip(flats, parameters, strict=True)]
        torch._foreach_copy_(views, parameters)  # pyright: ignore[reportPrivateImportUsage]
        width = parameters[0].shape[1]
        weights, biases = sum(p.numel() for p in parameters[:3]), sum(p.numel() for p in parameters[3:6])
        return room[:weights].view(-1, width), room[weights : weights + biases], views[6:]


def ends_of(layout: Packed) -> Tensor:
    """Return the index after the last token of each token's text, ``(tokens,)``, int32."""
    if layout.ends is not None:
        return layout.ends
    assert layout.places is not None
    text = (layout.places == 0).cumsum(0) - 1
    return layout.offsets[1:][text]

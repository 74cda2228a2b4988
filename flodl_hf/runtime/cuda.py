"""What a prepared graph becomes on a CUDA device in half precision: whole blocks of few kernels.

Decides which layers are rearranged and when our kernels are used: those of Triton where it is installed, for
texts up to `SHORT` tokens; torch's variable-length attention for longer ones. In bf16 an exact GELU becomes its
tanh form, which the product computes on its way out: the two differ by at most 5e-4, less than bf16's step at the
values where they do. In fp16 GELU stays exact.
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flodl.graph import Graph
from flodl_hf.activations import GELUS
from flodl_hf.attention import FusedSelfAttention, attend
from flodl_hf.layout import Layout, Packed
from flodl_hf.runtime.blocks import replace_blocks

if TYPE_CHECKING:
    from flodl_hf.activations import Activation

__all__ = ["CudaBlock", "prepare_cuda"]

# Up to here a block of tokens holds about a text, and walking over tokens beats walking over texts.
SHORT = 128


def prepare_cuda(graph: Graph) -> None:
    """Rearrange the shared block of a half-precision shadow, in place; it then is for inference only."""
    first = next(graph.parameters())
    if first.dtype not in (torch.float16, torch.bfloat16) or not _kernels_hold(first.device, first.dtype):
        return
    replace_blocks(graph, CudaBlock)


@cache
def _kernels_hold(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether our kernels compile for the device and agree there with torch's own; asked once a process.

    Triton needs a compiler at run time and supports devices that we have never seen, so this is found out.
    """
    if find_spec("triton") is None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        with torch.cuda.device(device), torch.inference_mode():
            fault = _apart(device, dtype)
    except Exception as error:
        # Whatever a compiler may raise: torch's kernels do the same work.
        fault = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if fault:
        warnings.warn(
            f"prediction on {device} in {dtype} goes on without our kernels, more slowly: {fault}", stacklevel=2
        )
    return not fault


def _apart(device: torch.device, dtype: torch.dtype) -> str:
    """Return which kernel gives other numbers than torch's operations; empty if none does."""
    from flodl_hf.buckets import Buffer, bucket_of
    from flodl_hf.runtime.kernels import add_norm, mix_short

    lengths = np.array([3, 70, 1, 22])
    buffer = Buffer(bucket_of(lengths))
    buffer.write(np.zeros(int(lengths.sum()), np.int32), None, lengths)
    _, _, layout = buffer.on(buffer.packed.to(device))
    assert layout.places is not None
    assert layout.ends is not None
    draw = torch.Generator().manual_seed(0)
    tokens = buffer.bucket.tokens
    qkv = torch.randn(tokens, 3 * 128, generator=draw).to(device, dtype)
    query, key, value = qkv.float().chunk(3, dim=-1)
    mixed = attend(query, key, value, layout, num_heads=2)
    a, b = (torch.randn(tokens, 128, generator=draw).to(device, dtype) for _ in range(2))
    weight, bias = (torch.randn(128, generator=draw).to(device, dtype) for _ in range(2))
    normed = F.layer_norm(a.float() + b.float(), (128,), weight.float(), bias.float(), 1e-12)
    up = torch.randn(128, 128, generator=draw).to(device, dtype)
    wide = torch.ops.aten._addmm_activation(bias, a, up.t(), use_gelu=True)
    activated = F.gelu(F.linear(a.float(), up.float(), bias.float()), approximate="tanh")
    found = {
        "attention": (mix_short(qkv, layout.places, layout.ends, 2), mixed, 0.03),
        "sum and norm": (add_norm(a, b, weight, bias, 1e-12), normed, 0.03),
        "product with GELU": (wide, activated, 0.05),
    }
    for name, (ours, right, least) in found.items():
        apart = (ours.float() - right).abs()
        if not bool((apart <= least + 0.03 * right.abs()).all()):
            return f"{name} parts from torch's by {float(apart.max()):.1e}"
    return ""


class CudaBlock(nn.Module):
    """One post-norm encoder layer in eight kernels.

    Args:
        block: the layer.
    """

    def __init__(self, block: Graph) -> None:
        super().__init__()
        part: Any = block.get_submodule
        fused, feed_forward = FusedSelfAttention(part("attention")), part("feed_forward")
        self.qkv, self.output = fused.qkv, fused.output
        self.attention_norm, self.feed_forward_norm = part("attention_norm"), part("feed_forward_norm")
        self.up, self.down = feed_forward.up, feed_forward.down
        self.activation: Activation = feed_forward.activation
        self.num_heads = fused.num_heads
        self.implementation = fused.implementation
        self.first_only = False
        """Whether only the state of each text's first token is wanted; set on a last layer."""

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        """Return the layer's states, shaped like ``hidden``; ``(texts, hidden)`` with ``first_only``."""
        mixed = self._mixed(hidden, layout)
        if self.first_only:
            mixed, hidden = layout.first(mixed), layout.first(hidden)
        shape = hidden.shape
        flat, mixed = hidden.reshape(-1, shape[-1]), mixed.reshape(-1, shape[-1])
        states = _sum_norm(self.output(mixed), flat, self.attention_norm)
        return _sum_norm(self.down(self._widened(states)), states, self.feed_forward_norm).view(shape)

    def _mixed(self, hidden: Tensor, layout: Layout) -> Tensor:
        qkv = self.qkv(hidden)
        width = hidden.shape[-1] // self.num_heads
        short = isinstance(layout, Packed) and layout.ends is not None and layout.max_length <= SHORT
        if short and hidden.is_cuda and width in (16, 32, 64, 128) and self.implementation == "sdpa":
            from flodl_hf.runtime.kernels import mix_short

            assert isinstance(layout, Packed)
            assert layout.places is not None
            assert layout.ends is not None
            return mix_short(qkv, layout.places, layout.ends, self.num_heads)
        query, key, value = qkv.chunk(3, dim=-1)
        return attend(query, key, value, layout, num_heads=self.num_heads, implementation=self.implementation)

    def _widened(self, states: Tensor) -> Tensor:
        if states.is_cuda and states.dtype == torch.bfloat16 and self.activation.name in GELUS:
            weight, bias = self.up.weight, self.up.bias
            return torch.ops.aten._addmm_activation(bias, states, weight.t(), use_gelu=True)
        return self.activation(self.up(states))


def _sum_norm(a: Tensor, b: Tensor, norm: nn.LayerNorm) -> Tensor:
    if not a.is_cuda or a.shape[-1] > 8192:
        return F.layer_norm(a + b, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    from flodl_hf.runtime.kernels import add_norm

    return add_norm(a.contiguous(), b.contiguous(), norm.weight, norm.bias, norm.eps)

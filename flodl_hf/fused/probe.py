"""How far a fused layer is from the plain one: states and gradients of a small case, nothing dropped."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flodl.graph import Graph
from flodl_hf.attention import SelfAttention
from flodl_hf.buckets import Buffer, bucket_of
from flodl_hf.encoder import FeedForward, post_norm_block
from flodl_hf.fused.layer import FusedLayer
from flodl_hf.layout import Packed

__all__ = ["Sizes", "apart", "small_case"]

LENGTHS = (37, 5, 1, 70, 12)


@dataclass(frozen=True)
class Sizes:
    """What a kernel is compiled for, besides dtypes.

    Attributes:
        width: of a state.
        heads: of attention.
        inner: width between the projections of the feed-forward part.
        tanh: whether GELU is its tanh form.
        dropout: whether anything is dropped.
    """

    width: int = 128
    heads: int = 2
    inner: int = 512
    tanh: bool = False
    dropout: bool = False


USUAL = Sizes()


def small_case(
    device: torch.device, sizes: Sizes = USUAL, *, seed: int = 0, p: float = 0.0
) -> tuple[Graph, Tensor, Packed]:
    """Return a layer of some sizes, states, and a bucketed layout of a few texts."""
    lengths = np.array(LENGTHS)
    buffer = Buffer(bucket_of(lengths))
    buffer.write(np.zeros(int(lengths.sum()), np.int32), None, lengths)
    _, _, layout = buffer.on(buffer.packed.to(device))
    draw = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        attention = SelfAttention(sizes.width, sizes.heads, p, p)
        feed_forward = FeedForward(sizes.width, sizes.inner, "gelu_pytorch_tanh" if sizes.tanh else "gelu", p)
        block = post_norm_block(attention, feed_forward, sizes.width, 1e-12)
    for parameter in block.parameters():
        # Scores and states of one size whatever the widths: where attention is nearly sure, rounding shows most.
        std = 0.1 if parameter.ndim == 1 else 1.1 * parameter.shape[1] ** -0.5
        torch.nn.init.normal_(parameter, std=std, generator=draw)
    states = torch.randn(buffer.bucket.tokens, sizes.width, generator=draw)
    return block.to(device), states.to(device), layout


def apart(device: torch.device, dtype: torch.dtype, sizes: Sizes = USUAL) -> float:
    """Return the largest relative distance (2-norm) of states and gradients from the plain layer's in float32.

    Where something is dropped, what drops runs too, and infinity is returned where it gives numbers that are none.
    """
    block, states, layout = small_case(device, sizes)
    direction = torch.randn(states.shape, generator=torch.Generator().manual_seed(1)).to(device)

    def all_of(fused: bool) -> list[Tensor]:
        given = states.clone().requires_grad_()
        run = FusedLayer(block, block.forward)
        with torch.enable_grad(), torch.autocast(device.type, dtype, enabled=fused):
            if fused and not run.fits(given):
                raise RuntimeError("the kernels do not take the layer")
            found = run(given, layout) if fused else block(given, layout=layout)
            # Twice, so that what a layer hands to the next is looked at too.
            found = run(found, layout) if fused else block(found, layout=layout)
        # Weights do not change with what is added to all keys, so that bias has a gradient of rounding errors.
        learned = [p for name, p in block.named_parameters() if name != "attention.key.bias"]
        return [found.detach(), *torch.autograd.grad(found, [given, *learned], direction)]

    with torch.inference_mode(False):
        if sizes.dropout:
            dropping, _, _ = small_case(device, sizes, p=0.1)
            with torch.enable_grad(), torch.autocast(device.type, dtype):
                found = FusedLayer(dropping, dropping.forward)(states.clone().requires_grad_(), layout)
            found.backward(direction)
            grads = [p.grad for p in dropping.parameters() if p.grad is not None]
            if not all(bool(torch.isfinite(grad).all()) for grad in [found.detach(), *grads]):
                return float("inf")
        pairs = zip(all_of(True), all_of(False), strict=True)
        return max(float((a.float() - b).norm() / b.norm().clamp(min=1e-6)) for a, b in pairs)

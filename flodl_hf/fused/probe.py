"""How far a fused layer is from the plain one: states and gradients of a small case, nothing dropped."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flodl.graph import Graph
from flodl_hf.attention import SelfAttention
from flodl_hf.buckets import Buffer, bucket_of
from flodl_hf.encoder import FeedForward, post_norm_block
from flodl_hf.fused.layer import FusedLayer
from flodl_hf.layout import Packed

__all__ = ["apart", "small_case"]

LENGTHS = (37, 5, 1, 70, 12)


def small_case(device: torch.device, *, seed: int = 0) -> tuple[Graph, Tensor, Packed]:
    """Return a layer of 128 numbers and two heads, states, and a bucketed layout of a few texts."""
    lengths = np.array(LENGTHS)
    buffer = Buffer(bucket_of(lengths))
    buffer.write(np.zeros(int(lengths.sum()), np.int32), None, lengths)
    _, _, layout = buffer.on(buffer.packed.to(device))
    draw = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        block = post_norm_block(SelfAttention(128, 2, 0.0, 0.0), FeedForward(128, 512, "gelu", 0.0), 128, 1e-12)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=draw)
    states = torch.randn(buffer.bucket.tokens, 128, generator=draw)
    return block.to(device), states.to(device), layout


def apart(device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest relative distance (2-norm) of states and gradients from the plain layer's in float32."""
    block, states, layout = small_case(device)
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
        pairs = zip(all_of(True), all_of(False), strict=True)
        return max(float((a.float() - b).norm() / b.norm().clamp(min=1e-6)) for a, b in pairs)

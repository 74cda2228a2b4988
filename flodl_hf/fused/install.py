"""Which layers of a model are computed by our kernels while it trains, and how they are put in and taken out.

A layer keeps its modules, parameters and names; what changes is the function that runs it. So whatever reads or
writes the model meanwhile (optimiser, checkpoints, prediction) sees what it always saw.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from flodl.graph import Graph
from flodl_hf.activations import GELUS
from flodl_hf.disentangled.attention import DisentangledAttention
from flodl_hf.fused.layer import WIDEST, WIDTHS, FusedLayer
from flodl_hf.fused.probe import Sizes, apart
from flodl_hf.runtime.blocks import is_block

__all__ = ["fuse_layers"]

NEEDS_CUDA = True
NEAREST = {torch.bfloat16: 5e-2, torch.float16: 1e-2}


def fuse_layers(graph: Graph, dtype: torch.dtype) -> Callable[[], None]:
    """Have the shared layers of a graph computed by fused kernels in training; return what undoes it.

    Nothing changes where there is no CUDA device, no Triton, or a device on which the kernels are found wanting.

    Args:
        graph: of a model, on its device.
        dtype: of autocast: bfloat16 or float16.
    """
    device = next(graph.parameters()).device
    blocks = {id(part): part for part in graph.modules() if isinstance(part, Graph) and _fits(part)}
    if not blocks or (NEEDS_CUDA and device.type != "cuda"):
        return _nothing
    if not all(kernels_hold(device, dtype, sizes) for sizes in dict.fromkeys(map(_sizes, blocks.values()))):
        return _nothing
    for block in blocks.values():
        block.__dict__["forward"] = FusedLayer(block, block.forward)

    def undo() -> None:
        for block in blocks.values():
            block.__dict__.pop("forward", None)

    return undo


def _nothing() -> None:
    return None


def _fits(block: Graph) -> bool:
    if not is_block(block) and not is_block(block, DisentangledAttention, ("layout", "relative")):
        return False
    attention: Any = block.get_submodule("attention")
    feed_forward: Any = block.get_submodule("feed_forward")
    width = attention.query.in_features
    return (
        width // attention.num_heads in WIDTHS
        and width <= WIDEST
        and feed_forward.activation.name in GELUS
        and all(part.weight.dtype == torch.float32 for part in (attention.query, feed_forward.up, feed_forward.down))
        and "forward" not in block.__dict__
    )


def _sizes(block: Graph) -> Sizes:
    attention: Any = block.get_submodule("attention")
    feed_forward: Any = block.get_submodule("feed_forward")
    dropped = [m.p for m in block.modules() if isinstance(m, nn.Dropout)]
    own = attention.attention_dropout
    dropout = any(dropped) or (isinstance(own, float) and own > 0)
    return Sizes(
        attention.query.in_features, attention.num_heads, feed_forward.up.out_features,
        GELUS[feed_forward.activation.name], dropout,
    )  # fmt: skip


def kernels_hold(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> bool:
    """Return whether a fused layer gives on a device what the plain one gives there; if not, warn why.

    Triton compiles at run time, for devices and with compilers that we have never seen, so this is tried out, once
    a process for each kind of layer.
    """
    try:
        fault = _fault(device, dtype, sizes)
    except torch.OutOfMemoryError:
        fault = "there is no memory left to try them"  # which may pass, so it is not kept
    if fault:
        warnings.warn(
            f"fine-tuning on {device} in {dtype} goes on without fused layers, more slowly: {fault}", stacklevel=2
        )
    return not fault


@cache
def _fault(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> str:
    """Return what is wrong with the kernels; empty if nothing is."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the device is older than compute capability 8.0"
    try:
        # A run's own random numbers must not depend on whether its process has asked before.
        with torch.cuda.device(device), torch.random.fork_rng(devices=[device]):
            found = apart(device, dtype, sizes)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # Whatever a compiler may raise: torch's operations do the same work.
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "" if found <= NEAREST[dtype] else f"results part by {found:.1e}"

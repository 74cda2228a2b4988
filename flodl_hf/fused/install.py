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

from flodl.graph import Graph
from flodl_hf.disentangled.attention import DisentangledAttention
from flodl_hf.fused.layer import GELUS, WIDEST, WIDTHS, FusedLayer
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
    if not blocks or (NEEDS_CUDA and device.type != "cuda") or not kernels_hold(device, dtype):
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


@cache
def kernels_hold(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a fused layer gives on a device what the plain one gives there; asked once a process.

    Triton compiles at run time, for devices and with compilers that we have never seen.
    """
    if find_spec("triton") is None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    from flodl_hf.fused.probe import apart

    try:
        # A run's own random numbers must not depend on whether its process has asked before.
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            found = apart(device, dtype)
        fault = "" if found <= NEAREST[dtype] else f"results part by {found:.1e}"
    except Exception as error:
        # Whatever a compiler may raise: torch's operations do the same work.
        fault = f"{type(error).__name__}: {error}".splitlines()[0]
    if fault:
        warnings.warn(
            f"fine-tuning on {device} in {dtype} goes on without fused layers, more slowly: {fault}", stacklevel=2
        )
    return not fault

"""What the families' encoders consist of.

    graphs       the shared encoder as graphs: embeddings, stacks of layers, poolers
    activations  the functions that ``hidden_act`` may name
    norms        layer norms whose reference computes them otherwise than torch
    parts        tensors of a file that hold several of ours, and products by them
    layer        the one layer of all families: what is computed, in which order
    bodies       the few shapes that a task's classifier comes in
    losses       as transformers computes them

How a layer's operations are computed is decided in `flodl_hf.backends`; attention is `flodl_hf.attention`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flodl_hf.encoder.graphs import (
        BlockConfig,
        Embeddings,
        FeedForward,
        FirstToken,
        MeanToken,
        Repeated,
        bert_block,
        chain,
        pooler,
        post_norm_block,
        pre_norm_block,
        stack,
    )

__all__ = [
    "BlockConfig",
    "Embeddings",
    "FeedForward",
    "FirstToken",
    "MeanToken",
    "Repeated",
    "bert_block",
    "chain",
    "pooler",
    "post_norm_block",
    "pre_norm_block",
    "stack",
]


def __getattr__(name: str) -> Any:
    # Only on demand: families and files use modules of this room without the rest of it.
    if name in __all__:
        return getattr(import_module("flodl_hf.encoder.graphs"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

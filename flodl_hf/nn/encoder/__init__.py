"""Building blocks of the families' encoders.

    graphs       the shared encoder as graphs: embeddings, stacks of layers, poolers
    task_heads   classifier modules of the tasks
    deberta      parts of DeBERTa other than attention
    losses       as transformers computes them

A layer is `flodl_hf.nn.layers`; how its operations are computed is decided in `flodl_hf.nn.backends`; attention is
`flodl_hf.nn.attention`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flodl_hf.nn.encoder.graphs import (
        BlockConfig,
        Embeddings,
        FirstToken,
        MeanToken,
        bert_block,
        chain,
        pooler,
        pre_norm_block,
        stack,
    )

__all__ = [
    "BlockConfig",
    "Embeddings",
    "FirstToken",
    "MeanToken",
    "bert_block",
    "chain",
    "pooler",
    "pre_norm_block",
    "stack",
]


def __getattr__(name: str) -> Any:
    # Only on demand: families and files use modules of this package without the rest of it.
    if name in __all__:
        return getattr(import_module("flodl_hf.nn.encoder.graphs"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

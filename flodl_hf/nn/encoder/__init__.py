"""Building blocks of the families' encoders.

    graphs       the shared encoder as graphs: embeddings, stacks of layers, poolers
    task_heads   classifier modules of the tasks
    deberta      parts of DeBERTa other than attention
    losses       as transformers computes them

A layer is `flodl_hf.nn.layers`; how its operations are computed is decided in `flodl_hf.nn.backends`; attention is
`flodl_hf.nn.attention`.
"""

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

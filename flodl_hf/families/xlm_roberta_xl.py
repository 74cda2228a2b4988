"""XLM-RoBERTa-XL and -XXL (Goyal et al. 2021, https://arxiv.org/abs/2105.00572).

RoBERTa's encoder with 3.5 and 10.7 billion parameters. It departs from RoBERTa in:

* embeddings are not normalised;
* a layer normalises the inputs of its parts rather than their sums, and a last norm follows the last layer;
* nothing is dropped after the feed-forward part;
* norms have an epsilon of 1e-5 where the file names none.
"""

from __future__ import annotations

from torch import nn

from flodl.graph import Graph
from flodl_hf.families import bert, roberta
from flodl_hf.families.roberta import RobertaConfig
from flodl_hf.families.schema.config_rows import changed
from flodl_hf.families.schema.record import KeyRow, rows_under
from flodl_hf.nn.encoder import chain, pre_norm_block, stack

MOVED = {
    "encoder.embeddings.norm": None,
    "encoder.layers.{i}.attention_norm": "encoder.layer.{i}.attention.self_attn_layer_norm",
    "encoder.layers.{i}.feed_forward_norm": "encoder.layer.{i}.LayerNorm",
}
KEYS = (*rows_under("roberta", roberta.KEYS, MOVED), KeyRow("encoder.norm", "roberta.encoder.LayerNorm"))
ROWS = changed(roberta.CONFIG, {"norm_eps": {"default": 1e-5}, "type_vocab_size": {"default": 1}})


def encoder(c: RobertaConfig) -> Graph:
    """Return the graph from ids to token states."""
    layers = stack(pre_norm_block(c, feed_forward_dropout=0.0) for _ in range(c.num_layers))
    return chain(
        bert.embeddings(c, norm_eps=None, positions_after_pad=True),
        layers,
        norm=nn.LayerNorm(c.hidden_size, eps=c.norm_eps),
    )


# Of its 36 layers two, at their full width.
REAL = roberta.REAL | {
    "vocab_size": 250880, "hidden_size": 2560, "num_hidden_layers": 2, "num_attention_heads": 32,
    "intermediate_size": 10240,
}  # fmt: skip

FAMILY = roberta.FAMILY.renamed(
    "xlm-roberta-xl",
    "XLMRobertaXL",
    rows=ROWS,
    keys=KEYS,
    encoder=encoder,
    tokenizer=roberta.PIECES,
    left_out={
        "vocab_size": 250880, "hidden_size": 2560, "num_layers": 36, "num_heads": 32, "intermediate_size": 10240,
        "max_positions": 514,
    },
    real={"base": REAL},
)  # fmt: skip

"""RoBERTa with norms first (Ott et al. 2019, https://arxiv.org/abs/1904.01038).

RoBERTa's encoder, trained with fairseq's option of that name. It departs from RoBERTa in:

* a layer normalises the inputs of its parts rather than their sums;
* a last norm follows the last layer.
"""

from __future__ import annotations

from torch import nn

from flodl.graph import Graph
from flodl_hf.families import bert, roberta
from flodl_hf.families.roberta import RobertaConfig
from flodl_hf.families.schema.record import KeyRow, rows_under
from flodl_hf.nn.encoder import chain, pre_norm_block, stack

PREFIX = "roberta_prelayernorm"
MOVED = {
    "encoder.layers.{i}.attention_norm": "encoder.layer.{i}.attention.LayerNorm",
    "encoder.layers.{i}.feed_forward_norm": "encoder.layer.{i}.intermediate.LayerNorm",
}
KEYS = (*rows_under(PREFIX, roberta.KEYS, MOVED), KeyRow("encoder.norm", PREFIX + ".LayerNorm"))


def encoder(c: RobertaConfig) -> Graph:
    """Return the graph from ids to token states."""
    layers = stack(pre_norm_block(c) for _ in range(c.num_layers))
    return chain(bert.embeddings(c, positions_after_pad=True), layers, norm=nn.LayerNorm(c.hidden_size, eps=c.norm_eps))


FAMILY = roberta.FAMILY.renamed(
    "roberta-prelayernorm", "RobertaPreLayerNorm", base_prefix=PREFIX, keys=KEYS, encoder=encoder,
    left_out=roberta.FAMILY.left_out,
)  # fmt: skip

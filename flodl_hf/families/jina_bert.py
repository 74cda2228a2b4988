"""JinaBERT (Günther et al. 2023, https://arxiv.org/abs/2310.19923): jina-embeddings-v2.

BERT's encoder without positions. It departs from BERT in:

* every head takes from its scores the distance of two tokens, times a slope of the head's own (ALiBi, in both
  directions), so that no table bounds a text's length;
* the feed-forward part is gated; only its last projection has a bias, and it drops values inside and not after.

Files have ``model_type: bert`` with ``position_embedding_type: alibi``, and were written for the code of another
repository, which is not needed.
"""

from __future__ import annotations

from dataclasses import dataclass

from flodl.graph import Graph
from flodl_hf.families import bert
from flodl_hf.families.schema.config_rows import IgnoredKey, Row, changed, one_of
from flodl_hf.families.schema.record import KeyRow, rows_under
from flodl_hf.nn.encoder import bert_block, chain, stack
from flodl_hf.nn.positions import SlopedBias


@dataclass(frozen=True, kw_only=True)
class JinaBertConfig(bert.BertConfig):
    """The settings of a JinaBERT encoder: BERT's, and what gates its feed-forward parts.

    Attributes:
        gate: the feed-forward part: "geglu" is gated by GELU, "reglu" by ReLU.
    """

    gate: str = "geglu"


GATES = {"geglu": "gelu", "reglu": "relu"}

# fmt: off
CONFIG = (
    *changed(bert.CONFIG, {"max_positions": {"default": 8192}}),
    Row("gate", "feed_forward_type", one_of(*GATES), "geglu"),
)

IGNORED_KEYS = (
    IgnoredKey("position_embedding_type", "scores fall with distance, without a table", ("alibi", None)),
    IgnoredKey("model_max_length",        "the tokenizer's files specify it"),
    IgnoredKey("emb_pooler",              "sentence-transformers' files specify the pooling of texts"),
)

MOVED = {
    "encoder.embeddings.position":                None,
    "encoder.layers.{i}.feed_forward.up":         "encoder.layer.{i}.mlp.gated_layers[1/2]",
    "encoder.layers.{i}.feed_forward.activation": "encoder.layer.{i}.mlp.gated_layers[0/2]",
    "encoder.layers.{i}.feed_forward.down":       "encoder.layer.{i}.mlp.wo",
    "encoder.layers.{i}.feed_forward_norm":       "encoder.layer.{i}.mlp.layernorm",
}
KEYS = tuple(
    KeyRow(row.ours.replace("feed_forward.activation", "feed_forward.gate"), row.theirs)
    for row in rows_under("bert", bert.KEYS, MOVED)
)
# fmt: on


def encoder(c: JinaBertConfig) -> Graph:
    """Return the graph from ids to token states: BERT's, over plain products, with a gate."""
    gated = {
        "activation": GATES[c.gate], "dropout": 0.0, "gated": True, "bias": False, "down_bias": True,
        "inner_dropout": c.hidden_dropout,
    }  # fmt: skip
    blocks = (bert_block(c, attention={"fused": False}, feed_forward=gated) for _ in range(c.num_layers))
    return chain(bert.embeddings(c, max_positions=0), stack(blocks, "bias"), bias=SlopedBias(c.num_heads))


TASKS = ("sequence_classification", "token_classification", "question_answering", "masked_lm")

FAMILY = bert.FAMILY.renamed(
    "jina_bert", "JinaBert", config=JinaBertConfig, rows=CONFIG, ignored_keys=IGNORED_KEYS, keys=KEYS, encoder=encoder,
    heads={task: bert.HEADS[task] for task in TASKS}, pretraining={}, tiny={}, real={},
    takes_prefix=False,
    claims={"model_type": ("bert",), "position_embedding_type": ("alibi",)},
)  # fmt: skip

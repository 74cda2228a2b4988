"""jina-embeddings-v3 (Sturua et al. 2024, https://arxiv.org/abs/2409.10173), as transformers has it.

XLM-RoBERTa's vocabulary and heads over rotary positions. It departs from RoBERTa in:

* queries and keys are turned by their places instead of positions being added;
* there is one token type, whose row every token gets;
* files hold query, key and value in one matrix; computed are they one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flodl.graph import Graph
from flodl_hf.attention import SelfAttention
from flodl_hf.config_rows import optional, token_id
from flodl_hf.encoder import Embeddings, chain, post_norm_block, stack
from flodl_hf.encoder_layer import EncoderLayer, FeedForward
from flodl_hf.families import bert, roberta, xlm_roberta
from flodl_hf.keys import KeyRow
from flodl_hf.rotary import Rotary, RotarySettings, rotary_rows

__all__ = ["FAMILY", "JinaEmbeddingsV3Config"]


@dataclass(frozen=True, kw_only=True)
class JinaEmbeddingsV3Config(bert.BertConfig):
    """The settings of a jina-embeddings-v3 encoder: BERT's, and how queries and keys are turned."""

    theta: float = 20_000.0
    """Base of the wavelengths, where ``rotary`` does not state it."""
    rotary: RotarySettings | None = None
    """How queries and keys are turned; None for ``theta`` and ``scaling``."""
    scaling: RotarySettings | None = None
    """How wavelengths are stretched, as older files state it."""


DEFAULTS = {"max_positions": 8194, "type_vocab_size": 1, "norm_eps": 1e-5, "pad_token_id": 1}
CONFIG = (
    *(
        replace(
            row, default=DEFAULTS.get(row.field, row.default),
            check=optional(token_id()) if row.field == "pad_token_id" else row.check,
        )
        for row in bert.CONFIG
    ),
    *rotary_rows(20_000.0),
)  # fmt: skip

# fmt: off
LAYER = "roberta.encoder.layers.{i}"
KEYS = (
    KeyRow("encoder.embeddings.word",              "roberta.embeddings.word_embeddings"),
    KeyRow("encoder.embeddings.token_type",        "roberta.embeddings.token_type_embeddings"),
    KeyRow("encoder.embeddings.norm",              "roberta.emb_ln"),
    KeyRow("encoder.layers.{i}.attention.query",   LAYER + ".mixer.Wqkv[0/3]"),
    KeyRow("encoder.layers.{i}.attention.key",     LAYER + ".mixer.Wqkv[1/3]"),
    KeyRow("encoder.layers.{i}.attention.value",   LAYER + ".mixer.Wqkv[2/3]"),
    KeyRow("encoder.layers.{i}.attention.output",  LAYER + ".mixer.out_proj"),
    KeyRow("encoder.layers.{i}.attention_norm",    LAYER + ".norm1"),
    KeyRow("encoder.layers.{i}.feed_forward.up",   LAYER + ".mlp.fc1"),
    KeyRow("encoder.layers.{i}.feed_forward.down", LAYER + ".mlp.fc2"),
    KeyRow("encoder.layers.{i}.feed_forward_norm", LAYER + ".norm2"),
    KeyRow("pooler.dense",                         "roberta.pooler.dense"),
)
# What transformers calls its modules; its files have the names above.
ALSO = (
    KeyRow("encoder.embeddings.norm",              "roberta.embeddings.LayerNorm"),
    KeyRow("encoder.layers.{i}.attention.query",   "roberta.layers.{i}.self_attn.q_proj"),
    KeyRow("encoder.layers.{i}.attention.key",     "roberta.layers.{i}.self_attn.k_proj"),
    KeyRow("encoder.layers.{i}.attention.value",   "roberta.layers.{i}.self_attn.v_proj"),
    KeyRow("encoder.layers.{i}.attention.output",  "roberta.layers.{i}.self_attn.o_proj"),
    KeyRow("encoder.layers.{i}.attention_norm",    "roberta.layers.{i}.post_attention_layernorm"),
    KeyRow("encoder.layers.{i}.feed_forward.up",   "roberta.layers.{i}.mlp.fc1"),
    KeyRow("encoder.layers.{i}.feed_forward.down", "roberta.layers.{i}.mlp.fc2"),
    KeyRow("encoder.layers.{i}.feed_forward_norm", "roberta.layers.{i}.post_mlp_layernorm"),
)
# fmt: on


def block(c: JinaEmbeddingsV3Config) -> EncoderLayer:
    """Return one layer: BERT's, with rotations."""
    rotary = Rotary(c.hidden_size // c.num_heads, c.theta, c.rotary or c.scaling)
    attention = SelfAttention(c.hidden_size, c.num_heads, c.attention_dropout, c.hidden_dropout, rotary=rotary)
    feed_forward = FeedForward(c.hidden_size, c.intermediate_size, c.activation, c.hidden_dropout)
    return post_norm_block(attention, feed_forward, c.hidden_size, c.norm_eps)


def encoder(c: JinaEmbeddingsV3Config) -> Graph:
    """Return the graph from ids to token states."""
    embeddings = Embeddings(
        c.vocab_size, c.hidden_size, c.norm_eps, c.hidden_dropout,
        type_vocab_size=c.type_vocab_size, pad_token_id=c.pad_token_id,
    )  # fmt: skip
    return chain(embeddings, stack(block(c) for _ in range(c.num_layers)))


TASKS = ("sequence_classification", "token_classification", "question_answering", "masked_lm")

FAMILY = bert.FAMILY.renamed(
    "jina_embeddings_v3", "JinaEmbeddingsV3", base_prefix="roberta", config=JinaEmbeddingsV3Config, rows=CONFIG,
    keys=KEYS, also=ALSO, ignored=(), encoder=encoder, heads={task: roberta.HEADS[task] for task in TASKS},
    pretraining={}, uses_token_types=False, tokenizer=xlm_roberta.TOKENIZER,
    tiny={"base": {}, "one type": {"type_vocab_size": 1}},
    real={"base": {"vocab_size": 250002, "max_position_embeddings": 8194, "type_vocab_size": 1, "pad_token_id": 1}},
    checkpoints={"base": "jinaai/jina-embeddings-v3-hf"},
)  # fmt: skip

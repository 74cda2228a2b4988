"""ALBERT (Lan et al. 2019, https://arxiv.org/abs/1909.11942).

BERT's encoder with shared layers. It departs from BERT in:

* the tables are ``embedding_size`` wide and a projection widens them to ``hidden_size``;
* the stack repeats groups of blocks: layer i applies all blocks of group ``i * groups / layers``;
* no dropout inside the feed-forward part, and none by default;
* the masked-word head narrows back to ``embedding_size``.

Here a block is stored once, as ``layers.{k}``, however often the stack applies it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from flodl.graph import Graph
from flodl_hf.families.schema import Family, FamilyHead, FamilyTokenizer
from flodl_hf.families.schema.config_rows import (
    IgnoredKey,
    Row,
    activation,
    count,
    epsilon,
    fraction,
    optional,
    padding_id,
)
from flodl_hf.families.schema.keys import KeyRow, Tie
from flodl_hf.families.schema.sizes import SIZES, EncoderSizes
from flodl_hf.nn.attention.dot_product import SelfAttention
from flodl_hf.nn.encoder import task_heads
from flodl_hf.nn.encoder.graphs import Embeddings, Repeated, chain, pooler, post_norm_block
from flodl_hf.nn.layers.encoder_layer import EncoderLayer, FeedForward


@dataclass(frozen=True, kw_only=True)
class AlbertConfig(EncoderSizes):
    """The settings of an ALBERT encoder."""

    embedding_size: int
    """Width of the tables."""
    num_layers: int
    """How often a group of blocks is applied."""
    num_groups: int = 1
    """Groups of blocks with separate weights."""
    blocks_per_group: int = 1
    """Blocks in a group."""
    max_positions: int
    """Rows of the position table: the longest row of tokens."""
    type_vocab_size: int
    """Rows of the token type table."""
    activation: str = "gelu_new"
    """Name of the feed-forward activation."""
    hidden_dropout: float = 0.0
    """Probability of dropping a value of a state, in [0, 1)."""
    attention_dropout: float = 0.0
    """Probability of dropping an attention weight, in [0, 1)."""
    classifier_dropout: float | None = 0.1
    """Probability of dropping a classifier's input; None takes ``hidden_dropout``."""
    norm_eps: float = 1e-12
    """Epsilon of every layer norm."""
    pad_token_id: int | None = 0
    """The word row that gets no gradient."""


# fmt: off
CONFIG = (
    *SIZES,
    Row("embedding_size",     "embedding_size",               count()),
    Row("num_groups",         "num_hidden_groups",            count(most=1024), 1),
    Row("blocks_per_group",   "inner_group_num",              count(most=64), 1),
    Row("max_positions",      "max_position_embeddings",      count(most=1_000_000)),
    Row("type_vocab_size",    "type_vocab_size",              count(), 2),
    Row("activation",         "hidden_act",                   activation(), "gelu_new"),
    Row("hidden_dropout",     "hidden_dropout_prob",          fraction(), 0.0),
    Row("attention_dropout",  "attention_probs_dropout_prob", fraction(), 0.0),
    Row("classifier_dropout", "classifier_dropout_prob",      optional(fraction()), 0.1),
    Row("norm_eps",           "layer_norm_eps",               epsilon(), 1e-12),
    Row("pad_token_id",       "pad_token_id",                 padding_id(), 0),
)

IGNORED_KEYS = (
    IgnoredKey("down_scale_factor",  "a note of the first release"),
    IgnoredKey("gap_size",           "a note of the first release"),
    IgnoredKey("net_structure_type", "a note of the first release"),
    IgnoredKey("num_memory_blocks",  "a note of the first release"),
    IgnoredKey("layers_to_keep",     "a note of the first release"),
)

BLOCK = "albert.encoder.albert_layer_groups.{g}.albert_layers.{b}"
KEYS = (
    KeyRow("encoder.embeddings.word",                "albert.embeddings.word_embeddings"),
    KeyRow("encoder.embeddings.position",            "albert.embeddings.position_embeddings"),
    KeyRow("encoder.embeddings.token_type",          "albert.embeddings.token_type_embeddings"),
    KeyRow("encoder.embeddings.norm",                "albert.embeddings.LayerNorm"),
    KeyRow("encoder.projection",                     "albert.encoder.embedding_hidden_mapping_in"),
    KeyRow("encoder.layers.{i}.attention.query",     BLOCK + ".attention.query"),
    KeyRow("encoder.layers.{i}.attention.key",       BLOCK + ".attention.key"),
    KeyRow("encoder.layers.{i}.attention.value",     BLOCK + ".attention.value"),
    KeyRow("encoder.layers.{i}.attention.output",    BLOCK + ".attention.dense"),
    KeyRow("encoder.layers.{i}.attention_norm",      BLOCK + ".attention.LayerNorm"),
    KeyRow("encoder.layers.{i}.feed_forward.up",     BLOCK + ".ffn"),
    KeyRow("encoder.layers.{i}.feed_forward.activation", BLOCK + ".activation"),
    KeyRow("encoder.layers.{i}.feed_forward.down",   BLOCK + ".ffn_output"),
    KeyRow("encoder.layers.{i}.feed_forward_norm",   BLOCK + ".full_layer_layer_norm"),
    KeyRow("pooler.dense",                           "albert.pooler"),
)

MASKED_LM_KEYS = (
    KeyRow("head.dense",        "predictions.dense"),
    KeyRow("head.activation",   "predictions.activation"),
    KeyRow("head.norm",         "predictions.LayerNorm"),
    KeyRow("head.decoder",      "predictions.decoder"),
    KeyRow("head.decoder.bias", "predictions.bias"),
)
# fmt: on


def indices(c: AlbertConfig) -> list[dict[str, int]]:
    """Return which group and place each stored block has."""
    size = c.blocks_per_group
    return [{"i": g * size + b, "g": g, "b": b} for g in range(c.num_groups) for b in range(size)]


def block(c: AlbertConfig) -> EncoderLayer:
    """Return one layer: BERT's, without dropout inside the feed-forward part."""
    attention = SelfAttention(c.hidden_size, c.num_heads, c.attention_dropout, c.hidden_dropout)
    feed_forward = FeedForward(c.hidden_size, c.intermediate_size, c.activation, 0.0)
    return post_norm_block(attention, feed_forward, c.hidden_size, c.norm_eps)


def encoder(c: AlbertConfig) -> Graph:
    """Return the graph from ids to token states."""
    embeddings = Embeddings(
        c.vocab_size, c.embedding_size, c.norm_eps, c.hidden_dropout,
        max_positions=c.max_positions, type_vocab_size=c.type_vocab_size, pad_token_id=c.pad_token_id,
    )  # fmt: skip
    size = c.blocks_per_group
    blocks = [block(c) for _ in range(c.num_groups * size)]
    # The reference divides as floats and cuts off; the same expression keeps odd counts the same.
    groups = [int(layer / (c.num_layers / c.num_groups)) for layer in range(c.num_layers)]
    layers = Repeated(blocks, [group * size + b for group in groups for b in range(size)])
    return chain(embeddings, layers, projection=nn.Linear(c.embedding_size, c.hidden_size))


MASKED_LM = FamilyHead(
    body=lambda c, _: task_heads.lm(c.hidden_size, c.embedding_size, c.vocab_size, c.activation, c.norm_eps),
    keys=MASKED_LM_KEYS,
    ties=(Tie("encoder.embeddings.word.weight", "head.decoder.weight"),),
    aliases=(("predictions.decoder.bias", "predictions.bias"),),
)

HEADS = {
    "sequence_classification": FamilyHead(
        body=lambda c, labels: task_heads.linear(c.hidden_size, labels, c.classifier_dropout or 0.0),
        keys=(KeyRow("head.classifier", "classifier"),),
        pooled=True,
        classifier="head.classifier",
    ),
    "token_classification": FamilyHead(
        body=lambda c, labels: task_heads.linear(
            c.hidden_size, labels, c.hidden_dropout if c.classifier_dropout is None else c.classifier_dropout
        ),
        keys=(KeyRow("head.classifier", "classifier"),),
        classifier="head.classifier",
    ),
    "question_answering": FamilyHead(
        body=lambda c, labels: task_heads.linear(c.hidden_size, labels, None, name="spans"),
        keys=(KeyRow("head.spans", "qa_outputs"),),
    ),
    "masked_lm": MASKED_LM,
    "multiple_choice": FamilyHead(
        body=lambda c, _: task_heads.linear(c.hidden_size, 1, c.classifier_dropout or 0.0),
        keys=(KeyRow("head.classifier", "classifier"),),
        pooled=True,
    ),
    "pretraining": replace(
        MASKED_LM,
        keys=(*MASKED_LM_KEYS, KeyRow("relation.classifier", "sop_classifier.classifier")),
        relation=lambda c, labels: task_heads.Relation(c.hidden_size, labels, c.classifier_dropout or 0.0),
        relation_output="sop_logits",
    ),
}

TOKENIZER = FamilyTokenizer(
    special={
        "bos_token": "[CLS]",
        "eos_token": "[SEP]",
        "unk_token": "<unk>",
        "sep_token": "[SEP]",
        "pad_token": "<pad>",
        "cls_token": "[CLS]",
        "mask_token": "[MASK]",
    },
    type_ids=False,  # since transformers 5
    files=("spiece.model",),
    build="pieces",
    lowercase=True,
    cleaned=True,
    prefix=True,
    unknown=1,
    steps=("quotes", "accents unless kept", "lower", "charsmap"),
    spaces="words",
)

TINY = {"embedding_size": 16}
GROUPS = TINY | {
    "num_hidden_layers": 5, "num_hidden_groups": 2, "inner_group_num": 2,
    "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
}  # fmt: skip

FAMILY = Family(
    model_type="albert",
    class_prefix="Albert",
    base_prefix="albert",
    config=AlbertConfig,
    left_out={
        "vocab_size": 30000, "embedding_size": 128, "hidden_size": 4096, "num_layers": 12, "num_heads": 64,
        "intermediate_size": 16384, "max_positions": 512,
    },
    rows=CONFIG,
    ignored_keys=IGNORED_KEYS,
    keys=KEYS,
    encoder=encoder,
    pooler=lambda c: pooler(c.hidden_size),
    heads=HEADS,
    indices=indices,
    pretraining={"AlbertForPreTraining": "masked_lm"},
    tokenizer=TOKENIZER,
    tiny={"base": TINY, "groups": GROUPS},
    real={"base": {"vocab_size": 30000, "embedding_size": 128, "hidden_act": "gelu_new"}},
)  # fmt: skip

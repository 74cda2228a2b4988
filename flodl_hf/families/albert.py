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
from flodl_hf.families import bert
from flodl_hf.families.schema import FamilyHead, FamilyTokenizer
from flodl_hf.families.schema.config_rows import IgnoredKey, Row, changed, count
from flodl_hf.families.schema.record import KeyRow, Tie, rows_under
from flodl_hf.nn import task_heads
from flodl_hf.nn.encoder import Repeated, bert_block, chain


@dataclass(frozen=True, kw_only=True)
class AlbertConfig(bert.BertConfig):
    """The settings of an ALBERT encoder: BERT's, the width of its tables, and its groups of blocks.

    Attributes:
        embedding_size: width of the tables.
        num_layers: how often a group of blocks is applied.
        num_groups: groups of blocks with separate weights.
        blocks_per_group: blocks in a group.
    """

    embedding_size: int
    num_layers: int
    num_groups: int = 1
    blocks_per_group: int = 1
    # ALBERT's defaults of BERT's settings.
    activation: str = "gelu_new"
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    classifier_dropout: float | None = 0.1


# fmt: off
CHANGED = {
    "activation":         {"default": "gelu_new"},
    "hidden_dropout":     {"default": 0.0},
    "attention_dropout":  {"default": 0.0},
    "classifier_dropout": {"default": 0.1, "key": "classifier_dropout_prob"},
}
CONFIG = (
    *changed(bert.CONFIG, CHANGED),
    Row("embedding_size",   "embedding_size",    count()),
    Row("num_groups",       "num_hidden_groups", count(most=1024), 1),
    Row("blocks_per_group", "inner_group_num",   count(most=64), 1),
)

IGNORED_KEYS = (
    IgnoredKey("down_scale_factor",  "a note of the first release"),
    IgnoredKey("gap_size",           "a note of the first release"),
    IgnoredKey("net_structure_type", "a note of the first release"),
    IgnoredKey("num_memory_blocks",  "a note of the first release"),
    IgnoredKey("layers_to_keep",     "a note of the first release"),
)

BLOCK = "encoder.albert_layer_groups.{g}.albert_layers.{b}"
MOVED = {
    "encoder.layers.{i}.attention.query":         BLOCK + ".attention.query",
    "encoder.layers.{i}.attention.key":           BLOCK + ".attention.key",
    "encoder.layers.{i}.attention.value":         BLOCK + ".attention.value",
    "encoder.layers.{i}.attention.output":        BLOCK + ".attention.dense",
    "encoder.layers.{i}.attention_norm":          BLOCK + ".attention.LayerNorm",
    "encoder.layers.{i}.feed_forward.up":         BLOCK + ".ffn",
    "encoder.layers.{i}.feed_forward.activation": BLOCK + ".activation",
    "encoder.layers.{i}.feed_forward.down":       BLOCK + ".ffn_output",
    "encoder.layers.{i}.feed_forward_norm":       BLOCK + ".full_layer_layer_norm",
    "pooler.dense":                               "pooler",
}
KEYS = (
    *rows_under("albert", bert.KEYS[:4]),
    KeyRow("encoder.projection", "albert.encoder.embedding_hidden_mapping_in"),
    *rows_under("albert", bert.KEYS[4:], MOVED),
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


def encoder(c: AlbertConfig) -> Graph:
    """Return the graph from ids to token states."""
    embeddings, size = bert.embeddings(c, c.embedding_size), c.blocks_per_group
    blocks = [bert_block(c, feed_forward={"dropout": 0.0}) for _ in range(c.num_groups * size)]
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

TEXTS = replace(
    bert.TEXTS, body=lambda c, labels: task_heads.linear(c.hidden_size, labels, c.classifier_dropout or 0.0)
)

HEADS = {
    "sequence_classification": TEXTS,
    "token_classification": bert.TOKENS,
    "question_answering": bert.HEADS["question_answering"],
    "masked_lm": MASKED_LM,
    "multiple_choice": TEXTS.scoring_choices(),
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

FAMILY = bert.FAMILY.renamed(
    "albert", "Albert", base_prefix="albert", prefixes=(), takes_prefix=False, config=AlbertConfig, rows=CONFIG,
    left_out={
        "vocab_size": 30000, "embedding_size": 128, "hidden_size": 4096, "num_layers": 12, "num_heads": 64,
        "intermediate_size": 16384, "max_positions": 512,
    },
    ignored_keys=IGNORED_KEYS, keys=KEYS, ignored=(), encoder=encoder, heads=HEADS, indices=indices,
    pretraining={"AlbertForPreTraining": "masked_lm"}, tokenizer=TOKENIZER, tiny={"base": TINY, "groups": GROUPS},
    real={"base": {"vocab_size": 30000, "embedding_size": 128, "hidden_act": "gelu_new"}},
)  # fmt: skip

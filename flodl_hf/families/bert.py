"""BERT (Devlin et al. 2018, https://arxiv.org/abs/1810.04805).

The encoder that the shared parts are modelled on; it departs from them in nothing:

* learned positions counted from 0 along the row, token types for the second text;
* a pooler (projection and tanh on the first token) that classification reads;
* the masked-word decoder is the word table, with a bias that files store under two names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from flodl.graph import Graph
from flodl_hf.families.schema import Family, FamilyHead, FamilyTokenizer, Ignored
from flodl_hf.families.schema.config_rows import Row, activation, count, epsilon, fraction, optional, padding_id
from flodl_hf.families.schema.record import KeyRow, Tie
from flodl_hf.families.schema.shared_keys import BASE_SIZES, SIZES, EncoderSizes
from flodl_hf.nn import task_heads
from flodl_hf.nn.encoder import Embeddings, bert_block, chain, pooler, stack


@dataclass(frozen=True, kw_only=True)
class BertConfig(EncoderSizes):
    """The settings of a BERT encoder.

    Attributes:
        max_positions: rows of the position table: the longest row of tokens.
        type_vocab_size: rows of the token type table.
        activation: name of the feed-forward activation.
        hidden_dropout: probability of dropping a value of a state, in [0, 1).
        attention_dropout: probability of dropping an attention weight, in [0, 1).
        classifier_dropout: probability of dropping a classifier's input; None takes ``hidden_dropout``.
        norm_eps: epsilon of every layer norm.
        pad_token_id: the word row that gets no gradient.
    """

    max_positions: int
    type_vocab_size: int
    activation: str = "gelu"
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    classifier_dropout: float | None = None
    norm_eps: float = 1e-12
    pad_token_id: int | None = 0


# fmt: off
CONFIG = (
    *SIZES,
    Row("max_positions",      "max_position_embeddings",      count(most=1_000_000)),
    Row("type_vocab_size",    "type_vocab_size",              count(most=65_536), 2),
    Row("activation",         "hidden_act",                   activation(), "gelu"),
    Row("hidden_dropout",     "hidden_dropout_prob",          fraction(), 0.1),
    Row("attention_dropout",  "attention_probs_dropout_prob", fraction(), 0.1),
    Row("classifier_dropout", "classifier_dropout",           optional(fraction()), None),
    Row("norm_eps",           "layer_norm_eps",               epsilon(), 1e-12),
    Row("pad_token_id",       "pad_token_id",                 padding_id(), 0),
)

KEYS = (
    KeyRow("encoder.embeddings.word",                 "bert.embeddings.word_embeddings"),
    KeyRow("encoder.embeddings.position",             "bert.embeddings.position_embeddings"),
    KeyRow("encoder.embeddings.token_type",           "bert.embeddings.token_type_embeddings"),
    KeyRow("encoder.embeddings.norm",                 "bert.embeddings.LayerNorm"),
    KeyRow("encoder.layers.{i}.attention.query",      "bert.encoder.layer.{i}.attention.self.query"),
    KeyRow("encoder.layers.{i}.attention.key",        "bert.encoder.layer.{i}.attention.self.key"),
    KeyRow("encoder.layers.{i}.attention.value",      "bert.encoder.layer.{i}.attention.self.value"),
    KeyRow("encoder.layers.{i}.attention.output",     "bert.encoder.layer.{i}.attention.output.dense"),
    KeyRow("encoder.layers.{i}.attention_norm",       "bert.encoder.layer.{i}.attention.output.LayerNorm"),
    KeyRow("encoder.layers.{i}.feed_forward.up",      "bert.encoder.layer.{i}.intermediate.dense"),
    KeyRow("encoder.layers.{i}.feed_forward.activation", "bert.encoder.layer.{i}.intermediate.intermediate_act_fn"),
    KeyRow("encoder.layers.{i}.feed_forward.down",    "bert.encoder.layer.{i}.output.dense"),
    KeyRow("encoder.layers.{i}.feed_forward_norm",    "bert.encoder.layer.{i}.output.LayerNorm"),
    KeyRow("pooler.dense",                            "bert.pooler.dense"),
)

MASKED_LM_KEYS = (
    KeyRow("head.dense",        "cls.predictions.transform.dense"),
    KeyRow("head.activation",   "cls.predictions.transform.transform_act_fn"),
    KeyRow("head.norm",         "cls.predictions.transform.LayerNorm"),
    KeyRow("head.decoder",      "cls.predictions.decoder"),
    KeyRow("head.decoder.bias", "cls.predictions.bias"),
)

IGNORED = (
    Ignored("linear.weight",                  "ColBERT's projection, which `embed_tokens` reads"),
)
# fmt: on


def embeddings(c: Any, size: int | None = None, kind: type[Embeddings] = Embeddings, **changes: Any) -> Embeddings:
    """Return the sum of words, token types and positions, as wide as states or of this size.

    Args:
        c: the settings of a family.
        size: width of the tables; None for the width of states.
        kind: the class.
        **changes: arguments of the class that the settings do not have under these names.
    """
    return kind(c.vocab_size, size or c.hidden_size, **{
        "norm_eps": c.norm_eps, "dropout": c.hidden_dropout, "max_positions": c.max_positions,
        "type_vocab_size": getattr(c, "type_vocab_size", 0), "pad_token_id": c.pad_token_id, **changes,
    })  # fmt: skip


def widening(c: Any) -> nn.Linear | None:
    """Return the projection of embeddings that are narrower than states; None where they are not."""
    return None if c.embedding_size == c.hidden_size else nn.Linear(c.embedding_size, c.hidden_size)


def encoder(c: BertConfig) -> Graph:
    """Return the graph from ids to token states."""
    return chain(embeddings(c), stack(bert_block(c) for _ in range(c.num_layers)))


def classifier_dropout(c: BertConfig) -> float:
    """Return the dropout before a classifier."""
    return c.hidden_dropout if c.classifier_dropout is None else c.classifier_dropout


def first_token(activation: str, dropout: Callable[[Any], float] = classifier_dropout) -> Callable[[Any, int], Graph]:
    """Return the body that scores texts by their first token, with one dropout before and after a projection."""
    return lambda c, labels: task_heads.first_token_mlp(
        c.hidden_size, labels, dropout_in=dropout(c), activation=activation, dropout_out=dropout(c)
    )


MASKED_LM = FamilyHead(
    body=lambda c, _: task_heads.lm(c.hidden_size, c.hidden_size, c.vocab_size, c.activation, c.norm_eps),
    keys=MASKED_LM_KEYS,
    ties=(Tie("encoder.embeddings.word.weight", "head.decoder.weight"),),
    aliases=(("cls.predictions.decoder.bias", "cls.predictions.bias"),),
)

TOKENS = FamilyHead(
    body=lambda c, labels: task_heads.linear(c.hidden_size, labels, classifier_dropout(c)),
    keys=(KeyRow("head.classifier", "classifier"),),
    classifier="head.classifier",
)
# The labels of tokens in families without a dropout for classifiers.
DROPPED_TOKENS = replace(TOKENS, body=lambda c, labels: task_heads.linear(c.hidden_size, labels, c.hidden_dropout))
TEXTS = replace(TOKENS, pooled=True)

HEADS = {
    "sequence_classification": TEXTS,
    "token_classification": TOKENS,
    "question_answering": FamilyHead(
        body=lambda c, labels: task_heads.linear(c.hidden_size, labels, None, name="spans"),
        keys=(KeyRow("head.spans", "qa_outputs"),),
    ),
    "masked_lm": MASKED_LM,
    "multiple_choice": TEXTS.scoring_choices(),
    "next_sentence": FamilyHead(
        body=lambda c, _: task_heads.linear(c.hidden_size, 2, None),
        keys=(KeyRow("head.classifier", "cls.seq_relationship"),),
        pooled=True,
    ),
    "pretraining": replace(
        MASKED_LM,
        keys=(*MASKED_LM_KEYS, KeyRow("relation.classifier", "cls.seq_relationship")),
        relation=lambda c, _: task_heads.Relation(c.hidden_size, 2),
    ),
}

TOKENIZER = FamilyTokenizer(
    special={
        "unk_token": "[UNK]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "mask_token": "[MASK]",
    },
    type_ids=True,
    files=("vocab.txt",),
    lowercase=True,
)

FAMILY = Family(
    model_type="bert",
    class_prefix="Bert",
    base_prefix="bert",
    # DPR's encoders (Karpukhin et al. 2020) are BERT models under these names.
    prefixes=("bert_model", "question_encoder.bert_model", "ctx_encoder.bert_model"),
    takes_prefix=True,
    config=BertConfig,
    left_out=BASE_SIZES | {"vocab_size": 30522, "max_positions": 512},
    rows=CONFIG,
    keys=KEYS,
    ignored=IGNORED,
    encoder=encoder,
    pooler=lambda c: pooler(c.hidden_size),
    heads=HEADS,
    pretraining={"BertForPreTraining": "masked_lm", "HF_ColBERT": "base"},
    tokenizer=TOKENIZER,
)

"""DistilBERT (Sanh et al. 2019, https://arxiv.org/abs/1910.01108).

BERT's encoder with fewer layers. It departs from BERT in:

* no token types and no pooler;
* no dropout on the attention's output, and an epsilon that is always 1e-12;
* classification reads the first token through a projection and ReLU, with its own dropout;
* question answering drops before its projection.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flodl.graph import Graph
from flodl_hf.families import bert
from flodl_hf.families.schema import Family, FamilyHead
from flodl_hf.families.schema.config_rows import IgnoredKey, Row, activation, count, fraction, padding_id
from flodl_hf.families.schema.record import KeyRow
from flodl_hf.families.schema.shared_keys import BASE_SIZES, EncoderSizes
from flodl_hf.nn import task_heads
from flodl_hf.nn.encoder import bert_block, chain, stack


@dataclass(frozen=True, kw_only=True)
class DistilBertConfig(EncoderSizes):
    """The settings of a DistilBERT encoder.

    Attributes:
        max_positions: rows of the position table: the longest row of tokens.
        activation: name of the feed-forward activation.
        hidden_dropout: probability of dropping a value of a state, in [0, 1).
        attention_dropout: probability of dropping an attention weight, in [0, 1).
        span_dropout: probability of dropping a value before the answer's projection, in [0, 1).
        classifier_dropout: probability of dropping a value before the text labels' projection, in [0, 1).
        pad_token_id: the word row that gets no gradient.
    """

    max_positions: int
    activation: str = "gelu"
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    span_dropout: float = 0.1
    classifier_dropout: float = 0.2
    pad_token_id: int | None = 0
    norm_eps = 1e-12  # no setting of the reference implementation


# fmt: off
CONFIG = (
    Row("vocab_size",         "vocab_size",              count(most=10_000_000)),
    Row("hidden_size",        "dim",                     count(), aliases=("hidden_size",), win=True),
    Row("num_layers",         "n_layers",                count(most=1024), aliases=("num_hidden_layers",), win=True),
    Row("num_heads",          "n_heads",                 count(most=4096), aliases=("num_attention_heads",), win=True),
    Row("intermediate_size",  "hidden_dim",              count(most=1_000_000)),
    Row("max_positions",      "max_position_embeddings", count(most=1_000_000)),
    Row("activation",         "activation",              activation(), "gelu"),
    Row("hidden_dropout",     "dropout",                 fraction(), 0.1),
    Row("attention_dropout",  "attention_dropout",       fraction(), 0.1),
    Row("span_dropout",       "qa_dropout",              fraction(), 0.1),
    Row("classifier_dropout", "seq_classif_dropout",     fraction(), 0.2),
    Row("pad_token_id",       "pad_token_id",            padding_id(), 0),
)

IGNORED_KEYS = (
    IgnoredKey("sinusoidal_pos_embds", "how the position table was first filled; its values are in the weights"),
)

KEYS = (
    KeyRow("encoder.embeddings.word",               "distilbert.embeddings.word_embeddings"),
    KeyRow("encoder.embeddings.position",           "distilbert.embeddings.position_embeddings"),
    KeyRow("encoder.embeddings.norm",               "distilbert.embeddings.LayerNorm"),
    KeyRow("encoder.layers.{i}.attention.query",    "distilbert.transformer.layer.{i}.attention.q_lin"),
    KeyRow("encoder.layers.{i}.attention.key",      "distilbert.transformer.layer.{i}.attention.k_lin"),
    KeyRow("encoder.layers.{i}.attention.value",    "distilbert.transformer.layer.{i}.attention.v_lin"),
    KeyRow("encoder.layers.{i}.attention.output",   "distilbert.transformer.layer.{i}.attention.out_lin"),
    KeyRow("encoder.layers.{i}.attention_norm",     "distilbert.transformer.layer.{i}.sa_layer_norm"),
    KeyRow("encoder.layers.{i}.feed_forward.up",    "distilbert.transformer.layer.{i}.ffn.lin1"),
    KeyRow("encoder.layers.{i}.feed_forward.activation", "distilbert.transformer.layer.{i}.ffn.activation"),
    KeyRow("encoder.layers.{i}.feed_forward.down",  "distilbert.transformer.layer.{i}.ffn.lin2"),
    KeyRow("encoder.layers.{i}.feed_forward_norm",  "distilbert.transformer.layer.{i}.output_layer_norm"),
)

MASKED_LM_KEYS = (
    KeyRow("head.dense",   "vocab_transform"),
    KeyRow("head.activation", "activation"),
    KeyRow("head.norm",    "vocab_layer_norm"),
    KeyRow("head.decoder", "vocab_projector"),
)
# fmt: on


def encoder(c: DistilBertConfig) -> Graph:
    """Return the graph from ids to token states."""
    blocks = (bert_block(c, attention={"hidden_dropout": 0.0}) for _ in range(c.num_layers))
    return chain(bert.embeddings(c), stack(blocks))


HEADS = {
    "sequence_classification": FamilyHead(
        body=lambda c, labels: task_heads.first_token_mlp(
            c.hidden_size, labels, dropout_in=None, activation="relu", dropout_out=c.classifier_dropout
        ),
        keys=(KeyRow("head.dense", "pre_classifier"), KeyRow("head.classifier", "classifier")),
        classifier="head.classifier",
    ),
    "token_classification": bert.DROPPED_TOKENS,
    "question_answering": replace(
        bert.HEADS["question_answering"],
        body=lambda c, labels: task_heads.linear(c.hidden_size, labels, c.span_dropout, name="spans"),
    ),
    "masked_lm": replace(bert.MASKED_LM, keys=MASKED_LM_KEYS, aliases=()),
}
HEADS["multiple_choice"] = HEADS["sequence_classification"].scoring_choices()

FAMILY = Family(
    model_type="distilbert",
    class_prefix="DistilBert",
    base_prefix="distilbert",
    config=DistilBertConfig,
    left_out=BASE_SIZES | {"vocab_size": 30522, "num_layers": 6, "max_positions": 512},
    rows=CONFIG,
    ignored_keys=IGNORED_KEYS,
    keys=KEYS,
    encoder=encoder,
    heads=HEADS,
    tokenizer=replace(bert.TOKENIZER, type_ids=False),
    real={"base": {"n_layers": 6}},
)

"""MPNet (Song et al. 2020, https://arxiv.org/abs/2004.09297).

BERT's encoder, with scores that depend on distance. It departs from BERT in:

* one table of relative positions, by bucket of distance, is added to the scores of every layer;
* positions are counted over the ids that are not padding and start after the padding id, which is always 1;
* no token types; a pooler that only the encoder alone has;
* classification reads the first token through a separate projection and tanh.

Its reference has no fused kernels, so "sdpa" repeats the plain products bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flodl.graph import Graph
from flodl_hf.families import bert, roberta
from flodl_hf.families.schema import Family
from flodl_hf.families.schema.config_rows import IgnoredKey, Row, activation, count, epsilon, fraction
from flodl_hf.families.schema.record import KeyRow, rows_under
from flodl_hf.families.schema.shared_keys import BASE_SIZES, SIZES, EncoderSizes
from flodl_hf.nn.encoder import bert_block, chain, stack
from flodl_hf.nn.positions import RelativeBias

PADDING = 1  # fixed in the reference implementation, whatever the configuration says
BUCKETS = 32  # that distances are sorted into, likewise


@dataclass(frozen=True, kw_only=True)
class MPNetConfig(EncoderSizes):
    """The settings of an MPNet encoder.

    Attributes:
        max_positions: rows of the position table: the longest row of tokens, and two.
        relative_rows: rows of the table of relative positions, of which the first 32 are used.
        activation: name of the feed-forward activation.
        hidden_dropout: probability of dropping a value of a state, in [0, 1).
        attention_dropout: probability of dropping an attention weight, in [0, 1).
        norm_eps: epsilon of every layer norm.
        pad_token_id: the id that positions skip; its word and position rows get no gradient.
    """

    max_positions: int
    relative_rows: int = BUCKETS
    activation: str = "gelu"
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    norm_eps: float = 1e-12
    pad_token_id: int = PADDING


# fmt: off
CONFIG = (
    *SIZES,
    Row("max_positions",      "max_position_embeddings",        count(most=1_000_000)),
    Row("relative_rows",      "relative_attention_num_buckets", count(BUCKETS), BUCKETS),
    Row("activation",         "hidden_act",                     activation(), "gelu"),
    Row("hidden_dropout",     "hidden_dropout_prob",            fraction(), 0.1),
    Row("attention_dropout",  "attention_probs_dropout_prob",   fraction(), 0.1),
    Row("norm_eps",           "layer_norm_eps",                 epsilon(), 1e-12),
)

IGNORED_KEYS = (
    IgnoredKey("pad_token_id", "the reference pads with id 1, for any value"),
)

MOVED = {
    "encoder.embeddings.token_type":              None,
    "encoder.layers.{i}.attention.query":         "encoder.layer.{i}.attention.attn.q",
    "encoder.layers.{i}.attention.key":           "encoder.layer.{i}.attention.attn.k",
    "encoder.layers.{i}.attention.value":         "encoder.layer.{i}.attention.attn.v",
    "encoder.layers.{i}.attention.output":        "encoder.layer.{i}.attention.attn.o",
    "encoder.layers.{i}.attention_norm":          "encoder.layer.{i}.attention.LayerNorm",
}
KEYS = (
    *rows_under("mpnet", bert.KEYS, MOVED),
    KeyRow("encoder.relative.table", "mpnet.encoder.relative_attention_bias"),
)
# fmt: on


def encoder(c: MPNetConfig) -> Graph:
    """Return the graph from ids to token states."""
    embeddings = bert.embeddings(c, positions_after_pad=True)
    layers = stack((bert_block(c, attention={"fused": False}) for _ in range(c.num_layers)), "bias")
    return chain(embeddings, layers, bias=RelativeBias(c.num_heads, BUCKETS, rows=c.relative_rows))


HEADS = {
    "sequence_classification": replace(
        roberta.HEADS["sequence_classification"],
        body=bert.first_token("tanh", lambda c: c.hidden_dropout),
    ),
    "token_classification": bert.DROPPED_TOKENS,
    "question_answering": bert.HEADS["question_answering"],
    "masked_lm": roberta.HEADS["masked_lm"],
    "multiple_choice": roberta.HEADS["multiple_choice"],
}

TOKENIZER = replace(
    bert.TOKENIZER,
    special={**roberta.TOKENIZER.special, "unk_token": "[UNK]"},
    type_ids=False,
    template="roberta",
    mask_takes_space=True,
)

FAMILY = Family(
    model_type="mpnet",
    class_prefix="MPNet",
    base_prefix="mpnet",
    config=MPNetConfig,
    left_out=BASE_SIZES | {"vocab_size": 30527, "max_positions": 512},
    rows=CONFIG,
    ignored_keys=IGNORED_KEYS,
    keys=KEYS,
    encoder=encoder,
    pooler=bert.FAMILY.pooler,
    heads=HEADS,
    unused_positions=lambda c: PADDING + 1,
    tokenizer=TOKENIZER,
    real={"base": {"vocab_size": 30527, "max_position_embeddings": 514, "layer_norm_eps": 1e-5}},
)

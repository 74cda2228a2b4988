"""EuroBERT (Boizard et al. 2025, https://arxiv.org/abs/2503.05500).

An encoder of a decoder's parts. It departs from BERT in:

* words alone are embedded, and nothing normalises them; norms come first, without mean and shift, and once at the end;
* queries and keys are turned by their places; several heads of queries may share one of keys and values;
* the feed-forward part is gated by SiLU, and nothing has a bias;
* classification reads the first token, the mean of all, or the mean of all tokens' scores ("late");
* word scores have a separate table unless the configuration specifies otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from flodl.graph import Graph
from flodl_hf.families import bert
from flodl_hf.families.schema import Family, FamilyHead, FamilyTokenizer
from flodl_hf.families.schema.config_rows import (
    IgnoredKey,
    Row,
    activation,
    boolean,
    count,
    epsilon,
    fraction,
    one_of,
    optional,
    padding_id,
    within_vocabulary,
)
from flodl_hf.families.schema.record import KeyRow, Tie
from flodl_hf.families.schema.shared_keys import BASE_SIZES, SIZES, EncoderSizes, rotary_rows
from flodl_hf.nn import task_heads
from flodl_hf.nn.attention import SelfAttention
from flodl_hf.nn.encoder import Embeddings, FirstToken, MeanToken, chain, sequence, stack
from flodl_hf.nn.layers import EncoderLayer, FeedForward
from flodl_hf.nn.positions import Rotary, RotarySettings


@dataclass(frozen=True, kw_only=True)
class EuroBertConfig(EncoderSizes):
    """The settings of a EuroBERT encoder.

    Attributes:
        kv_heads: heads of keys and values; None for as many as of queries.
        head_size: width of a head as some files state it; has to be ``hidden_size / num_heads``.
        max_positions: the longest row of tokens that the model was made for; no table bounds it.
        activation: name of the feed-forward activation.
        attention_dropout: probability of dropping an attention weight, in [0, 1).
        attention_bias: whether projections of attention add a bias.
        mlp_bias: whether projections of the feed-forward part and word scores add a bias.
        norm_eps: epsilon of every norm.
        pooling: what classification of texts reads: "bos", "mean", or "late" for the mean of all tokens'
            scores.
        pad_token_id: the word row that gets no gradient.
        theta: base of the wavelengths, where ``rotary`` does not state it.
        rotary: type of rotary positions if ``scaling`` has none; None for ``theta``.
        scaling: how wavelengths are stretched, as older files state it.
    """

    kv_heads: int | None = None
    head_size: int | None = None
    max_positions: int = 8192
    activation: str = "silu"
    attention_dropout: float = 0.0
    attention_bias: bool = False
    mlp_bias: bool = False
    norm_eps: float = 1e-5
    pooling: str = "late"
    pad_token_id: int | None = 128001
    theta: float = 10_000.0
    rotary: RotarySettings | None = None
    scaling: RotarySettings | None = None

    def __post_init__(self) -> None:
        faults = []
        if self.head_size not in (None, self.hidden_size // self.num_heads):
            faults.append(f"head_dim: found {self.head_size}; expected {self.hidden_size // self.num_heads}")
        if self.kv_heads is not None and self.num_heads % self.kv_heads:
            faults.append(f"num_key_value_heads: found {self.kv_heads}; expected a divisor of {self.num_heads}")
        if faults:
            raise ValueError("; ".join(faults))


# fmt: off
CONFIG = (
    *SIZES,
    Row("kv_heads",          "num_key_value_heads",     optional(count(most=4096)), None),
    Row("head_size",         "head_dim",                optional(count()), None),
    Row("max_positions",     "max_position_embeddings", count(most=10_000_000), 8192),
    Row("activation",        "hidden_act",              activation(), "silu"),
    Row("attention_dropout", "attention_dropout",       fraction(), 0.0),
    Row("attention_bias",    "attention_bias",          boolean(), False),
    Row("mlp_bias",          "mlp_bias",                boolean(), False),
    Row("norm_eps",          "rms_norm_eps",            epsilon(), 1e-5),
    Row("pooling",           "classifier_pooling",      one_of("bos", "mean", "late"), "late", ("clf_pooling",)),
    Row("pad_token_id",      "pad_token_id",            padding_id(), within_vocabulary(128001)),
    *rotary_rows(10_000.0),
)

IGNORED_KEYS = (
    *(IgnoredKey(f"{role}_token", "the tokenizer's files specify it") for role in ("bos", "eos", "pad", "mask")),
    IgnoredKey("hidden_dropout", "its layers drop no states"),
    IgnoredKey("pretraining_tp", "how the reference may cut its products"),
)

LAYER = "model.layers.{i}"
KEYS = (
    KeyRow("encoder.embeddings.word",              "model.embed_tokens"),
    KeyRow("encoder.layers.{i}.attention_norm",    LAYER + ".input_layernorm"),
    KeyRow("encoder.layers.{i}.attention.query",   LAYER + ".self_attn.q_proj"),
    KeyRow("encoder.layers.{i}.attention.key",     LAYER + ".self_attn.k_proj"),
    KeyRow("encoder.layers.{i}.attention.value",   LAYER + ".self_attn.v_proj"),
    KeyRow("encoder.layers.{i}.attention.output",  LAYER + ".self_attn.o_proj"),
    KeyRow("encoder.layers.{i}.feed_forward_norm", LAYER + ".post_attention_layernorm"),
    KeyRow("encoder.layers.{i}.feed_forward.gate", LAYER + ".mlp.gate_proj"),
    KeyRow("encoder.layers.{i}.feed_forward.up",   LAYER + ".mlp.up_proj"),
    KeyRow("encoder.layers.{i}.feed_forward.down", LAYER + ".mlp.down_proj"),
    KeyRow("encoder.norm",                         "model.norm"),
)
# fmt: on


def block(c: EuroBertConfig) -> EncoderLayer:
    """Return one layer: norms first, rotations, grouped heads, a gate."""
    rotary = Rotary(c.hidden_size // c.num_heads, c.theta, c.scaling or c.rotary)
    attention = SelfAttention(
        c.hidden_size, c.num_heads, c.attention_dropout, 0.0,
        bias=c.attention_bias, kv_heads=c.kv_heads, rotary=rotary,
    )  # fmt: skip
    feed_forward = FeedForward(c.hidden_size, c.intermediate_size, c.activation, 0.0, gated=True, bias=c.mlp_bias)
    norms = (nn.RMSNorm(c.hidden_size, eps=c.norm_eps) for _ in range(2))
    return EncoderLayer(attention, feed_forward, *norms, order="pre")


def encoder(c: EuroBertConfig) -> Graph:
    """Return the graph from ids to token states."""
    embeddings = Embeddings(c.vocab_size, c.hidden_size, None, 0.0, pad_token_id=c.pad_token_id)
    layers = stack(block(c) for _ in range(c.num_layers))
    return chain(embeddings, layers, norm=nn.RMSNorm(c.hidden_size, eps=c.norm_eps))


def classifier(c: EuroBertConfig, num_labels: int) -> Graph:
    """Return the head of whole texts: a projection, GELU and the labels' scores, pooled before or after."""
    return sequence(
        **{"first": FirstToken()} if c.pooling == "bos" else {"mean": MeanToken()} if c.pooling == "mean" else {},
        dense=nn.Linear(c.hidden_size, c.hidden_size),
        activation="gelu",
        classifier=nn.Linear(c.hidden_size, num_labels),
        **{"mean": MeanToken()} if c.pooling == "late" else {},
    )


HEADS = {
    "sequence_classification": FamilyHead(
        body=classifier,
        keys=(
            KeyRow("head.dense", "dense"),
            KeyRow("head.activation", "activation"),
            KeyRow("head.classifier", "classifier"),
        ),
        classifier="head.classifier",
    ),
    "token_classification": replace(bert.TOKENS, body=lambda c, labels: task_heads.linear(c.hidden_size, labels, None)),
    "masked_lm": FamilyHead(
        body=lambda c, _: sequence(decoder=nn.Linear(c.hidden_size, c.vocab_size, bias=c.mlp_bias)),
        keys=(KeyRow("head.decoder", "lm_head"),),
        ties=(Tie("encoder.embeddings.word.weight", "head.decoder.weight"),),
    ),
}

TOKENIZER = FamilyTokenizer(
    special={
        "bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", "pad_token": "<|end_of_text|>",
        "mask_token": "<|mask|>",
    },
    type_ids=False,
)  # fmt: skip

TINY = {"num_key_value_heads": 2, "pad_token_id": 0}

FAMILY = Family(
    model_type="eurobert",
    class_prefix="EuroBert",
    base_prefix="model",
    config=EuroBertConfig,
    left_out=BASE_SIZES | {"vocab_size": 128256},
    rows=CONFIG,
    ignored_keys=IGNORED_KEYS,
    keys=KEYS,
    encoder=encoder,
    heads=HEADS,
    ties_words=False,
    tokenizer=TOKENIZER,
    tiny={
        "base": TINY,
        "means and ties": TINY | {
            "classifier_pooling": "mean", "tie_word_embeddings": True, "attention_dropout": 0.1, "mlp_bias": True,
        },
        "first token": TINY | {"classifier_pooling": "bos", "attention_bias": True, "num_key_value_heads": 4},
    },
    real={"base": {"vocab_size": 128256, "num_key_value_heads": 12, "max_position_embeddings": 8192}},
)  # fmt: skip

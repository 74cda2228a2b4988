"""ModernBERT (Warner et al. 2024, https://arxiv.org/abs/2412.13663).

An encoder for long texts. It departs from BERT in:

* norms come before each part, and once more at the end; the first layer has none before attention;
* positions are rotations of queries and keys; most layers see a window, every third one all tokens;
* the feed-forward part is gated, and nothing but the word scores has a bias;
* files contain query, key and value in one matrix, and gate and up in another;
* every task reads states through a projection, an activation and a norm; texts by their first token or their mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from flodl.graph import Graph
from flodl_hf.families import bert
from flodl_hf.families.schema import Family, FamilyHead, FamilyTokenizer
from flodl_hf.families.schema.config_rows import (
    Check,
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
from flodl_hf.families.schema.shared_keys import (
    BASE_SIZES,
    HEAD_WIDTH,
    SIZES,
    EncoderSizes,
    rotary_settings,
    wavelength,
)
from flodl_hf.nn.attention import SelfAttention
from flodl_hf.nn.encoder import Embeddings, FirstToken, MeanToken, chain, sequence, stack
from flodl_hf.nn.layers import EncoderLayer, FeedForward
from flodl_hf.nn.positions import Rotary, RotarySettings

GLOBAL, LOCAL = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class ModernBertConfig(EncoderSizes):
    """The settings of a ModernBERT encoder.

    Attributes:
        max_positions: the longest row of tokens that the model was made for; no table bounds it.
        layer_types: attention of each layer: "full_attention" or "sliding_attention"; None for
            ``global_every``.
        global_every: of so many layers the first sees all tokens, the others their window.
        window: tokens of a window, half of them to each side.
        rotary: how queries and keys are turned, by kind of layer; None for the two fields below.
        global_theta: base of the wavelengths of layers that see all tokens.
        local_theta: the same of layers that see a window.
        activation: name of the feed-forward activation.
        embedding_dropout: probability of dropping a value of an embedding, in [0, 1).
        attention_dropout: probability of dropping an attention weight or a value of attention's output, in [0,
            1).
        mlp_dropout: probability of dropping a value inside the feed-forward part, in [0, 1).
        classifier_dropout: probability of dropping a classifier's input, in [0, 1).
        norm_eps: epsilon of every layer norm.
        norm_bias: whether norms add a bias.
        attention_bias: whether projections of attention add a bias.
        mlp_bias: whether projections of the feed-forward part add a bias.
        decoder_bias: whether word scores have a bias.
        classifier_bias: whether the projection before a task's own adds a bias.
        classifier_activation: name of the activation behind that projection.
        pooling: what classification of texts reads: "cls" for the first token, "mean" for the mean of all.
        pad_token_id: the word row that gets no gradient.
    """

    max_positions: int = 8192
    layer_types: tuple[str, ...] | None = None
    global_every: int = 3
    window: int = 128
    rotary: Mapping[str, RotarySettings] | None = None
    global_theta: float = 160_000.0
    local_theta: float = 10_000.0
    activation: str = "gelu"
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    mlp_dropout: float = 0.0
    classifier_dropout: float = 0.0
    norm_eps: float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    decoder_bias: bool = True
    classifier_bias: bool = False
    classifier_activation: str = "gelu"
    pooling: str = "cls"
    pad_token_id: int | None = 50283

    def __post_init__(self) -> None:
        if self.layer_types is not None and len(self.layer_types) != self.num_layers:
            raise ValueError(f"layer_types: found {len(self.layer_types)}; expected one for each of {self.num_layers}")

    def sees_all(self, layer: int) -> bool:
        """Return whether a layer sees all tokens."""
        if self.layer_types is not None:
            return self.layer_types[layer] == GLOBAL
        return layer % self.global_every == 0


def _types(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or any(kind not in (GLOBAL, LOCAL) for kind in value):
        raise ValueError
    return tuple(value)


TYPES = optional(Check(f'a list of "{GLOBAL}" and "{LOCAL}"', _types))

# fmt: off
CONFIG = (
    *SIZES,
    Row("max_positions",         "max_position_embeddings",    count(most=10_000_000), 8192),
    Row("layer_types",           "layer_types",                TYPES, None),
    Row("global_every",          "global_attn_every_n_layers", count(), 3),
    Row("window",                "local_attention",            count(2, 1_000_000), 128),
    Row("rotary",                "rope_parameters",            rotary_settings(GLOBAL, LOCAL), None),
    Row("global_theta",          "global_rope_theta",          wavelength(), 160_000.0),
    Row("local_theta",           "local_rope_theta",           wavelength(), 10_000.0),
    Row("activation",            "hidden_activation",          activation(), "gelu"),
    Row("embedding_dropout",     "embedding_dropout",          fraction(), 0.0),
    Row("attention_dropout",     "attention_dropout",          fraction(), 0.0),
    Row("mlp_dropout",           "mlp_dropout",                fraction(), 0.0),
    Row("classifier_dropout",    "classifier_dropout",         fraction(), 0.0),
    Row("norm_eps",              "norm_eps",                   epsilon(), 1e-5),
    Row("norm_bias",             "norm_bias",                  boolean(), False),
    Row("attention_bias",        "attention_bias",             boolean(), False),
    Row("mlp_bias",              "mlp_bias",                   boolean(), False),
    Row("decoder_bias",          "decoder_bias",               boolean(), True),
    Row("classifier_bias",       "classifier_bias",            boolean(), False),
    Row("classifier_activation", "classifier_activation",      activation(), "gelu"),
    Row("pooling",               "classifier_pooling",         one_of("cls", "mean"), "cls"),
    Row("pad_token_id",          "pad_token_id",               padding_id(), within_vocabulary(50283)),
)

IGNORED_KEYS = (
    HEAD_WIDTH,
    IgnoredKey("initializer_cutoff_factor", "only used for new weights"),
    IgnoredKey("deterministic_flash_attn",  "chooses kernels, not numbers"),
    IgnoredKey("reference_compile",         "chooses kernels, not numbers"),
    IgnoredKey("repad_logits_with_grad",    "how the reference arranges tokens"),
    IgnoredKey("sparse_prediction",         "scores are returned for every token; the loss is the same", noted=True),
    IgnoredKey("sparse_pred_ignore_index",  "the label of tokens that do not count", (-100,)),
    IgnoredKey("layer_norm_eps",            "an older name of norm_eps, which the reference does not read"),
)

KEYS = (
    KeyRow("encoder.embeddings.word",               "model.embeddings.tok_embeddings"),
    KeyRow("encoder.embeddings.norm",               "model.embeddings.norm"),
    KeyRow("encoder.layers.{i}.attention_norm",     "model.layers.{i}.attn_norm"),
    KeyRow("encoder.layers.{i}.attention.query",    "model.layers.{i}.attn.Wqkv[0/3]"),
    KeyRow("encoder.layers.{i}.attention.key",      "model.layers.{i}.attn.Wqkv[1/3]"),
    KeyRow("encoder.layers.{i}.attention.value",    "model.layers.{i}.attn.Wqkv[2/3]"),
    KeyRow("encoder.layers.{i}.attention.output",   "model.layers.{i}.attn.Wo"),
    KeyRow("encoder.layers.{i}.feed_forward_norm",  "model.layers.{i}.mlp_norm"),
    KeyRow("encoder.layers.{i}.feed_forward.gate",  "model.layers.{i}.mlp.Wi[0/2]"),
    KeyRow("encoder.layers.{i}.feed_forward.up",    "model.layers.{i}.mlp.Wi[1/2]"),
    KeyRow("encoder.layers.{i}.feed_forward.activation", "model.layers.{i}.mlp.act"),
    KeyRow("encoder.layers.{i}.feed_forward.down",  "model.layers.{i}.mlp.Wo"),
    KeyRow("encoder.norm",                          "model.final_norm"),
)

HEAD_KEYS = (
    KeyRow("head.dense",      "head.dense"),
    KeyRow("head.activation", "head.act"),
    KeyRow("head.norm",       "head.norm"),
)
# fmt: on


def _norm(c: ModernBertConfig) -> nn.LayerNorm:
    return nn.LayerNorm(c.hidden_size, eps=c.norm_eps, bias=c.norm_bias)


def block(c: ModernBertConfig, index: int) -> EncoderLayer:
    """Return one layer: of all tokens or of a window, the first without a norm before attention."""
    whole = c.sees_all(index)
    settings = (c.rotary or {}).get(GLOBAL if whole else LOCAL)
    rotary = Rotary(c.hidden_size // c.num_heads, c.global_theta if whole else c.local_theta, settings, widened=True)
    attention = SelfAttention(
        c.hidden_size, c.num_heads, c.attention_dropout, c.attention_dropout, bias=c.attention_bias,
        window=None if whole else c.window // 2, rotary=rotary, joined=True,
    )  # fmt: skip
    feed_forward = FeedForward(
        c.hidden_size, c.intermediate_size, c.activation, 0.0,
        gated=True, bias=c.mlp_bias, inner_dropout=c.mlp_dropout, joined=True,
    )  # fmt: skip
    return EncoderLayer(attention, feed_forward, _norm(c) if index else nn.Identity(), _norm(c), order="pre")


def encoder(c: ModernBertConfig) -> Graph:
    """Return the graph from ids to token states."""
    embeddings = Embeddings(
        c.vocab_size, c.hidden_size, c.norm_eps, c.embedding_dropout,
        norm_bias=c.norm_bias, pad_token_id=c.pad_token_id,
    )  # fmt: skip
    return chain(embeddings, stack(block(c, index) for index in range(c.num_layers)), norm=_norm(c))


def _body(
    c: ModernBertConfig, outputs: int, dropout: float | None, name: str = "classifier", *, pooling: str = "",
    bias: bool = True,
) -> Graph:  # fmt: skip
    """Return states through a projection, an activation and a norm, then dropout and the projection ``name``."""
    return sequence(
        first=FirstToken() if pooling == "cls" else None,
        mean=MeanToken() if pooling == "mean" else None,
        dense=nn.Linear(c.hidden_size, c.hidden_size, bias=c.classifier_bias),
        activation=c.classifier_activation,
        norm=_norm(c),
        dropout=dropout,
        **{name: nn.Linear(c.hidden_size, outputs, bias=bias)},
    )


HEADS = {
    "sequence_classification": FamilyHead(
        body=lambda c, labels: _body(c, labels, c.classifier_dropout, pooling=c.pooling),
        keys=(*HEAD_KEYS, KeyRow("head.classifier", "classifier")),
        classifier="head.classifier",
    ),
    "token_classification": FamilyHead(
        body=lambda c, labels: _body(c, labels, c.classifier_dropout),
        keys=(*HEAD_KEYS, KeyRow("head.classifier", "classifier")),
        classifier="head.classifier",
    ),
    "question_answering": FamilyHead(
        body=lambda c, labels: _body(c, labels, c.classifier_dropout, "spans"),
        keys=(*HEAD_KEYS, KeyRow("head.spans", "classifier")),
    ),
    "masked_lm": FamilyHead(
        body=lambda c, _: _body(c, c.vocab_size, None, "decoder", bias=c.decoder_bias),
        keys=(*HEAD_KEYS, KeyRow("head.decoder", "decoder")),
        ties=(Tie("encoder.embeddings.word.weight", "head.decoder.weight"),),
    ),
}
HEADS["multiple_choice"] = HEADS["sequence_classification"].scoring_choices()

TOKENIZER = FamilyTokenizer(special=bert.TOKENIZER.special, type_ids=False)

TINY = {"num_hidden_layers": 3, "local_attention": 8, "pad_token_id": 0}

FAMILY = Family(
    model_type="modernbert",
    class_prefix="ModernBert",
    base_prefix="model",
    config=ModernBertConfig,
    left_out=BASE_SIZES | {"vocab_size": 50368, "num_layers": 22, "intermediate_size": 1152},
    rows=CONFIG,
    ignored_keys=IGNORED_KEYS,
    keys=KEYS,
    encoder=encoder,
    heads=HEADS,
    tokenizer=TOKENIZER,
    tiny={
        "base": TINY,
        "biases and means": TINY | {
            "norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True, "decoder_bias": False,
            "classifier_pooling": "mean", "attention_dropout": 0.1, "mlp_dropout": 0.1, "embedding_dropout": 0.1,
            "classifier_dropout": 0.1, "hidden_activation": "relu",
        },
    },
    real={
        "base": {
            "vocab_size": 50368, "num_hidden_layers": 22, "intermediate_size": 1152, "max_position_embeddings": 8192,
        }
    },
)  # fmt: skip

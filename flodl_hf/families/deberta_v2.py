"""DeBERTa v2 and v3 (He et al. 2020, https://arxiv.org/abs/2006.03654; 2021, https://arxiv.org/abs/2111.09543).

Both have the ``model_type`` "deberta-v2". Departures from the shared encoder:

* attention scores content and relative position apart, from one table of distances that is
  normalised once a call and projected by every layer (`flodl_hf.nn.disentangled`);
* absolute positions are an option; embeddings may be narrower than the states; padding is zeroed;
* a convolution over the embeddings may join the output of the first layer (v2-xlarge);
* classification has a separate pooler, which belongs to the head and not to the encoder;
* the masked-word head exists in two forms that files name differently (``legacy``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flodl.errors import ConfigError
from flodl.graph import Graph
from flodl_hf.families import albert, bert
from flodl_hf.families.schema import Family, FamilyHead, FamilyTokenizer, Ignored
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
)
from flodl_hf.families.schema.record import KeyRow
from flodl_hf.families.schema.shared_keys import SIZES, EncoderSizes
from flodl_hf.nn import task_heads
from flodl_hf.nn.disentangled.attention import DisentangledAttention
from flodl_hf.nn.disentangled.parts import Convolution, ConvolvedLayer, MaskedEmbeddings, RelativePositions
from flodl_hf.nn.encoder import chain, stack
from flodl_hf.nn.layers import EncoderLayer, FeedForward
from flodl_hf.nn.task_heads import check_labels


@dataclass(frozen=True, kw_only=True)
class DebertaConfig(EncoderSizes):
    """The settings of a DeBERTa-v2 encoder.

    Attributes:
        head_size: width of a head as some files state it; has to be ``hidden_size / num_heads``.
        max_positions: rows of the position table where there is one; the range of distances where none is
            stated.
        type_vocab_size: rows of the token type table; 0 for none.
        embedding_size: width of the tables; None for ``hidden_size``. Another width adds a projection.
        absolute_positions: whether learned positions are added to the words.
        relative_attention: whether distances between tokens are scored.
        position_kinds: which scores distances give: "c2p" (content to position) and "p2c" (position to
            content).
        position_buckets: rows of the distance table for each sign, far distances sharing; below 1 each distance
            has its own.
        max_relative_positions: maximum distinct distance, in tokens; below 1 for ``max_positions``.
        share_keys: whether distances go through the projections of content.
        relative_norm: "layer_norm" to normalise the distance table, "none" to leave it.
        conv_kernel_size: tokens that the convolution sees, odd; 0 for no convolution.
        conv_groups: groups of channels in the convolution; divides ``hidden_size``.
        conv_activation: name of the convolution's activation.
        activation: name of the feed-forward activation.
        hidden_dropout: probability of dropping a value of a state, in [0, 1).
        attention_dropout: probability of dropping an attention weight, in [0, 1).
        pooler_size: width of the classification pooler as files state it; has to be ``hidden_size``.
        pooler_dropout: probability of dropping a value before the classification pooler, in [0, 1).
        pooler_activation: name of the classification pooler's activation.
        classifier_dropout: probability of dropping a value after the classification pooler; None takes
            ``hidden_dropout``.
        legacy_head: which masked-word head: True for BERT's, False for the one in Microsoft's files.
        tie_words: whether the masked-word decoder is the word table.
        norm_eps: epsilon of every layer norm.
        pad_token_id: the word row that gets no gradient.
    """

    head_size: int | None = None
    max_positions: int = 512
    type_vocab_size: int = 0
    embedding_size: int | None = None
    absolute_positions: bool = True
    relative_attention: bool = False
    position_kinds: tuple[str, ...] = ()
    position_buckets: int = -1
    max_relative_positions: int = -1
    share_keys: bool = False
    relative_norm: str = "none"
    conv_kernel_size: int = 0
    conv_groups: int = 1
    conv_activation: str = "tanh"
    activation: str = "gelu"
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    pooler_size: int | None = None
    pooler_dropout: float = 0.0
    pooler_activation: str = "gelu"
    classifier_dropout: float | None = None
    legacy_head: bool = True
    tie_words: bool = True
    norm_eps: float = 1e-7
    pad_token_id: int | None = 0

    def __post_init__(self) -> None:
        faults = []
        head_size = self.hidden_size // self.num_heads
        if self.head_size not in (None, head_size):
            faults.append(f"attention_head_size: found {self.head_size}; expected hidden_size / heads = {head_size}")
        if self.hidden_size % self.conv_groups and self.conv_kernel_size:
            faults.append(
                f"conv_groups: found {self.conv_groups}; expected a divisor of hidden_size {self.hidden_size}"
            )
        if faults:
            raise ValueError("; ".join(faults))

    @property
    def max_distance(self) -> int:
        """Maximum distinct distance, in tokens."""
        return self.max_relative_positions if self.max_relative_positions > 0 else self.max_positions

    @property
    def span(self) -> int:
        """Rows that each sign of the distance table has; 0 without relative attention."""
        if not self.relative_attention:
            return 0
        return self.position_buckets if self.position_buckets > 0 else self.max_distance


def _kinds(value: Any) -> tuple[str, ...]:
    """Return the kinds of position score that ``pos_att_type`` names: null, "p2c|c2p" or a list."""
    names = value.lower().split("|") if isinstance(value, str) else value or []
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ValueError
    kinds = tuple(name.strip() for name in names if name)
    if any(kind not in ("c2p", "p2c") for kind in kinds):
        raise ValueError
    return kinds


def _relative_norm(value: Any) -> str:
    parts = {part.strip() for part in value.lower().split("|")} if isinstance(value, str) else set()
    if not parts or not parts <= {"layer_norm", "none"}:
        raise ValueError
    return "layer_norm" if "layer_norm" in parts else "none"


def _range(least: int) -> Check:
    """An integer from ``least``, or one below 1 for "not set"."""

    def accepts(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or 1 <= value < least or abs(value) > 1_000_000:
            raise ValueError
        return value

    return Check(f"an integer from {least} to 1000000, or -1 for none", accepts)


KINDS = Check('null, "c2p", "p2c", "p2c|c2p" or a list of these', _kinds)
NORM = Check('"layer_norm" or "none"', _relative_norm)

# fmt: off
CONFIG = (
    *SIZES,
    Row("head_size",              "attention_head_size",          optional(count()), None),
    Row("max_positions",          "max_position_embeddings",      count(most=1_000_000), 512),
    Row("type_vocab_size",        "type_vocab_size",              count(0), 0),
    Row("embedding_size",         "embedding_size",               optional(count()), None),
    Row("absolute_positions",     "position_biased_input",        boolean(), True),
    Row("relative_attention",     "relative_attention",           boolean(), False),
    Row("position_kinds",         "pos_att_type",                 KINDS, ()),
    Row("position_buckets",       "position_buckets",             _range(2), -1),
    Row("max_relative_positions", "max_relative_positions",       _range(2), -1),
    Row("share_keys",             "share_att_key",                boolean(), False),
    Row("relative_norm",          "norm_rel_ebd",                 NORM, "none"),
    Row("conv_kernel_size",       "conv_kernel_size",             one_of(0, *range(1, 256, 2)), 0),
    Row("conv_groups",            "conv_groups",                  count(), 1),
    Row("conv_activation",        "conv_act",                     activation(), "tanh"),
    Row("activation",             "hidden_act",                   activation(), "gelu"),
    Row("hidden_dropout",         "hidden_dropout_prob",          fraction(), 0.1),
    Row("attention_dropout",      "attention_probs_dropout_prob", fraction(), 0.1),
    Row("pooler_size",            "pooler_hidden_size",           optional(count()), None),
    Row("pooler_dropout",         "pooler_dropout",               fraction(), 0.0),
    Row("pooler_activation",      "pooler_hidden_act",            activation(), "gelu"),
    Row("classifier_dropout",     "cls_dropout",                  optional(fraction()), None),
    Row("legacy_head",            "legacy",                       boolean(), True),
    Row("tie_words",              "tie_word_embeddings",          boolean(), True),
    Row("norm_eps",               "layer_norm_eps",               epsilon(), 1e-7),
    Row("pad_token_id",           "pad_token_id",                 padding_id(), 0),
)

IGNORED_KEYS = (
    IgnoredKey("classifier_dropout",   "classifiers of this family take cls_dropout and hidden_dropout_prob"),
    IgnoredKey("padding_idx",          "an older name of pad_token_id"),
    IgnoredKey("summary_type",         "a note of summary heads; this family pools its first token"),
    IgnoredKey("summary_use_proj",     "a note of summary heads"),
    IgnoredKey("summary_activation",   "a note of summary heads; pooler_hidden_act replaces it"),
    IgnoredKey("summary_last_dropout", "a note of summary heads; pooler_dropout replaces it"),
    IgnoredKey("z_steps",              "further passes of the last layer, which the reference never runs", noted=True),
)

KEYS = (
    KeyRow("encoder.embeddings.word",               "deberta.embeddings.word_embeddings"),
    KeyRow("encoder.embeddings.position",           "deberta.embeddings.position_embeddings"),
    KeyRow("encoder.embeddings.token_type",         "deberta.embeddings.token_type_embeddings"),
    KeyRow("encoder.embeddings.projection",         "deberta.embeddings.embed_proj"),
    KeyRow("encoder.embeddings.norm",               "deberta.embeddings.LayerNorm"),
    KeyRow("encoder.relative.embeddings",           "deberta.encoder.rel_embeddings"),
    KeyRow("encoder.relative.norm",                 "deberta.encoder.LayerNorm"),
    KeyRow("encoder.layers.{i}.attention.query",    "deberta.encoder.layer.{i}.attention.self.query_proj"),
    KeyRow("encoder.layers.{i}.attention.key",      "deberta.encoder.layer.{i}.attention.self.key_proj"),
    KeyRow("encoder.layers.{i}.attention.value",    "deberta.encoder.layer.{i}.attention.self.value_proj"),
    KeyRow("encoder.layers.{i}.attention.pos_key",  "deberta.encoder.layer.{i}.attention.self.pos_key_proj"),
    KeyRow("encoder.layers.{i}.attention.pos_query","deberta.encoder.layer.{i}.attention.self.pos_query_proj"),
    KeyRow("encoder.layers.{i}.attention.output",   "deberta.encoder.layer.{i}.attention.output.dense"),
    KeyRow("encoder.layers.{i}.attention_norm",     "deberta.encoder.layer.{i}.attention.output.LayerNorm"),
    KeyRow("encoder.layers.{i}.feed_forward.up",    "deberta.encoder.layer.{i}.intermediate.dense"),
    KeyRow("encoder.layers.{i}.feed_forward.activation", "deberta.encoder.layer.{i}.intermediate.intermediate_act_fn"),
    KeyRow("encoder.layers.{i}.feed_forward.down",  "deberta.encoder.layer.{i}.output.dense"),
    KeyRow("encoder.layers.{i}.feed_forward_norm",  "deberta.encoder.layer.{i}.output.LayerNorm"),
    KeyRow("encoder.layers.0.conv.filter",          "deberta.encoder.conv.conv"),
    KeyRow("encoder.layers.0.conv.norm",            "deberta.encoder.conv.LayerNorm"),
)

MASKED_LM_KEYS = (
    KeyRow("head.dense",        "cls.predictions.transform.dense"),
    KeyRow("head.activation",   "cls.predictions.transform.transform_act_fn"),
    KeyRow("head.norm",         "cls.predictions.transform.LayerNorm"),
    KeyRow("head.decoder",      "cls.predictions.decoder"),
    KeyRow("head.decoder.bias", "cls.predictions.bias"),
    # The form of `legacy: false`; its decoder is the word table and has no name in files.
    KeyRow("head.lm_dense",     "lm_predictions.lm_head.dense"),
    KeyRow("head.lm_activation", "lm_predictions.lm_head.transform_act_fn"),
    KeyRow("head.lm_norm",      "lm_predictions.lm_head.LayerNorm"),
    KeyRow("head.lm_bias",      "lm_predictions.lm_head"),
)

_REPLACED = "part of replaced-token detection in pre-training, which is not one of the heads"
_LEGACY = "the masked-word head of `legacy: true`, and this configuration specifies the other"
_NEW = "the masked-word head of `legacy: false`; set that in config.json to use it"
_NO_TABLE = "position_biased_input is off: only distances count"

IGNORED = (
    Ignored("deberta.embeddings.position_embeddings.weight", _NO_TABLE),
    *(
        Ignored(f"mask_predictions.{name}", _REPLACED)
        for name in (
            "dense.weight", "dense.bias", "LayerNorm.weight", "LayerNorm.bias",
            "classifier.weight", "classifier.bias",
        )
    ),
    *(
        Ignored(f"lm_predictions.lm_head.{name}", _NEW)
        for name in ("dense.weight", "dense.bias", "LayerNorm.weight", "LayerNorm.bias", "bias")
    ),
    *(
        Ignored(f"cls.predictions.{name}", _LEGACY)
        for name in (
            "transform.dense.weight", "transform.dense.bias",
            "transform.LayerNorm.weight", "transform.LayerNorm.bias", "bias",
        )
    ),
)
# fmt: on


def embeddings(c: DebertaConfig, norm: type[nn.LayerNorm] = nn.LayerNorm) -> MaskedEmbeddings:
    """Return words, and positions and token types where there are any, as wide as the states."""
    return MaskedEmbeddings(
        c.vocab_size, c.embedding_size or c.hidden_size, c.hidden_size, c.norm_eps, c.hidden_dropout,
        max_positions=c.max_positions if c.absolute_positions else 0,
        type_vocab_size=c.type_vocab_size, pad_token_id=c.pad_token_id, norm=norm,
    )  # fmt: skip


def block(
    c: DebertaConfig, index: int, norm: type[nn.LayerNorm] = nn.LayerNorm, *, joined: bool = False
) -> EncoderLayer:
    """Return one layer: attend, add, normalise, transform, add, normalise; the first may add the convolution."""
    attention = DisentangledAttention(
        c.hidden_size, c.num_heads, c.attention_dropout, c.hidden_dropout,
        kinds=c.position_kinds, relative=c.relative_attention, share_keys=c.share_keys, joined=joined,
    )  # fmt: skip
    feed_forward = FeedForward(c.hidden_size, c.intermediate_size, c.activation, c.hidden_dropout)
    first, second = (norm(c.hidden_size, eps=c.norm_eps) for _ in range(2))
    if index or not c.conv_kernel_size:
        return EncoderLayer(attention, feed_forward, first, second)
    conv = Convolution(
        c.hidden_size, c.conv_kernel_size, c.conv_groups, c.conv_activation, c.norm_eps, c.hidden_dropout
    )
    return ConvolvedLayer(attention, feed_forward, first, second, conv=conv)


def encoder(c: DebertaConfig) -> Graph:
    """Return the graph from ids to token states."""
    norm_eps = c.norm_eps if c.relative_norm == "layer_norm" else None
    relative = RelativePositions(c.hidden_size, c.span, c.position_buckets, c.max_distance, norm_eps)
    layers = stack((block(c, i) for i in range(c.num_layers)), "relative")
    return chain(embeddings(c), layers, bias=relative, bias_name="relative")


def classifier(c: DebertaConfig, num_labels: int) -> Graph:
    """Return the head of whole texts: the family's pooler and a label for each text.

    Raises:
        ConfigError: the file states a pooler of another width than the states.
    """
    if c.pooler_size not in (None, c.hidden_size):
        raise ConfigError(
            f"pooler_hidden_size: found {c.pooler_size}; expected the width of the states, {c.hidden_size}. "
            "The pooler reads a token's state, so another width cannot be computed; correct config.json.",
            problems=["pooler_hidden_size"],
        )
    dropout = c.hidden_dropout if c.classifier_dropout is None else c.classifier_dropout
    return task_heads.first_token_mlp(
        c.hidden_size, num_labels, dropout_in=c.pooler_dropout, activation=c.pooler_activation, dropout_out=dropout
    )


def masked_lm(c: DebertaConfig, _: int) -> Graph:
    """Return the masked-word head in the form that ``legacy`` selects.

    Raises:
        ConfigError: the newer form without ties, or with a word table of another width than the states.
    """
    if c.legacy_head:
        return task_heads.lm(c.hidden_size, c.embedding_size or c.hidden_size, c.vocab_size, c.activation, c.norm_eps)
    if not c.tie_words:
        raise ConfigError(
            "legacy: found false with tie_word_embeddings false; expected true, because that head has no "
            "decoder other than the word table. Use legacy: true for a separate decoder.",
            problems=["legacy", "tie_word_embeddings"],
        )
    if c.embedding_size not in (None, c.hidden_size):
        raise ConfigError(
            f"legacy: found false with embedding_size {c.embedding_size}; expected hidden_size = {c.hidden_size}, "
            "because that head multiplies the states by the word table. Use legacy: true.",
            problems=["legacy", "embedding_size"],
        )
    return task_heads.shifted_lm(c.hidden_size, c.vocab_size, c.activation, c.norm_eps, "lm_", "lm_bias")


def untyped_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of text labels where the configuration states no problem type.

    The reference has special rules here: texts with a negative label do not count, and rows of
    numbers are a distribution to match rather than several true labels.
    """
    labels = labels.to(logits.device)
    if logits.shape[-1] == 1:
        return F.mse_loss(logits.view(-1).to(labels.dtype), labels.view(-1))
    if labels.dim() > 1 and labels.shape[-1] != 1:
        return -(F.log_softmax(logits, dim=-1) * labels).sum(-1).mean()
    flat = labels.view(-1).long()
    check_labels(flat.clamp(min=0), logits.shape[-1])
    kept = flat >= 0
    if not bool(kept.any()):
        return torch.tensor(0).to(logits)
    return F.cross_entropy(logits[kept].float(), flat[kept])


HEADS = {
    "sequence_classification": FamilyHead(
        body=classifier,
        keys=(KeyRow("head.dense", "pooler.dense"), KeyRow("head.classifier", "classifier")),
        classifier="head.classifier",
        untyped_loss=untyped_loss,
    ),
    "token_classification": bert.DROPPED_TOKENS,
    "question_answering": bert.HEADS["question_answering"],
    "masked_lm": replace(bert.MASKED_LM, body=masked_lm, keys=MASKED_LM_KEYS),
}
HEADS["multiple_choice"] = HEADS["sequence_classification"].scoring_choices()

TOKENIZER = FamilyTokenizer(
    special={**albert.TOKENIZER.special, "unk_token": "[UNK]", "pad_token": "[PAD]"},
    type_ids=True,
    inputs=("input_ids", "attention_mask", "token_type_ids"),
    files=("spm.model",),
    build="pieces",
    lowercase=False,
    split_punctuation=False,
    prefix=True,
    steps=("lower", "blanks"),
    spaces="first",
)

TINY = {
    "type_vocab_size": 0, "relative_attention": True, "position_buckets": 8, "max_relative_positions": -1,
    "share_att_key": True, "pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm", "position_biased_input": False,
    "layer_norm_eps": 1e-7, "pooler_hidden_size": 32, "legacy": False,
}  # fmt: skip
REAL = TINY | {"position_buckets": 256, "pooler_hidden_size": 768, "vocab_size": 128100}
CONVOLUTION = {"conv_kernel_size": 3, "conv_act": "gelu"}

FAMILY = Family(
    model_type="deberta-v2",
    class_prefix="DebertaV2",
    base_prefix="deberta",
    config=DebertaConfig,
    left_out={
        "vocab_size": 128100, "hidden_size": 1536, "num_layers": 24, "num_heads": 24, "intermediate_size": 6144,
    },
    rows=CONFIG,
    ignored_keys=IGNORED_KEYS,
    keys=KEYS,
    ignored=IGNORED,
    encoder=encoder,
    heads=HEADS,
    tokenizer=TOKENIZER,
    tiny={"base": TINY, "convolution": TINY | CONVOLUTION},
    real={"base": REAL, "convolution": REAL | CONVOLUTION},
)  # fmt: skip

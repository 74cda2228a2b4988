"""GTE (Zhang et al. 2024, https://arxiv.org/abs/2407.19669), also in Snowflake's multilingual models.

BERT's encoder with rotary positions. It departs from BERT in:

* queries and keys are turned by their places instead of positions being added; token types may be absent;
* the feed-forward part is gated by GELU; only its last projection has a bias, and it drops values inside as well;
* files contain query, key and value in one matrix, and up and gate in another; they are computed one by one.

Files written for the code of another repository have ``model_type: new``; that is the family below of this name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flodl.graph import Graph
from flodl_hf.families import bert, roberta
from flodl_hf.families.schema import Family
from flodl_hf.families.schema.config_rows import IgnoredKey, changed, count
from flodl_hf.families.schema.record import KeyRow
from flodl_hf.families.schema.shared_keys import BASE_SIZES, HEAD_WIDTH, rotary_rows
from flodl_hf.nn.encoder import bert_block, chain, pooler, stack
from flodl_hf.nn.positions import Rotary, RotarySettings


@dataclass(frozen=True, kw_only=True)
class GteConfig(bert.BertConfig):
    """The settings of a GTE encoder: BERT's, and how queries and keys are turned.

    Attributes:
        theta: base of the wavelengths, where ``rotary`` does not state it.
        rotary: type of rotary positions if ``scaling`` has none; None for ``theta``.
        scaling: how wavelengths are stretched, as older files state it.
    """

    theta: float = 160_000.0
    rotary: RotarySettings | None = None
    scaling: RotarySettings | None = None


# fmt: off
CHANGED = {
    "max_positions":     {"default": 8192},
    "type_vocab_size":   {"default": 1, "check": count(0)},
    "attention_dropout": {"default": 0.0},
    "pad_token_id":      {"default": 1},
}
CONFIG = (*changed(bert.CONFIG, CHANGED), *rotary_rows(160_000.0))

IGNORED_KEYS = (
    HEAD_WIDTH,
    IgnoredKey("position_embedding_type",        "positions are rotations", ("rope", "absolute", None)),
    IgnoredKey("layer_norm_type",                "the one that there is", ("layer_norm", None)),
    IgnoredKey("logn_attention_scale",           "scores are not scaled by their text's length", (False, None)),
    IgnoredKey("logn_attention_clip1",           "scores are not scaled by their text's length", (False, None)),
    IgnoredKey("pack_qkv",                       "how files store query, key and value", (True, None)),
    IgnoredKey("unpad_inputs",                   "how the repository's own code arranges tokens"),
    IgnoredKey("use_memory_efficient_attention", "chooses kernels, not numbers"),
)

LAYER = "gte.encoder.layer.{i}"
KEYS = (
    KeyRow("encoder.embeddings.word",              "gte.embeddings.word_embeddings"),
    KeyRow("encoder.embeddings.token_type",        "gte.embeddings.token_type_embeddings"),
    KeyRow("encoder.embeddings.norm",              "gte.embeddings.LayerNorm"),
    KeyRow("encoder.layers.{i}.attention.query",   LAYER + ".attention.qkv_proj[0/3]"),
    KeyRow("encoder.layers.{i}.attention.key",     LAYER + ".attention.qkv_proj[1/3]"),
    KeyRow("encoder.layers.{i}.attention.value",   LAYER + ".attention.qkv_proj[2/3]"),
    KeyRow("encoder.layers.{i}.attention.output",  LAYER + ".attention.o_proj"),
    KeyRow("encoder.layers.{i}.attention_norm",    LAYER + ".attn_ln"),
    KeyRow("encoder.layers.{i}.feed_forward.up",   LAYER + ".mlp.up_gate_proj[0/2]"),
    KeyRow("encoder.layers.{i}.feed_forward.gate", LAYER + ".mlp.up_gate_proj[1/2]"),
    KeyRow("encoder.layers.{i}.feed_forward.down", LAYER + ".mlp.down_proj"),
    KeyRow("encoder.layers.{i}.feed_forward_norm", LAYER + ".mlp_ln"),
    KeyRow("pooler.dense",                         "gte.pooler.dense"),
)
# What transformers calls its modules; its files have the names above.
ALSO = (
    KeyRow("encoder.layers.{i}.attention.query",   "gte.layers.{i}.self_attn.q_proj"),
    KeyRow("encoder.layers.{i}.attention.key",     "gte.layers.{i}.self_attn.k_proj"),
    KeyRow("encoder.layers.{i}.attention.value",   "gte.layers.{i}.self_attn.v_proj"),
    KeyRow("encoder.layers.{i}.attention.output",  "gte.layers.{i}.self_attn.o_proj"),
    KeyRow("encoder.layers.{i}.attention_norm",    "gte.layers.{i}.post_attention_layernorm"),
    KeyRow("encoder.layers.{i}.feed_forward.up",   "gte.layers.{i}.mlp.up_proj"),
    KeyRow("encoder.layers.{i}.feed_forward.gate", "gte.layers.{i}.mlp.gate_proj"),
    KeyRow("encoder.layers.{i}.feed_forward.down", "gte.layers.{i}.mlp.down_proj"),
    KeyRow("encoder.layers.{i}.feed_forward_norm", "gte.layers.{i}.post_mlp_layernorm"),
    KeyRow("head.norm",                            "lm_head.layer_norm"),
)
# fmt: on


def rotary(c: GteConfig) -> Rotary:
    """Return the rotations of one layer."""
    return Rotary(c.hidden_size // c.num_heads, c.theta, c.scaling or c.rotary)


def encoder(c: GteConfig) -> Graph:
    """Return the graph from ids to token states: BERT's, with rotations and a gate."""
    gated = {"gated": True, "bias": False, "down_bias": True, "inner_dropout": c.hidden_dropout}
    blocks = (bert_block(c, attention={"rotary": rotary(c)}, feed_forward=gated) for _ in range(c.num_layers))
    return chain(bert.embeddings(c, max_positions=0), stack(blocks))


HEADS = {
    "sequence_classification": bert.HEADS["sequence_classification"],
    "token_classification": bert.HEADS["token_classification"],
    "masked_lm": replace(
        roberta.HEADS["masked_lm"],
        aliases=(),
        keys=(
            KeyRow("head.dense", "lm_head.dense"),
            KeyRow("head.norm", "lm_head.norm"),
            KeyRow("head.decoder", "lm_head.decoder"),
        ),
    ),
}

FAMILY = Family(
    model_type="gte",
    class_prefix="Gte",
    base_prefix="gte",
    config=GteConfig,
    rows=CONFIG,
    left_out=BASE_SIZES | {"vocab_size": 250048},
    ignored_keys=IGNORED_KEYS,
    keys=KEYS,
    also=ALSO,
    encoder=encoder,
    pooler=lambda c: pooler(c.hidden_size),
    heads=HEADS,
    tokenizer=roberta.PIECES,
    tiny={"base": {}, "no token types": {"type_vocab_size": 0, "attention_probs_dropout_prob": 0.1}},
    real={"base": {"vocab_size": 250048, "max_position_embeddings": 8192, "type_vocab_size": 1}},
)

# Files of Alibaba's repositories, for code that is never run. transformers has no class of this name.
NEW = FAMILY.renamed(
    "new", "New", base_prefix="new", prefixes=("gte",), tiny={}, real={},
)  # fmt: skip

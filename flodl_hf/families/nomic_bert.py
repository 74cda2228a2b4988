"""Nomic BERT (Nussbaum et al. 2024, https://arxiv.org/abs/2402.01613).

BERT's encoder with rotary positions and a gate, as GTE's. It departs from GTE's in:

* no projection has a bias, and nothing is dropped inside the feed-forward part, which SiLU gates;
* token types mark a second text;
* the masked-word head is BERT's.

Files written for the code of Nomic's repository have the settings of GPT-2's configuration under GPT-2's names. What
that code stretches for texts longer than it was trained with depends on the longest text of a batch; here such a file
bounds the length instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flodl.graph import Graph
from flodl_hf.families import bert, gte
from flodl_hf.families.schema.config_rows import (
    IgnoredKey,
    Row,
    activation,
    count,
    epsilon,
    fraction,
    one_of,
    optional,
    padding_id,
)
from flodl_hf.families.schema.record import KeyRow, rows_under
from flodl_hf.families.schema.shared_keys import rotary_settings, wavelength
from flodl_hf.nn.encoder import bert_block, chain, stack


@dataclass(frozen=True, kw_only=True)
class NomicBertConfig(gte.GteConfig):
    """The settings of a Nomic BERT encoder: GTE's, and the further settings of files for Nomic's own code.

    Attributes:
        trained_positions: the longest row of tokens in training.
        gate: the feed-forward part as older files name it: "swiglu", "geglu" or "glu".
        embedding_dropout: probability of dropping a value of an embedding, in [0, 1).
        stretch: stretch factor of longer texts, if they were alone in a batch; None for none.
    """

    trained_positions: int = 2048
    gate: str = "swiglu"
    embedding_dropout: float = 0.0
    stretch: float | None = None


GATES = {"swiglu": "silu", "geglu": "gelu", "glu": "sigmoid"}


# fmt: off
CONFIG = (
    Row("vocab_size",         "vocab_size",                   count(most=10_000_000)),
    Row("hidden_size",        "hidden_size",                  count(), aliases=("n_embd",)),
    Row("num_layers",         "num_hidden_layers",            count(most=1024), aliases=("n_layer",)),
    Row("num_heads",          "num_attention_heads",          count(most=4096), aliases=("n_head",)),
    Row("intermediate_size",  "intermediate_size",            count(most=1_000_000), aliases=("n_inner",)),
    Row("trained_positions",  "max_position_embeddings",      count(most=10_000_000), 2048, ("max_trained_positions",)),
    Row("stretch",            "rotary_scaling_factor",        optional(wavelength()), None),
    Row("max_positions",      "n_positions",                  count(most=10_000_000),
        lambda fields: fields.get("trained_positions", 2048)),  # absent if another family's settings are checked
    Row("type_vocab_size",    "type_vocab_size",              count(0), 2),
    Row("gate",               "activation_function",          one_of(*GATES), "swiglu"),
    Row("activation",         "hidden_act",                   activation(), lambda fields: GATES[fields["gate"]]),
    Row("hidden_dropout",     "hidden_dropout_prob",          fraction(), 0.0, ("resid_pdrop",)),
    Row("embedding_dropout",  "embd_pdrop",                   fraction(), lambda fields: fields["hidden_dropout"]),
    Row("attention_dropout",  "attention_probs_dropout_prob", fraction(), 0.0, ("attn_pdrop",)),
    Row("classifier_dropout", "classifier_dropout",           optional(fraction()), None),
    Row("norm_eps",           "layer_norm_eps",               epsilon(), 1e-12, ("layer_norm_epsilon",)),
    Row("pad_token_id",       "pad_token_id",                 padding_id(), 0),
    Row("theta",              "rotary_emb_base",              wavelength(), 1000.0),
    Row("rotary",             "rope_parameters",              rotary_settings(), None),
)

_SAME = "otherwise another model"
_OWN = "an option of the repository's own code, which changes no number"
IGNORED_KEYS = (
    *(
        IgnoredKey(key, _SAME, (usual, None))
        for key, usual in {
            "prenorm": False, "parallel_block": False, "parallel_block_tied_norm": False, "use_rms_norm": False,
            "causal": False, "qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False,
            "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_emb_scale_base": None,
            "num_experts": 0, "moe_every_n_layers": 0, "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
        }.items()
    ),
    *(
        IgnoredKey(key, _OWN)
        for key in (
            "use_flash_attn", "fused_bias_fc", "fused_dropout_add_ln", "use_xentropy", "dense_seq_output",
            "pad_vocab_size_multiple", "reorder_and_upcast_attn", "last_layer_subset",
        )
    ),
    *(
        IgnoredKey(f"summary_{key}", "a note of summary heads")
        for key in ("type", "use_proj", "activation", "first_dropout", "proj_to_labels")
    ),
    IgnoredKey("head_dim", "repeats the width of a head; a file of another would not fit"),
)

LAYER = "nomic_bert.encoder.layers.{i}"
MOVED = {
    "encoder.embeddings.norm":              "emb_ln",
    "encoder.layers.{i}.attention.query":   "encoder.layers.{i}.attn.Wqkv[0/3]",
    "encoder.layers.{i}.attention.key":     "encoder.layers.{i}.attn.Wqkv[1/3]",
    "encoder.layers.{i}.attention.value":   "encoder.layers.{i}.attn.Wqkv[2/3]",
    "encoder.layers.{i}.attention.output":  "encoder.layers.{i}.attn.out_proj",
    "encoder.layers.{i}.attention_norm":    "encoder.layers.{i}.norm1",
    "encoder.layers.{i}.feed_forward.up":   "encoder.layers.{i}.mlp.fc11",
    "encoder.layers.{i}.feed_forward.gate": "encoder.layers.{i}.mlp.fc12",
    "encoder.layers.{i}.feed_forward.down": "encoder.layers.{i}.mlp.fc2",
    "encoder.layers.{i}.feed_forward_norm": "encoder.layers.{i}.norm2",
}
KEYS = rows_under("nomic_bert", gte.KEYS, MOVED)
ALSO = (
    *rows_under("nomic_bert", gte.ALSO, {"head.norm": None}),
    KeyRow("encoder.embeddings.norm", "nomic_bert.embeddings.LayerNorm"),
)
# fmt: on


def encoder(c: NomicBertConfig) -> Graph:
    """Return the graph from ids to token states."""
    embeddings = bert.embeddings(c, max_positions=0, dropout=c.embedding_dropout)
    plain = {"bias": False}
    blocks = (
        bert_block(c, attention=plain | {"rotary": gte.rotary(c)}, feed_forward=plain | {"gated": True})
        for _ in range(c.num_layers)
    )
    return chain(embeddings, stack(blocks))


MASKED_LM = replace(
    bert.HEADS["masked_lm"],
    keys=tuple(
        replace(row, theirs=row.theirs.replace("transform.LayerNorm", "transform.layer_norm"))
        for row in bert.MASKED_LM_KEYS
    ),
)

FAMILY = gte.FAMILY.renamed(
    "nomic_bert",
    "NomicBert",
    base_prefix="nomic_bert",
    prefixes=("bert",),
    config=NomicBertConfig,
    rows=CONFIG,
    left_out={**gte.FAMILY.left_out, "vocab_size": 30528},
    ignored_keys=IGNORED_KEYS,
    keys=KEYS,
    also=ALSO,
    encoder=encoder,
    heads={
        "sequence_classification": bert.HEADS["sequence_classification"],
        "token_classification": bert.HEADS["token_classification"],
        "masked_lm": MASKED_LM,
    },
    pretraining={"NomicBertForPreTraining": "masked_lm"},
    unused_positions=lambda c: c.max_positions - c.trained_positions if c.stretch else 0,
    tokenizer=bert.TOKENIZER,
    tiny={"base": {}, "with dropout": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}},
    real={"base": {"vocab_size": 30528, "max_position_embeddings": 2048}},
)

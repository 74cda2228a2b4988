"""The configurations that cells are proven at: tiny ones for tests, and the published base sizes.

Settings are keyword arguments of transformers' configuration classes. A family may be proven at more
than one variant where its files differ in kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flodl_hf.family import Family

__all__ = ["settings_of", "variants_of"]

_TINY = {
    "vocab_size": 640, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 70, "type_vocab_size": 2,
}  # fmt: skip
_BASE = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
    "max_position_embeddings": 512, "type_vocab_size": 2,
}  # fmt: skip
_ROBERTA = _BASE | {"max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
_DEBERTA_TINY = _TINY | {
    "type_vocab_size": 0, "relative_attention": True, "position_buckets": 8, "max_relative_positions": -1,
    "share_att_key": True, "pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm", "position_biased_input": False,
    "layer_norm_eps": 1e-7, "pooler_hidden_size": 32, "legacy": False,
}  # fmt: skip
_DEBERTA = _DEBERTA_TINY | _BASE | {
    "type_vocab_size": 0, "position_buckets": 256, "pooler_hidden_size": 768,
}  # fmt: skip
_CONVOLUTION = {"conv_kernel_size": 3, "conv_act": "gelu"}

# model type -> variant -> settings. The first variant is the one that families are proven at by default.
_TINY_VARIANTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "bert": {"base": _TINY},
    "roberta": {"base": _TINY},
    "xlm-roberta": {"base": _TINY},
    "camembert": {"base": _TINY},
    "distilbert": {
        "base": {
            "vocab_size": 640, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 70,
        }
    },
    "albert": {
        "base": _TINY | {"embedding_size": 16},
        "groups": _TINY | {
            "embedding_size": 16, "num_hidden_layers": 5, "num_hidden_groups": 2, "inner_group_num": 2,
            "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
        },
    },
    "deberta-v2": {"base": _DEBERTA_TINY, "convolution": _DEBERTA_TINY | _CONVOLUTION},
    "electra": {"base": _TINY | {"embedding_size": 16}, "one width": _TINY | {"embedding_size": 32}},
    "xlm-roberta-xl": {"base": _TINY},
    "roberta-prelayernorm": {"base": _TINY},
    "data2vec-text": {"base": _TINY},
}  # fmt: skip
_REAL_VARIANTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "bert": {"base": _BASE | {"vocab_size": 30522}},
    "roberta": {"base": _ROBERTA | {"vocab_size": 50265}},
    "xlm-roberta": {"base": _ROBERTA | {"vocab_size": 250002}},
    "camembert": {"base": _ROBERTA | {"vocab_size": 32005}},
    "distilbert": {"base": {"vocab_size": 30522}},
    "albert": {
        "base": _BASE | {"vocab_size": 30000, "embedding_size": 128, "hidden_act": "gelu_new"},
    },
    "deberta-v2": {
        "base": _DEBERTA | {"vocab_size": 128100},
        "convolution": _DEBERTA | _CONVOLUTION | {"vocab_size": 128100},
    },
    "electra": {"base": _BASE | {"vocab_size": 30522, "embedding_size": 768}},
    # Of XL's 36 layers two, at their full width.
    "xlm-roberta-xl": {
        "base": _ROBERTA
        | {
            "vocab_size": 250880,
            "hidden_size": 2560,
            "num_hidden_layers": 2,
            "num_attention_heads": 32,
            "intermediate_size": 10240,
        }
    },
    "roberta-prelayernorm": {"base": _ROBERTA | {"vocab_size": 50265}},
    "data2vec-text": {"base": _ROBERTA | {"vocab_size": 50265}},
}


def variants_of(family: Family, size: str) -> tuple[str, ...]:
    """Return the names of a family's variants at a size, "tiny" or "real"; none where it states no settings."""
    table = _TINY_VARIANTS if size == "tiny" else _REAL_VARIANTS
    return tuple(table.get(family.model_type, {}))


def settings_of(family: Family, size: str, variant: str = "base") -> dict[str, Any]:
    """Return keyword arguments of the family's configuration class in transformers."""
    table = _TINY_VARIANTS if size == "tiny" else _REAL_VARIANTS
    return dict(table[family.model_type][variant])

"""Keys of ``config.json`` with the same meaning in every family: sizes, rotary positions, keys without effect.

Only tables; `flodl_hf.families.schema.config_rows` applies them. The file of a family lists its own keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flodl_hf.families.schema.config_rows import Check, Foreign, IgnoredKey, Row, count, number
from flodl_hf.nn.positions import RotarySettings

_CODE = "names code in the repository, which is never run"
_ATTENTION = "chooses kernels, not numbers; here it is the argument attention="
_WIDTH = "the width of the states, which the tensors show"
_DECODER = "only decoders that look at an encoder read it"
_GENERATION = "a text generation setting; encoders do not generate"
_OUTPUT = "selects the outputs of a call in transformers; here it is an argument of the call"

# For families with a ``head_dim`` that transformers' model reads.
HEAD_WIDTH = IgnoredKey("head_dim", "heads of another width are not supported", repeats="head_width", read=True)


def _ignored(reason: str, *keys: str, repeats: str | None = None, noted: bool = False) -> tuple[IgnoredKey, ...]:
    """Return keys that have no effect for the same reason."""
    return tuple(IgnoredKey(key, reason, repeats=repeats, noted=noted) for key in keys)


# fmt: off
COMMON_IGNORED_KEYS: tuple[IgnoredKey, ...] = (
    IgnoredKey("transformers_version", "records who wrote the file"),
    *_ignored("read by the dispatch", "architectures", "model_type"),
    IgnoredKey("transformers_weights", "names the file of the weights, where it has another name"),
    IgnoredKey("auto_map", _CODE, noted=True),
    IgnoredKey("custom_pipelines", _CODE),
    *_ignored(_ATTENTION, "attn_implementation", "_attn_implementation", noted=True),
    IgnoredKey("_attn_implementation_autoset", _ATTENTION),
    IgnoredKey("sentence_transformers", "a cross-encoder's notes; `rerank` obeys its activation"),
    IgnoredKey("sbert_ce_default_activation_function", "a cross-encoder's activation, which `rerank` obeys"),
    IgnoredKey("label_thresholds", "tuned thresholds, which predict(threshold='tuned') uses"),
    IgnoredKey("tie_weights_", "an old name of tie_word_embeddings"),
    IgnoredKey("eos_token_ids", "an old list of eos_token_id; the tokenizer places special tokens"),
    IgnoredKey("pad_token_ids", "an old list of pad_token_id"),
    *_ignored(_WIDTH, "embedding_size", "emb_size", "embedding_dim", "emb_dim", repeats="hidden_size", noted=True),
    IgnoredKey("num_key_value_heads", "heads do not share keys and values", repeats="num_heads"),
    *_ignored("a head is as wide as states are by heads", "head_dim", "attention_head_size", repeats="head_width"),
    *_ignored("an option of tokenizing", "padding", "truncation"),
    IgnoredKey("classifiers_size", "label counts of several tasks; the other heads are not in the file"),
    IgnoredKey("tasks", "names of the tasks of a training of several"),
    IgnoredKey("is_gpu", "where the training ran"),
    *_ignored(
        "how training labels were scaled; outputs are not scaled back, here or in transformers", "norm_mean",
        "norm_std",
    ),
    *_ignored("a note of the search that found the architecture", "cell", "structure"),
    *_ignored("a note of the training script", "pre_trained", "training"),
    IgnoredKey("tie_last_hidden_states", _OUTPUT),
    IgnoredKey("torch_dtype", "the dtype of the weights where dtype is absent"),
    IgnoredKey("dtype", "the dtype of the weights, unless the caller selects another; the load report lists it"),
    IgnoredKey("initializer_range", "only used when a new head is made", None),
    IgnoredKey("initializer_factor", "only used for new weights"),
    IgnoredKey("finetuning_task", "a note of the training script"),
    IgnoredKey("task_specific_params", "settings of other tasks"),
    *_ignored("a note", "language", "name"),
    IgnoredKey("tokenizer_class", "the tokenizer is built from its own files"),
    *_ignored("the tokenizer places special tokens", "bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id"),
    IgnoredKey("mask_token_id", "the tokenizer knows its mask token"),
    IgnoredKey("decoder_start_token_id", _GENERATION),
    IgnoredKey("gradient_checkpointing", "a training option"),
    IgnoredKey("use_cache", "a cache of decoders"),
    IgnoredKey("use_return_dict", _OUTPUT),
    IgnoredKey("return_dict", _OUTPUT, noted=True, usual=True),
    IgnoredKey("output_past", _OUTPUT),
    *_ignored(_OUTPUT, "output_attentions", "output_hidden_states", noted=True),
    IgnoredKey("torchscript", "an export option"),
    IgnoredKey(
        "pruned_heads", "transformers prunes no heads since its version 5; tensors without them would not fit",
        noted=True,
    ),
    IgnoredKey("use_bfloat16", "an option of TPU training"),
    IgnoredKey("chunk_size_feed_forward", "trades memory for time and changes no number"),
    IgnoredKey(
        "position_embedding_type", "only learned absolute positions exist in these families", ("absolute", None)
    ),
    IgnoredKey("is_decoder", "these are encoders", (False, None)),
    IgnoredKey("is_encoder_decoder", "a note of the encoder-decoder that the encoder was extracted from", noted=True),
    IgnoredKey("add_cross_attention", "these are encoders", (False, None)),
    *_ignored(_DECODER, "cross_attention_hidden_size", "tie_encoder_decoder"),
    IgnoredKey("quantization_config", "quantised weights are not supported", (None, {})),
    *_ignored(
        "ELECTRA's multiple choice alone reads it", "summary_type", "summary_use_proj", "summary_activation",
        "summary_last_dropout",
    ),
    IgnoredKey("num_choices", "multiple choice counts the choices that it is given"),
    IgnoredKey("type_vocab_size", "this family has no token types, and a file with some would not fit"),
    IgnoredKey("directionality", "a note of the first BERT release, which no code reads"),
    IgnoredKey("pooler_fc_size", "a note of the first BERT release; the pooler is hidden_size wide"),
    *_ignored(
        "a note of the first BERT release", "pooler_num_attention_heads", "pooler_num_fc_layers",
        "pooler_size_per_head", "pooler_type",
    ),
    IgnoredKey("flodl_source_repo", "a note of an earlier export"),
    *_ignored(
        _GENERATION, "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample",
        "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty",
        "forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length", "min_length",
        "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_scores",
        "prefix", "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "suppress_tokens",
        "temperature", "tf_legacy_loss", "top_k", "top_p", "typical_p",
    ),
)

# Switched on, each of these makes another model of the one that `model_type` names.
_FOREIGN: dict[str, tuple[str, ...]] = {
    "attention is biased by distance (ALiBi) instead of learned positions": (
        "alibi_starting_size", "alibi", "use_alibi",
    ),
    "attention sees a window only, as in Longformer": ("attention_window",),
    "attention sees a window only": ("local_attention", "sliding_window"),
    "attention is sparse by blocks, as in BigBird": ("block_size",),
    "positions are rotations of queries and keys": (
        "rope_theta", "rope_scaling", "rope_parameters", "rotary_base", "rotary_emb_base",
        "rotary_emb_fraction",
    ),
    "positions are rotations of queries, keys and values": ("rotary_value",),
    "the feed-forward part is another, perhaps gated": ("feed_forward_type",),
    "the feed-forward part is gated": ("hidden_act_gated", "use_glu"),
    "the feed-forward part is a mixture of experts": ("num_experts", "moe_num_experts"),
    "layers normalise before they compute": ("prenorm", "pre_norm"),
    "norms are without mean and bias": ("use_rms_norm",),
    "layers differ from one another": ("per_layer_config", "layer_types"),
    "the embedding is made by code of the repository": ("emb_pooler",),
    "adapters change the weights, chosen by task": ("lora_adaptations",),
    "adapters change what layers compute": ("adapters",),
    "adapters change the weights": ("lora", "lora_config", "peft_config", "adapter_config"),
    "weights are stored as codes": ("compression_config", "quantization"),
    "learned prefixes join every layer's keys and values": ("prefix_projection", "pre_seq_len"),
}
# fmt: on
FOREIGN = tuple(Foreign(key, what) for what, keys in _FOREIGN.items() for key in keys)


@dataclass(frozen=True, kw_only=True)
class EncoderSizes:
    """The first settings of every family.

    Attributes:
        vocab_size: rows of the word table.
        hidden_size: width of a token's state.
        num_layers: blocks in the stack.
        num_heads: attention heads of a block; divides ``hidden_size``.
        intermediate_size: width inside the feed-forward layer.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int


# fmt: off
SIZES = (
    Row("vocab_size",        "vocab_size",          count(most=10_000_000)),
    Row("hidden_size",       "hidden_size",         count()),
    Row("num_layers",        "num_hidden_layers",   count(most=1024)),
    Row("num_heads",         "num_attention_heads", count(most=4096)),
    Row("intermediate_size", "intermediate_size",   count(most=1_000_000)),
)
# fmt: on

BASE_SIZES = {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "intermediate_size": 3072}
"""The defaults of most families of transformers."""


def _settings(value: Any) -> RotarySettings:
    """Return the settings of one table of ``config.json``."""
    if not isinstance(value, Mapping):
        raise ValueError
    value = {key: entry for key, entry in value.items() if entry is not None}
    kind = value.get("rope_type", value.get("type", "default"))
    known = {"rope_type", "type", "rope_theta", *(("factor",) if kind != "default" else ())}
    theta, factor = value.get("rope_theta"), value.get("factor", 1.0)
    if kind not in ("default", "linear", "ntk") or not set(value) <= known:
        raise ValueError
    if not all(
        x is None or (isinstance(x, (int, float)) and not isinstance(x, bool) and x > 0) for x in (theta, factor)
    ):
        raise ValueError
    return RotarySettings(None if theta is None else float(theta), kind, float(factor))


def rotary_settings(*groups: str) -> Check:
    """Null, or a table of rotary positions; with ``groups``, one for each of these kinds of layers."""
    words = "a table with rope_theta, and rope_type of default, linear or ntk (with its factor)"

    def accepts(value: Any) -> Any:
        if not groups and isinstance(value, Mapping):
            return _settings(value) if value else None  # an empty table says nothing
        if value is None:
            return None
        if not isinstance(value, Mapping) or not set(value) <= set(groups):
            raise ValueError
        return {group: _settings(entry) for group, entry in value.items() if entry is not None}

    return Check(f"null, or {words}" + (f" for each of {', '.join(groups)}" if groups else ""), accepts)


def wavelength() -> Check:
    """The base of wavelengths: a number above 1."""
    return number("a number above 1", lambda value: 1 < value < 1e12)


def rotary_rows(theta: float) -> tuple[Row, ...]:
    """Return the rows of families that turn all layers alike: fields ``theta``, ``rotary`` and ``scaling``.

    The table with the older name, ``rope_scaling``, has precedence, as in transformers.

    Args:
        theta: the family's own base of wavelengths.
    """
    return (
        Row("theta", "rope_theta", wavelength(), theta),
        Row("rotary", "rope_parameters", rotary_settings(), None),
        Row("scaling", "rope_scaling", rotary_settings(), None),
    )

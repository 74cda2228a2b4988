"""Config rows: how one key of ``config.json`` becomes one field, and what is done with every other key.

Each key is exactly one of three things: *used* (a row reads it into a field), *inert* (known to
change nothing here, with its reason, sometimes only at one value), or *refused*. Faults of a whole
file are collected and raised once. What a family's fields are stands in the family's file; the rows
that all families share stand here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flodl.errors import ConfigError, capped, nearest, shown
from flodl_hf.activations import ACTIVATIONS

__all__ = [
    "COMMON_INERT",
    "REQUIRED",
    "Check",
    "Inert",
    "Row",
    "activation",
    "boolean",
    "count",
    "epsilon",
    "fraction",
    "one_of",
    "optional",
    "read_rows",
    "token_id",
    "triage",
]


class _Required:
    def __repr__(self) -> str:
        return "required"


REQUIRED = _Required()


@dataclass(frozen=True)
class Check:
    """A test of one value.

    Args:
        expected: what it takes, in words.
        accepts: returns the value to use, or raises ValueError.
        names: the spellings it knows, of which the nearest is suggested.
    """

    expected: str
    accepts: Callable[[Any], Any]
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One aligned line of a family's table: our field, the key in ``config.json``, its check, its default."""

    field: str
    key: str
    check: Check
    default: Any = REQUIRED


@dataclass(frozen=True)
class Inert:
    """A key that changes nothing here. With ``only``, it does so at those values alone and is refused at others."""

    key: str
    reason: str
    only: tuple[Any, ...] | None = None


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def count(least: int = 1, most: int = 65_536) -> Check:
    """A whole number from ``least`` to ``most``."""

    def accepts(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError
        return value

    return Check(f"a whole number from {least} to {most}", accepts)


def token_id() -> Check:
    """A token's id: a whole number from 0."""
    return count(0, 100_000_000)


def fraction() -> Check:
    """A probability of dropping, from 0 up to but not including 1."""

    def accepts(value: Any) -> float:
        if not _number(value) or not 0 <= value < 1:
            raise ValueError
        return float(value)

    return Check("a number in [0, 1)", accepts)


def epsilon() -> Check:
    """A small positive number that keeps a division finite."""

    def accepts(value: Any) -> float:
        if not _number(value) or not 0 < value <= 1e-2:
            raise ValueError
        return float(value)

    return Check("a number in (0, 0.01]", accepts)


def boolean() -> Check:
    """True or false."""

    def accepts(value: Any) -> bool:
        if not isinstance(value, bool):
            raise ValueError
        return value

    return Check("true or false", accepts)


def one_of(*values: Any) -> Check:
    """One of the listed values."""

    def accepts(value: Any) -> Any:
        if not any(value == known and type(value) is type(known) for known in values):
            raise ValueError
        return value

    return Check("one of " + ", ".join(map(repr, values)), accepts, tuple(v for v in values if isinstance(v, str)))


def activation() -> Check:
    """The name of an activation function."""
    return one_of(*ACTIVATIONS)


def optional(check: Check) -> Check:
    """Null, or what ``check`` takes."""
    return Check(f"null or {check.expected}", lambda value: None if value is None else check.accepts(value))


def read_rows(
    source: Mapping[str, Any], rows: Sequence[Row], problems: list[str], where: str = "config.json"
) -> dict[str, Any]:
    """Return the fields that ``rows`` read from ``source``; faults are appended to ``problems``.

    A row whose default is callable takes its default from the fields read before it.
    """
    fields: dict[str, Any] = {}
    for row in rows:
        if row.key not in source:
            if row.default is REQUIRED:
                problems.append(f"{row.key}: missing; expected {row.check.expected}")
            else:
                fields[row.field] = row.default(fields) if callable(row.default) else row.default
            continue
        try:
            fields[row.field] = row.check.accepts(source[row.key])
        except (ValueError, TypeError):
            value = source[row.key]
            hint = nearest(value, row.check.names) if isinstance(value, str) else ""
            problems.append(f"{row.key}: found {shown(value, 60)}{hint}; expected {row.check.expected}")
    return fields


def triage(
    source: Mapping[str, Any],
    used: Sequence[str],
    inert: Sequence[Inert],
    problems: list[str],
    ignore: Sequence[str] = (),
) -> None:
    """Append to ``problems`` every key of ``source`` that is neither used nor inert.

    Keys that start with an underscore are bookkeeping of whoever wrote the file. A key that is
    unknown but switched off (null, false, or an empty list, text or table) asks for nothing.
    """
    known = {entry.key: entry for entry in inert}
    used_keys = set(used)
    for key, value in source.items():
        if key in used_keys or key in ignore or key.startswith("_"):
            continue
        entry = known.get(key)
        if entry is not None:
            if entry.only is not None and value not in entry.only:
                allowed = " or ".join(repr(v) for v in entry.only)
                problems.append(
                    f"{key}: found {shown(value, 60)}, which is not supported; expected {allowed} ({entry.reason})"
                )
            continue
        if value is None or value is False or value in ([], {}, ""):
            continue
        hint = nearest(key, [*used_keys, *known])
        problems.append(f"{key}: found {shown(value, 60)}, a setting that is not understood{hint}")


def refuse(problems: Sequence[str], where: str, model_type: str) -> ConfigError:
    """Return the error that lists ``problems`` of one file."""
    return ConfigError(
        f"{where}: {len(problems)} problem(s) in this {model_type} configuration:\n{capped(list(problems))}\n"
        "Correct the values; a key that you know to be harmless can be passed over with "
        'ignore_config_keys=("the_key",).',
        where=where,
        model_type=model_type,
        problems=list(problems),
    )


_GENERATION = "a text generation setting; encoders do not generate"
_OUTPUT = "chooses what a call returns in transformers; here it is an argument of the call"

COMMON_INERT: tuple[Inert, ...] = (
    Inert("transformers_version", "records who wrote the file"),
    Inert("architectures", "read by the dispatch"),
    Inert("model_type", "read by the dispatch"),
    Inert("auto_map", "names code in the repository, which is never run"),
    Inert("torch_dtype", "the weight file says the dtype of every tensor"),
    Inert("dtype", "the weight file says the dtype of every tensor"),
    Inert("initializer_range", "only used when a new head is made", None),
    Inert("initializer_factor", "only used for new weights"),
    Inert("finetuning_task", "a note of the training script"),
    Inert("task_specific_params", "settings of other tasks"),
    Inert("language", "a note"),
    Inert("name", "a note"),
    Inert("tokenizer_class", "the tokenizer is built from its own files"),
    Inert("bos_token_id", "the tokenizer places special tokens"),
    Inert("eos_token_id", "the tokenizer places special tokens"),
    Inert("sep_token_id", "the tokenizer places special tokens"),
    Inert("cls_token_id", "the tokenizer places special tokens"),
    Inert("mask_token_id", "the tokenizer knows its mask token"),
    Inert("decoder_start_token_id", _GENERATION),
    Inert("gradient_checkpointing", "a training option"),
    Inert("use_cache", "a cache of decoders"),
    Inert("use_return_dict", _OUTPUT),
    Inert("return_dict", _OUTPUT),
    Inert("output_past", _OUTPUT),
    Inert("output_attentions", _OUTPUT),
    Inert("output_hidden_states", _OUTPUT),
    Inert("torchscript", "an export option"),
    Inert("pruned_heads", "the tensors would not fit", ({}, [], None)),
    Inert("use_bfloat16", "an option of TPU training"),
    Inert("chunk_size_feed_forward", "trades memory for time and changes no number"),
    Inert(
        "position_embedding_type",
        "only learned absolute positions exist in these families",
        ("absolute", None),
    ),
    Inert("is_decoder", "these are encoders", (False, None)),
    Inert("is_encoder_decoder", "these are encoders", (False, None)),
    Inert("add_cross_attention", "these are encoders", (False, None)),
    Inert("cross_attention_hidden_size", "these are encoders", (None,)),
    Inert("tie_encoder_decoder", "these are encoders", (False, None)),
    Inert("quantization_config", "quantised weights are not supported", (None, {})),
    Inert("num_choices", "multiple choice is not one of the heads"),
    Inert("directionality", "a note of the first BERT release", ("bidi", None)),
    Inert("pooler_fc_size", "a note of the first BERT release; the pooler is hidden_size wide"),
    Inert("pooler_num_attention_heads", "a note of the first BERT release"),
    Inert("pooler_num_fc_layers", "a note of the first BERT release"),
    Inert("pooler_size_per_head", "a note of the first BERT release"),
    Inert("pooler_type", "a note of the first BERT release"),
    Inert("flodl_source_repo", "a note of an earlier export"),
    *(
        Inert(key, _GENERATION)
        for key in (
            "bad_words_ids",
            "begin_suppress_tokens",
            "diversity_penalty",
            "do_sample",
            "early_stopping",
            "encoder_no_repeat_ngram_size",
            "exponential_decay_length_penalty",
            "forced_bos_token_id",
            "forced_eos_token_id",
            "length_penalty",
            "max_length",
            "min_length",
            "no_repeat_ngram_size",
            "num_beam_groups",
            "num_beams",
            "num_return_sequences",
            "output_scores",
            "prefix",
            "remove_invalid_values",
            "repetition_penalty",
            "return_dict_in_generate",
            "suppress_tokens",
            "temperature",
            "tf_legacy_loss",
            "top_k",
            "top_p",
            "typical_p",
        )
    ),
)

"""Contradictions between the settings files of a tokenizer and its ``tokenizer.json``, and which of them is used.

Settings that replace parts of ``tokenizer.json`` are applied before (``definition.py``) and reported there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

from flodl.errors import printable

from .settings import ROLES, Settings, content


def contradictions(
    inner: tokenizers.Tokenizer,
    settings: Settings,
    mapped: Mapping[str, Any],
    config: Mapping[str, Any],
    pad_token: str | None,
) -> list[str]:
    """Return a sentence for each contradiction of settings and ``tokenizer.json``, with the value that is used.

    Args:
        inner: the tokenizer of ``tokenizer.json``.
        settings: values of ``tokenizer_config.json``, as read.
        mapped: ``special_tokens_map.json``.
        config: the model's ``config.json``, or an empty mapping.
        pad_token: the token that the padding section names.
    """
    stated = settings.raw
    return [
        *_files(stated, mapped),
        *_padding(settings, pad_token),
        *_lengths(settings, config),
        *_segments(inner, settings, config),
    ]


def _files(stated: Mapping[str, Any], mapped: Mapping[str, Any]) -> Iterator[str]:
    which = "former" if "added_tokens_decoder" in stated else "latter"
    for role in ROLES:
        one, other = content(stated.get(role)), content(mapped.get(role))
        if one and other and one != other:
            yield (
                f"{role}: {printable(one, 40)} in tokenizer_config.json and {printable(other, 40)} in "
                f"special_tokens_map.json; the {which} is used, as in transformers"
            )


def _padding(settings: Settings, pad_token: str | None) -> Iterator[str]:
    chosen = settings.special.get("pad_token")
    if pad_token and chosen and chosen != pad_token:
        yield (
            f"pad_token: {printable(chosen, 40)} by the settings files and {printable(pad_token, 40)} in the padding "
            "section of tokenizer.json; the settings are used, as in transformers"
        )


def _lengths(settings: Settings, config: Mapping[str, Any]) -> Iterator[str]:
    stated = settings.raw
    old, new = stated.get("max_len"), stated.get("model_max_length")
    if old is not None and new is not None and old != new:
        yield f"max_len: {old} and model_max_length: {new}; the latter is used, as in transformers"
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and settings.model_max_length and settings.model_max_length > positions:
        yield (
            f"model_max_length: {settings.model_max_length} in tokenizer_config.json and {positions} positions in "
            "config.json; predictions use the limit of the model, tokenizer calls the setting, as in transformers"
        )


def _segments(inner: tokenizers.Tokenizer, settings: Settings, config: Mapping[str, Any]) -> Iterator[str]:
    rows = config.get("type_vocab_size")
    if settings.type_ids or not isinstance(rows, int) or rows < 2 or not any(inner.encode("", "").type_ids):
        return
    why = "model_input_names" if isinstance(settings.raw.get("model_input_names"), list) else "tokenizer_class"
    yield (
        f"token types: the model has {rows} and the template marks a second text; none are returned because of {why} "
        '(to have them, "model_input_names": ["input_ids", "token_type_ids", "attention_mask"] in the same file)'
    )

"""Contradictions between the settings files of a tokenizer and its ``tokenizer.json``, and which of them is used.

Settings that replace parts of ``tokenizer.json`` are applied before (``definition.py``) and reported there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

from flodl.errors import printable

from .settings import ROLES, Settings, content, said_of

__all__ = ["contradictions"]


def contradictions(
    inner: tokenizers.Tokenizer,
    settings: Settings,
    mapped: Mapping[str, Any],
    config: Mapping[str, Any],
    pad_token: str | None,
) -> list[str]:
    """Return a sentence for each place where settings say something else than ``tokenizer.json``, with which one holds.

    Args:
        inner: the tokenizer of ``tokenizer.json``.
        settings: what ``tokenizer_config.json`` says, as read.
        mapped: ``special_tokens_map.json``.
        config: the model's ``config.json``, or an empty mapping.
        pad_token: the token that the padding section names.
    """
    stated = settings.raw
    return [
        *_switches(inner, stated),
        *_files(stated, mapped),
        *_template(inner, stated, mapped),
        *_unknown(inner, stated, mapped),
        *_padding(settings, pad_token),
        *_lengths(settings, config),
        *_segments(inner, settings, config),
    ]


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    """Yield a normalizer's or splitter's description and those inside it."""
    pending = [json.loads(component.__getstate__())] if component is not None else []
    while pending:
        part = pending.pop()
        yield part
        for inside in ("normalizers", "pretokenizers", "processors"):
            pending += [p for p in part.get(inside) or () if isinstance(p, dict)]


def _switches(inner: tokenizers.Tokenizer, stated: Mapping[str, Any]) -> Iterator[str]:
    found: dict[str, Any] = {}
    normalizers = list(_parts(inner.normalizer))
    for part in normalizers:
        if part.get("type") == "BertNormalizer":
            found["do_lower_case"] = part.get("lowercase")
            found["strip_accents"] = part.get("strip_accents")
            found["tokenize_chinese_chars"] = part.get("handle_chinese_chars")
    if "do_lower_case" not in found:
        found["do_lower_case"] = any(part.get("type") == "Lowercase" for part in normalizers)
    for part in _parts(inner.pre_tokenizer):
        if part.get("type") == "ByteLevel":
            found["add_prefix_space"] = part.get("add_prefix_space")
    for key, value in found.items():
        said = stated.get(key)
        if isinstance(said, bool) and said != value:
            yield f"{key}: {said} in tokenizer_config.json and {value} in tokenizer.json; the latter is used"


def _role(role: str, stated: Mapping[str, Any], mapped: Mapping[str, Any]) -> str | None:
    return next(filter(None, map(content, said_of(role, stated, mapped))), None)


def _files(stated: Mapping[str, Any], mapped: Mapping[str, Any]) -> Iterator[str]:
    which = "former" if "added_tokens_decoder" in stated else "latter"
    for role in ROLES:
        one, other = content(stated.get(role)), content(mapped.get(role))
        if one and other and one != other:
            yield (
                f"{role}: {printable(one, 40)} in tokenizer_config.json and {printable(other, 40)} in "
                f"special_tokens_map.json; the {which} holds, as in transformers"
            )


def _template(inner: tokenizers.Tokenizer, stated: Mapping[str, Any], mapped: Mapping[str, Any]) -> Iterator[str]:
    around = inner.encode("").tokens
    if len(around) < 2:
        return
    for role, token in (("cls_token", around[0]), ("sep_token", around[-1])):
        said = _role(role, stated, mapped)
        # One that the vocabulary lacks is told where tokens are added.
        if said and said != token and inner.token_to_id(said) is not None:
            yield (
                f"{role}: {printable(said, 40)} by the settings files and {printable(token, 40)} in the template of "
                f"tokenizer.json; the latter is used"
            )


def _unknown(inner: tokenizers.Tokenizer, stated: Mapping[str, Any], mapped: Mapping[str, Any]) -> Iterator[str]:
    said, used = _role("unk_token", stated, mapped), getattr(inner.model, "unk_token", None)
    if said and isinstance(used, str) and said != used:
        yield (
            f"unk_token: {printable(said, 40)} by the settings files and {printable(used, 40)} in tokenizer.json; "
            "the latter is used"
        )


def _padding(settings: Settings, pad_token: str | None) -> Iterator[str]:
    chosen = settings.special.get("pad_token")
    if pad_token and chosen and chosen != pad_token:
        yield (
            f"pad_token: {printable(chosen, 40)} by the settings files and {printable(pad_token, 40)} in the padding "
            "section of tokenizer.json; the settings hold, as in transformers"
        )


def _lengths(settings: Settings, config: Mapping[str, Any]) -> Iterator[str]:
    stated = settings.raw
    old, new = stated.get("max_len"), stated.get("model_max_length")
    if old is not None and new is not None and old != new:
        yield f"max_len: {old} beside model_max_length {new}; the latter holds, as in transformers"
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and settings.model_max_length and settings.model_max_length > positions:
        yield (
            f"model_max_length: {settings.model_max_length} in tokenizer_config.json and {positions} positions in "
            "config.json; predictions obey the model, calls of the tokenizer the setting, as in transformers"
        )


def _segments(inner: tokenizers.Tokenizer, settings: Settings, config: Mapping[str, Any]) -> Iterator[str]:
    rows = config.get("type_vocab_size")
    if settings.type_ids or not isinstance(rows, int) or rows < 2 or not any(inner.encode("", "").type_ids):
        return
    why = "model_input_names" if isinstance(settings.raw.get("model_input_names"), list) else "tokenizer_class"
    yield (
        f"token types: the model has {rows} and the template marks a second text; none are given, as {why} says "
        '(to have them, "model_input_names": ["input_ids", "token_type_ids", "attention_mask"] in the same file)'
    )

"""Special and added tokens: which tokens are matched in a text before it is segmented, and their ids.

Leaves to others: the vocabulary, the template of special tokens (``templates.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from flodl.errors import capped, printable
from flodl_hf.errors import TokenizerError

from .settings import ROLES, content, extra_tokens
from .source import Source


def _flag(value: Any, name: str, default: bool) -> bool:
    return value[name] if isinstance(value, Mapping) and isinstance(value.get(name), bool) else default


def _token(text: str, stated: Any, *, special: bool, takes_space: bool = False) -> AddedToken:
    # As in transformers, a token is matched in the normalized text unless it is special or its entry specifies it.
    return AddedToken(
        text,
        lstrip=_flag(stated, "lstrip", takes_space),
        rstrip=_flag(stated, "rstrip", False),
        single_word=_flag(stated, "single_word", False),
        normalized=_flag(stated, "normalized", not special),
        special=special,
    )


def role_tokens(tokens: Mapping[str, str], stated: Mapping[str, Any], *, mask_takes_space: bool) -> list[AddedToken]:
    """Return the token of each role as a special token.

    Args:
        tokens: token by role.
        stated: entry of the settings files by role.
        mask_takes_space: whether the mask token includes the space before it by default.
    """
    return [
        _token(token, stated.get(role), special=True, takes_space=mask_takes_space and role == "mask_token")
        for role, token in tokens.items()
        if role.endswith("_token")
    ]


def _numbered(source: Source) -> list[tuple[int, AddedToken]]:
    """Return the tokens that ``added_tokens_decoder`` or ``added_tokens.json`` number, by id."""
    faults = []
    named = {content(stated.get(role)) for stated in (source.settings, source.mapped) for role in ROLES}
    named |= set(extra_tokens(source.settings, source.mapped))
    decoder = source.settings.get("added_tokens_decoder")
    entries = [(number, content(value), value) for number, value in (decoder or {}).items()]
    if decoder is None:
        entries = [(str(number) if type(number) is int else "", text, None) for text, number in source.added.items()]
    wanted = []
    for number, text, value in entries:
        if not number.isdecimal() or len(number) > 10 or not text:
            faults.append(f"{printable(str(text), 40)}: found the id {printable(number, 40)}")
        else:
            special = _flag(value, "special", value is None and text in named)
            wanted.append((int(number), _token(text, value, special=special)))
    _raise(faults, "a token and a number in each entry", source)
    return sorted(wanted, key=lambda entry: entry[0])


def _raise(faults: Sequence[str], expected: str, source: Source) -> None:
    if faults:
        file = "added_tokens.json" if source.settings.get("added_tokens_decoder") is None else "tokenizer_config.json"
        raise TokenizerError(
            f"{source.folder}/{file}: added tokens do not fit the vocabulary:\n{capped(faults)}\n"
            f"expected {expected}. Fetch vocabulary and added tokens from the same place.",
            where=source.folder,
            problems=faults,
        )


def add_tokens(tokenizer: Tokenizer, source: Source, roles: Sequence[AddedToken] | None = None) -> list[str]:
    """Add the tokens that settings files contain and the vocabulary lacks, in the order of transformers; return notes.

    Each gets the next free id; one beyond the rows of the model's word table is not added.

    Args:
        tokenizer: the tokenizer to change.
        source: the settings files.
        roles: special tokens of a tokenizer built from vocabulary files, in which each token must have its stated id;
            None for a tokenizer of ``tokenizer.json``.

    Raises:
        TokenizerError: an entry is invalid, or a token does not have its stated id.
    """
    numbered, rows = _numbered(source), source.rows
    listed = extra_tokens(source.settings, source.mapped)
    extra = [_token(text, value, special=True) for text, value in listed.items()]
    notes, faults = [], []
    for number, token in (*numbered, *((None, token) for token in (*(roles or ()), *extra))):
        text, limited = token.content, roles is None or token in extra
        found, free = tokenizer.token_to_id(text), tokenizer.get_vocab_size(with_added_tokens=True)
        if limited and found is None and rows is not None and free >= rows:
            notes.append(
                f"{printable(text, 40)} is in the settings files alone and the model has no row for its id {free}, so "
                "it is read as plain text (transformers adds it, and its model fails)"
            )
            continue
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        here = tokenizer.token_to_id(text)
        differs = number is not None and number != here
        if differs and roles is not None:
            faults.append(f"{printable(text, 40)}: found id {here}, expected {number}")
        if found is None:
            stated = f", although {number} is stated" if differs else ""
            alone = f"{printable(text, 40)} is in the settings files alone"
            notes.append(f"{alone}; as in transformers it was added as id {here}{stated}")
    _raise(faults, "the stated ids", source)
    for role in ROLES:
        text = content(source.settings.get(role)) or content(source.mapped.get(role))
        if text and tokenizer.token_to_id(text) is None:
            notes.append(
                f"{role} is {printable(text, 40)} in the settings files and not in the vocabulary; the template of "
                "tokenizer.json is used (transformers adds a new token)"
            )
    return notes

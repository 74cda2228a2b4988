"""Special and added tokens of a tokenizer: which tokens are matched in a text before it is segmented, and their ids.

Leaves to others: the vocabulary, the template of special tokens (``templates.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer

from flodl.errors import capped, printable
from flodl_hf.errors import TokenizerError

from .settings import ROLES, content, extra_tokens
from .source import parse_json

__all__ = ["add_missing", "add_roles", "add_stated"]


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


def add_roles(
    tokenizer: Tokenizer, tokens: Mapping[str, str], stated: Mapping[str, Any], *, mask_takes_space: bool
) -> None:
    """Make the token of every role special; one that the vocabulary lacks gets the next free id.

    Args:
        tokenizer: what is changed.
        tokens: token by role.
        stated: what the settings files say about each role.
        mask_takes_space: whether the mask token swallows the space before it by default.
    """
    for role in tokens:
        if role.endswith("_token"):
            takes_space = mask_takes_space and role == "mask_token"
            added = _token(tokens[role], stated.get(role), special=True, takes_space=takes_space)
            tokenizer.add_special_tokens([added])


def _named(settings: Mapping[str, Any], mapped: Mapping[str, Any]) -> set[str | None]:
    """Return the special tokens that the settings files name."""
    return {content(source.get(role)) for source in (settings, mapped) for role in ROLES} | set(
        extra_tokens(settings, mapped)
    )


def add_stated(
    tokenizer: Tokenizer,
    files: Mapping[str, bytes],
    settings: Mapping[str, Any],
    mapped: Mapping[str, Any],
    folder: str,
) -> None:
    """Add the tokens of ``added_tokens.json`` or ``added_tokens_decoder`` with the ids in these files.

    Args:
        tokenizer: the tokenizer to change.
        files: tokenizer files by name.
        settings: ``tokenizer_config.json``.
        mapped: ``special_tokens_map.json``.
        folder: the folder of the files, for messages.

    Raises:
        TokenizerError: if a stated id cannot be had.
    """
    wanted: dict[int, tuple[str, Any, str]] = {}
    faults: list[str] = []
    named = _named(settings, mapped)
    if "added_tokens.json" in files:
        for text, number in parse_json(files["added_tokens.json"], f"{folder}/added_tokens.json").items():
            if isinstance(number, bool) or not isinstance(number, int) or number < 0 or not text:
                faults.append(
                    f"added_tokens.json: {printable(text, 40)} has id {printable(str(number), 40)}; expected a number"
                )
            else:
                wanted[number] = (text, None, "added_tokens.json")
    decoder = settings.get("added_tokens_decoder")
    for number, stated in decoder.items() if isinstance(decoder, Mapping) else ():
        text = content(stated)
        if not isinstance(number, str) or not number.isdecimal() or len(number) > 10 or text is None:
            faults.append(f"tokenizer_config.json: added_tokens_decoder has the entry {printable(str(number), 40)}")
        else:
            wanted[int(number)] = (text, stated, "tokenizer_config.json")
    for number, (text, stated, file) in sorted(wanted.items()):
        special = _flag(stated, "special", stated is None and text in named)
        token = _token(text, stated, special=special)
        if special:
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])
        found = tokenizer.token_to_id(text)
        if found != number:
            faults.append(f"{file}: {printable(text, 40)} is stated as id {number} and comes to id {found}")
    if faults:
        raise TokenizerError(
            f"{folder}: added tokens do not fit the vocabulary:\n{capped(faults)}\n"
            "expected the ids that they get; fetch vocabulary and added tokens from the same place",
            where=folder,
            problems=faults,
        )


def add_missing(
    tokenizer: Tokenizer,
    settings: Mapping[str, Any],
    mapped: Mapping[str, Any],
    added: Mapping[str, Any],
    rows: int | None,
    *,
    decoder: bool,
) -> list[str]:
    """Add the tokens that settings files name and the vocabulary lacks, as transformers does; return what differs.

    They get the next free ids,
    whatever id is stated: those of ``added_tokens_decoder`` or ``added_tokens.json`` first,
    then further special tokens.

    Args:
        tokenizer: what is changed.
        settings: ``tokenizer_config.json``.
        mapped: ``special_tokens_map.json``.
        added: ``added_tokens.json``.
        rows: rows of the model's word table, if known: a token beyond them is not added.
        decoder: also add what is stated with an id; else that is done already.
    """
    notes: list[str] = []
    wanted: list[tuple[str, AddedToken, int | None]] = []
    named = _named(settings, mapped)
    if decoder:
        stated = settings.get("added_tokens_decoder")
        if isinstance(stated, Mapping):
            by_id = [(int(n), content(v), v) for n, v in stated.items() if str(n).isdecimal() and len(str(n)) < 11]
        else:
            by_id = [(n, text, None) for text, n in added.items() if isinstance(n, int) and not isinstance(n, bool)]
        for number, text, value in sorted(by_id, key=lambda entry: entry[0]):
            if text:
                special = _flag(value, "special", value is None and text in named)
                wanted.append((text, _token(text, value, special=special), number))
    wanted += [(t, _token(t, v, special=True), None) for t, v in extra_tokens(settings, mapped).items()]
    for text, token, number in wanted:
        found = tokenizer.token_to_id(text)
        free = tokenizer.get_vocab_size(with_added_tokens=True)
        if found is None and rows is not None and free >= rows:
            notes.append(
                f"{printable(text, 40)} is named by the settings files and not by the vocabulary, and the model has no "
                f"row for its id {free}; it is read as plain text (transformers gives it that id, and its model fails)"
            )
            continue
        if token.special:
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])
        if found is None:
            here = tokenizer.token_to_id(text)
            stated_too = f", though {number} is stated" if number not in (None, here) else ""
            notes.append(
                f"{printable(text, 40)} is named by the settings files alone; as in transformers it was added as id "
                f"{here}{stated_too}"
            )
    for role in ROLES:
        text = content(settings.get(role)) or content(mapped.get(role))
        if text and tokenizer.token_to_id(text) is None:
            notes.append(
                f"{role} is {printable(text, 40)} by the settings files, which the vocabulary does not have; the "
                "template of tokenizer.json holds (transformers adds it as a new token, which the model never saw)"
            )
    return notes

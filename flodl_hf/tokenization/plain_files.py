"""Readers of ``vocab.txt``, ``vocab.json`` and ``merges.txt`` that check each line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from flodl.errors import capped, printable
from flodl_hf.errors import TokenizerError
from flodl_hf.tokenization.source import decode_text, parse_json

# Ids are 32-bit numbers in the tokenizers library, and rows of an embedding in every model.
_MAX_ID = 10_000_000


def _lines(data: bytes, path: str) -> list[str]:
    # Only line feeds end a line: vocabularies contain characters at which str.splitlines would split.
    lines = decode_text(data, path).replace("\r\n", "\n").split("\n")
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _raise(path: str, faults: list[str], remedy: str) -> None:
    if faults:
        raise TokenizerError(
            f"{path}: {len(faults)} faults:\n{capped(faults, 10)}\n{remedy}", where=path, problems=faults
        )


def read_vocab_txt(data: bytes, path: str) -> dict[str, int]:
    """Return token to id from a file with one token a line, the first being id 0.

    A token that occurs twice has the id of its last line, as in transformers.

    Raises:
        TokenizerError: if the file is empty.
    """
    lines = _lines(data, path)
    if not lines:
        _raise(path, ["the file is empty"], "expected a token on each line; fetch the file again")
    return {token: number for number, token in enumerate(lines)}


def read_fairseq(data: bytes, path: str, first: Sequence[str]) -> dict[str, int]:
    """Return token to id from a file with a token and its count on each line, numbered after ``first``.

    Raises:
        TokenizerError: if a line has no count.
    """
    vocab = {token: number for number, token in enumerate(first)}
    faults = []
    for number, line in enumerate(_lines(data, path), start=1):
        token, space, _ = line.strip().rpartition(" ")
        if not space:
            faults.append(f"line {number}: {printable(line, 40)} is not a token and its count")
        vocab[token] = len(vocab)
    _raise(path, faults, "expected the vocabulary of fairseq; fetch the file again, or correct tokenizer_class")
    return vocab


def read_vocab_json(data: bytes, path: str) -> dict[str, int]:
    """Return token to id from a JSON object.

    Raises:
        TokenizerError: if it is not an object of distinct small numbers, or a token occurs twice.
    """
    faults: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(items)
        if len(values) < len(items):
            repeated = (Counter(key for key, _ in items) - Counter(values.keys())).elements()
            faults.extend(f"{printable(key, 40)} occurs twice" for key in repeated)
        return values

    value = parse_json(data, path, pairs)
    if not value:
        faults.append("the object is empty")
    owner: dict[int, str] = {}
    for token, number in value.items():
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < _MAX_ID:
            faults.append(f"{printable(token, 40)} has id {printable(str(number), 40)}")
        elif number in owner:
            faults.append(f"{printable(token, 40)} and {printable(owner[number], 40)} both have id {number}")
        else:
            owner[number] = token
    _raise(path, faults, f"expected distinct numbers from 0 to {_MAX_ID - 1}; fetch the file again")
    return {token: number for number, token in owner.items()}


def read_merges(data: bytes, path: str, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the merges of byte-level BPE in order of rank.

    Args:
        data: contents of ``merges.txt``.
        path: its name, for messages.
        vocab: token to id; both parts and their union must be in it.

    Raises:
        TokenizerError: if a line is not two tokens of the vocabulary with a union in the vocabulary.
    """
    merges: list[tuple[str, str]] = []
    faults = []
    for number, line in enumerate(_lines(data, path), start=1):
        if number == 1 and line.startswith("#version"):
            continue
        parts = line.split(" ")
        if len(parts) != 2 or not all(parts):
            faults.append(f"line {number}: {printable(line, 40)} is not two tokens with a space between")
            continue
        unknown = [token for token in (*parts, "".join(parts)) if token not in vocab]
        if unknown:
            faults.append(f"line {number}: {printable(unknown[0], 40)} is not in the vocabulary")
        merges.append((parts[0], parts[1]))
    _raise(
        path,
        faults,
        "expected two tokens of vocab.json on each line; fetch vocab.json and merges.txt from the same place",
    )
    return merges

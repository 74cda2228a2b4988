"""The ids of many texts as one array, without an object for each text; and the first tokens of long texts.

Creating an encoding for each text takes longer than computing its ids. The library tokenises the parts of a pre-split
text separately, exactly as it does texts. Therefore several texts are passed as parts of one, with a special token
after each that marks its end.

This module selects the token and the number of texts. Threads, special tokens around texts, and texts that contain the
token are processed elsewhere.

Of a long text that is truncated, a prefix is tokenised, and a longer one if its tokens do not suffice. A prefix ends
before a space where the tokenizer splits the text, so its tokens are the first tokens of the whole text. A tokenizer
that does not split at spaces reads whole texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from struct import pack
from typing import Any

import numpy as np
import tokenizers

Flat = tuple[np.ndarray, np.ndarray]
"""Ids of many texts end to end, without specials, ``(tokens,)``, and how many each has, ``(texts,)``."""

Mark = tuple[str, int]
"""A special token that ends each text of a block, and its id."""

# Most texts in a block, and about the fewest characters: each block costs an object, and texts of a block are tokenised
# one after the other.
MAX_TEXTS = 64
LEAST_CHARS = 512
_PROBES = ("a", "", "a, b", " b a ")


def mark_of(inner: tokenizers.Tokenizer) -> Mark | None:
    """Return a special token that rarely occurs in texts; None if no token separates texts without changing their ids.

    Args:
        inner: the tokenizer.
    """
    if inner.encode_special_tokens:
        return None
    unknown = getattr(inner.model, "unk_token", None)
    added = sorted(inner.get_added_tokens_decoder().items())
    special = [(token.content, i) for i, token in added if token.special and token.content != unknown]
    # Texts do not contain the padding token.
    special.sort(key=lambda entry: "pad" not in entry[0].lower())
    run = partial(inner.encode_batch_fast, is_pretokenized=True, add_special_tokens=False)
    for mark in special[:4]:
        alone = [encoding.ids for encoding in inner.encode_batch_fast(list(_PROBES), add_special_tokens=False)]
        if run([[mark[0]]])[0].ids != [mark[1]] or any(mark[1] in ids for ids in alone):
            continue
        found = _ids_of(_PROBES, mark, run, len(_PROBES))
        if (
            found is not None
            and found[0].tolist() == list(chain(*alone))
            and found[1].tolist() == list(map(len, alone))
        ):
            return mark
    return None


def in_blocks(
    texts: Sequence[str], mark: Mark, run: Callable[[list[Any], int], list[tokenizers.Encoding]], cores: int
) -> Flat | None:
    """Return the ids of all texts, or None if a text contains the mark.

    Args:
        texts: the texts.
        mark: of `mark_of`.
        run: tokenises blocks, given the number of texts in each.
        cores: number of cores.
    """
    least = LEAST_CHARS * len(texts) // max(1, sum(map(len, texts)))
    size = max(1, min(MAX_TEXTS, max(least, len(texts) // (8 * cores))))
    return _ids_of(texts, mark, lambda blocks: run(blocks, size), size)


def _ids_of(
    texts: Sequence[str], mark: Mark, run: Callable[[list[Any]], list[tokenizers.Encoding]], size: int
) -> Flat | None:
    parts: list[str] = [mark[0]] * (2 * len(texts))
    parts[::2] = texts
    encodings = run([parts[i : i + 2 * size] for i in range(0, len(parts), 2 * size)])
    ids = packed(map(attrgetter("ids"), encodings))
    ends = np.flatnonzero(ids == mark[1])
    # One mark follows each text; further marks are in the texts.
    if len(ends) != len(texts):
        return None
    return np.delete(ids, ends), np.diff(ends, prepend=-1) - 1


def packed(lists: Iterable[Sequence[int]]) -> np.ndarray:
    """Return the numbers of many lists as one int32 array; faster than one iterator of all numbers."""
    parts = bytearray()
    for numbers in lists:
        parts += pack(f"{len(numbers)}i", *numbers)
    return np.frombuffer(parts, np.int32)


# Assumed characters of a token; English has four or five.
CHARS = 6
# Tokens behind the requested ones, although the tokens before a split do not depend on the text behind it.
MARGIN = 8
_SPLIT_PROBES = ("ab cd", "a1 2b", "x, y")


def splits_at_spaces(inner: tokenizers.Tokenizer) -> bool:
    """Return whether no token depends on the characters behind the first space after it."""
    # A prefix could end inside an added token with white space.
    added = inner.get_added_tokens_decoder().values()
    if inner.pre_tokenizer is None or any(char.isspace() for token in added for char in token.content):
        return False

    def pieces(text: str) -> list[str]:
        text = inner.normalizer.normalize_str(text) if inner.normalizer else text
        return [piece for piece, _ in inner.pre_tokenizer.pre_tokenize_str(text)]

    for probe in _SPLIT_PROBES:
        before, whole = pieces(probe.partition(" ")[0]), pieces(probe)
        if len(before) == len(whole) or whole[: len(before)] != before:
            return False
    return True


def prefix(text: str, size: int) -> str:
    """Return a prefix of about ``size`` characters that ends with a letter or digit before a space, or all of a text.

    A special token may contain all white space before it, and normalization may remove other characters.
    """
    end = size
    while 0 < end < len(text):
        end = text.rfind(" ", size // 2, end)
        if end > 0 and text[end - 1].isalnum():
            return text[:end]
    return text if size >= len(text) else prefix(text, 2 * size)


def beginnings(texts: Sequence[str], wanted: int, flat: Callable[[Sequence[str]], Flat]) -> tuple[list[str], Flat]:
    """Return prefixes of texts with at least ``wanted`` tokens, or whole texts, and their ids.

    Args:
        texts: texts for a tokenizer of which `splits_at_spaces` is True.
        wanted: number of requested tokens.
        flat: ids of texts, without special tokens.
    """
    size = CHARS * (wanted + MARGIN)
    read = [text if len(text) <= size else prefix(text, size) for text in texts]
    ids, counts = flat(read)
    while True:
        few = [at for at in np.flatnonzero(counts < wanted + MARGIN).tolist() if len(read[at]) < len(texts[at])]
        if not few:
            return read, (ids, counts)
        size *= 2
        longer = [prefix(texts[at], size) for at in few]
        for at, text in zip(few, longer, strict=True):
            read[at] = text
        ids, counts = replaced((ids, counts), few, flat(longer))


def replaced(flat: Flat, texts: list[int], others: Flat) -> Flat:
    """Return the ids of texts, of which some are replaced by other ids."""
    ids, counts = flat
    chosen = np.zeros(len(counts), bool)
    chosen[texts] = True
    kept = ids[np.repeat(~chosen, counts)]
    counts = counts.copy()
    counts[texts] = others[1]
    mask = np.repeat(chosen, counts)
    found = np.empty(len(mask), ids.dtype)
    found[mask], found[~mask] = others[0], kept
    return found, counts

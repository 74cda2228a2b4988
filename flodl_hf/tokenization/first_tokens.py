"""The first tokens of long texts, without the tokens that truncation removes.

Tokenization starts with a prefix of a text, and repeats with a longer one if its tokens do not suffice. A prefix ends
before a space where the tokenizer splits the text, so its tokens are the first tokens of the whole text. A tokenizer
that does not split at spaces reads whole texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tokenizers

from flodl_hf.tokenization.blocks import Flat

# Assumed characters of a token; English has four or five.
CHARS = 6
# Tokens behind the requested ones, although the tokens before a split do not depend on the text behind it.
MARGIN = 8
_PROBES = ("ab cd", "a1 2b", "x, y")


def splits_at_spaces(inner: tokenizers.Tokenizer) -> bool:
    """Return whether no token depends on the characters behind the first space after it."""
    # A prefix could end inside an added token with white space.
    added = inner.get_added_tokens_decoder().values()
    if inner.pre_tokenizer is None or any(char.isspace() for token in added for char in token.content):
        return False

    def pieces(text: str) -> list[str]:
        text = inner.normalizer.normalize_str(text) if inner.normalizer else text
        return [piece for piece, _ in inner.pre_tokenizer.pre_tokenize_str(text)]

    for probe in _PROBES:
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

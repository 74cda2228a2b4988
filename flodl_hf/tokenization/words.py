"""Pre-split words for tokenizers that mark words by a preceding space which they do not add themselves.

Byte-level BPE without ``add_prefix_space`` would glue pre-split words together, so the words are joined by
single spaces, tokenized as one text, and found again by offsets.

Decides: which tokenizers need this, and which word a token belongs to.
Leaves to others: tokenization.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from .cuts import Row

JOINED = (
    "is_split_into_words: this tokenizer marks a word by the space before it, so words are joined by spaces. "
    "transformers glues them together instead, unless it is loaded with add_prefix_space=True"
)


Part = dict[str, Any]
_INSIDE = ("normalizers", "pretokenizers", "processors")


def parts_of(component: Part | None) -> list[Part]:
    """Return a component of a definition and the components in it."""
    if not isinstance(component, dict):
        return []
    return [component, *(part for key in _INSIDE for inner in component.get(key) or () for part in parts_of(inner))]


def joins_words(pre_tokenizer: bytes | str) -> bool:
    """Return whether pre-split words must be joined by spaces, from the serialized pre-tokenizer."""
    for part in parts_of(json.loads(pre_tokenizer)):
        if part.get("type") == "ByteLevel" and not part.get("add_prefix_space"):
            return True
        if part.get("type") == "Metaspace" and part.get("prepend_scheme") == "never":
            return True
    return False


def join(words: Sequence[str]) -> str:
    """Return the text of words for `rows_from_joined`."""
    # An empty word has no tokens, and a space for it would have some.
    return " ".join(word for word in words if word)


def _places(words: Sequence[str]) -> tuple[list[int], list[int]]:
    """Return where each word that is not empty starts in the joined text, and its number."""
    numbers = [number for number, word in enumerate(words) if word]
    starts = list(accumulate((len(words[number]) + 1 for number in numbers), initial=0))
    return starts[: len(numbers)], numbers


def rows_from_joined(
    rows: Sequence[Row], texts: Sequence[Sequence[str]], pairs: Sequence[Sequence[str]] | None
) -> list[Row]:
    """Return ``rows`` of joined words with word numbers and offsets that refer to the words.

    Args:
        rows: rows of the texts that `join` gives.
        texts: the words of each first text.
        pairs: the words of each second text.
    """
    out = []
    for index, row in enumerate(rows):
        words = (texts[index], () if pairs is None else pairs[index])
        places = (_places(words[0]), _places(words[1]))
        word_ids: list[int | None] = []
        offsets: list[tuple[int, int]] = []
        for sequence, (start, end) in zip(row.sequence_ids, row.offsets, strict=True):
            if sequence is None:
                word_ids.append(None)
                offsets.append((0, 0))
                continue
            starts, numbers = places[sequence]
            # The last character decides: the first may be the space before the word.
            at = bisect_right(starts, max(start, end - 1)) - 1
            base, number = starts[at], numbers[at]
            length = len(words[sequence][number])
            word_ids.append(number)
            offsets.append((min(max(start - base, 0), length), min(max(end - base, 0), length)))
        out.append(replace(row, word_ids=word_ids, offsets=offsets))
    return out

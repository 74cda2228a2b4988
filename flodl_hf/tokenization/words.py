"""Pre-split words for tokenizers that mark words by a preceding space which they do not add themselves.

Byte-level BPE without ``add_prefix_space`` would glue pre-split words together, so the words are joined by
single spaces, tokenized as one text, and found again by offsets.

Decides: which tokenizers need this, and which word a token belongs to.
Leaves to others: tokenization.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from .rows import Row

__all__ = ["joins_words", "rows_from_joined"]


def _parts(definition: Any) -> Iterator[dict[str, Any]]:
    if isinstance(definition, dict):
        yield definition
        for part in definition.get("pretokenizers") or ():
            yield from _parts(part)


def joins_words(pre_tokenizer: bytes | str) -> bool:
    """Return whether pre-split words must be joined by spaces, from the serialized pre-tokenizer."""
    for part in _parts(json.loads(pre_tokenizer)):
        if part.get("type") == "ByteLevel" and not part.get("add_prefix_space"):
            return True
        if part.get("type") == "Metaspace" and part.get("prepend_scheme") == "never":
            return True
    return False


def _starts(words: Sequence[str]) -> list[int]:
    return list(accumulate((len(word) + 1 for word in words), initial=0))


def rows_from_joined(
    rows: Sequence[Row], texts: Sequence[Sequence[str]], pairs: Sequence[Sequence[str]] | None
) -> list[Row]:
    """Return ``rows`` of joined words with word numbers and offsets that refer to the words.

    Args:
        rows: rows of ``" ".join(words)``.
        texts: the words of each first text.
        pairs: the words of each second text.
    """
    out = []
    for index, row in enumerate(rows):
        words = (texts[index], () if pairs is None else pairs[index])
        starts = (_starts(words[0]), _starts(words[1]))
        word_ids: list[int | None] = []
        offsets: list[tuple[int, int]] = []
        for sequence, (start, end) in zip(row.sequence_ids, row.offsets, strict=True):
            if sequence is None:
                word_ids.append(None)
                offsets.append((0, 0))
                continue
            # The last character decides: the first may be the space before the word.
            word = bisect_right(starts[sequence], max(start, end - 1)) - 1
            word = min(word, len(words[sequence]) - 1)
            base, length = starts[sequence][word], len(words[sequence][word])
            word_ids.append(word)
            offsets.append((min(max(start - base, 0), length), min(max(end - base, 0), length)))
        out.append(replace(row, word_ids=word_ids, offsets=offsets))
    return out

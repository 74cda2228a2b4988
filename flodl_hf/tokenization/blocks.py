"""The ids of many texts as one array, without an object for each text.

Creating an encoding for each text takes longer than computing its ids. The library tokenises the parts of a pre-split
text separately, exactly as it does texts. Therefore several texts are passed as parts of one, with a special token
after each that marks its end.

This module selects the token and the number of texts. Threads, special tokens around texts, and texts that contain the
token are processed elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
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
MOST = 64
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
    special.sort(key=lambda found: "pad" not in found[0].lower())
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
    size = max(1, min(MOST, max(least, len(texts) // (8 * cores))))
    return _ids_of(texts, mark, lambda blocks: run(blocks, size), size)


def _ids_of(
    texts: Sequence[str], mark: Mark, run: Callable[[list[Any]], list[tokenizers.Encoding]], size: int
) -> Flat | None:
    parts: list[str] = [mark[0]] * (2 * len(texts))
    parts[::2] = texts
    encodings = run([parts[i : i + 2 * size] for i in range(0, len(parts), 2 * size)])
    ids = np.frombuffer(b"".join(map(_packed, encodings)), np.int32)
    ends = np.flatnonzero(ids == mark[1])
    # One mark follows each text; further marks are in the texts.
    if len(ends) != len(texts):
        return None
    return np.delete(ids, ends), np.diff(ends, prepend=-1) - 1


def _packed(encoding: tokenizers.Encoding) -> bytes:
    ids = encoding.ids
    return pack(f"{len(ids)}i", *ids)

"""Where words begin and end among tokens, and where characters are spaces or punctuation.

This file defines a word for answers that must not cut words: the tokenizer's own word, without
adjacent punctuation, never ending inside a character. Labels and scores are computed by the decoders.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flodl_hf.inference.token_table import TokenTable

_UNSEEN, _SPACE, _PUNCTUATION = -1, 1, 2

# The class of every character seen so far: a table lookup is faster than sorting code points.
_CLASSES = np.full(sys.maxunicode + 1, _UNSEEN, np.int8)


@dataclass(frozen=True, slots=True, eq=False)
class TokenStream:
    """The content tokens of many rows as parallel arrays.

    Attributes:
        row: index of the row, ``(tokens,)``.
        column: place in the row, specials counted, ``(tokens,)``.
        text: index of the text, ``(tokens,)``.
        position: place in the text's token stream, ``(tokens,)``.
        offsets: character span in the text, ``(tokens, 2)``.
        word_ids: word index, -1 for none, ``(tokens,)``.
    """

    row: np.ndarray
    column: np.ndarray
    text: np.ndarray
    position: np.ndarray
    offsets: np.ndarray
    word_ids: np.ndarray

    def __len__(self) -> int:
        return len(self.row)

    def chosen(self, tokens: np.ndarray) -> TokenStream:
        """Return some of the tokens, given by number or by flag."""
        return TokenStream(*(getattr(self, name)[tokens] for name in self.__slots__))


def content_of(table: TokenTable, sequence: int = 0) -> TokenStream:
    """Return the tokens of rows that belong to text number ``sequence`` (0 or 1), in the order of the rows.

    A special token written by hand inside a text counts as content, since it covers characters of that text.
    """
    assert table.offsets is not None
    assert table.word_ids is not None
    kept = np.flatnonzero(table.sequence == sequence)
    row = np.repeat(np.arange(len(table)), table.lengths)[kept]
    counts = np.bincount(row, minlength=len(table))
    position = np.arange(len(kept)) + (table.first_token - (np.cumsum(counts) - counts))[row]
    return TokenStream(
        row, kept - table.starts[row], table.owners[row], position, table.offsets[kept], table.word_ids[kept]
    )


def merge_windows(content: TokenStream, owners: np.ndarray) -> TokenStream:
    """Return each token once, by text and place; of several windows the one counts where it has most context.

    Context is the distance in tokens to the nearest edge of the window; at equal distance the earlier window counts.
    Nothing is missing beyond the beginning and the end of a text, but they need no exception: of two windows with a
    token, the one that reaches the text's edge never has the nearer edge on that side.

    Args:
        content: the tokens of all windows, in the order of the rows.
        owners: index of the text of each row, ``(rows,)``.
    """
    if len(owners) == 0 or bool((np.diff(owners) > 0).all()):
        return content
    sizes = np.zeros(int(owners.max()) + 1, np.int64)
    np.maximum.at(sizes, content.text, content.position + 1)
    place = (np.cumsum(sizes) - sizes)[content.text] + content.position
    counts = np.bincount(content.row, minlength=len(owners))
    before = np.arange(len(content)) - (np.cumsum(counts) - counts)[content.row]
    context = np.minimum(before, counts[content.row] - 1 - before)
    # More context ranks higher, then the earlier row.
    rank = context * len(owners) + (len(owners) - 1 - content.row)
    best = np.full(int(sizes.sum()), -1)
    np.maximum.at(best, place, rank)
    tokens = np.flatnonzero(rank == best[place])
    chosen = np.full(len(best), -1)
    chosen[place[tokens]] = tokens
    return content.chosen(chosen[chosen >= 0])


@dataclass(frozen=True, slots=True, eq=False)
class Words:
    """Units of tokens that are labelled as one, in stream order.

    Attributes:
        first: stream index of each unit's first token, ``(units,)``.
        last: stream index after its last token, ``(units,)``.
        start: first character in its text, spaces not yet trimmed, ``(units,)``.
        end: character after the last one, ``(units,)``.
        of_token: unit of each token, ``(tokens,)``.
    """

    first: np.ndarray
    last: np.ndarray
    start: np.ndarray
    end: np.ndarray
    of_token: np.ndarray


def _class(character: str) -> int:
    if character.isspace():
        return _SPACE
    return _PUNCTUATION if unicodedata.category(character).startswith("P") else 0


def _classes_of(texts: Sequence[str]) -> np.ndarray:
    """Return the classes of all characters; lone surrogates count as ordinary characters."""
    codes = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), "<u4")
    classes = _CLASSES[codes]
    unseen = np.unique(codes[classes == _UNSEEN])
    if len(unseen):
        _CLASSES[unseen] = [_class(chr(code)) for code in unseen.tolist()]
        classes = _CLASSES[codes]
    return classes


def _running(flags: np.ndarray) -> np.ndarray:
    """Return how many flags are set before each place, ``(n + 1,)``; counts of less than 2**31 are half as wide."""
    found = np.zeros(len(flags) + 1, np.int32 if len(flags) < 1 << 31 else np.int64)
    np.cumsum(flags, out=found[1:])
    return found


def trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """Return the span without leading and trailing white space, and inside the text."""
    surface = text[start:end]
    start = min(start, len(text))
    lead = len(surface) - len(surface.lstrip())
    return start + lead, start + max(lead, len(surface.rstrip()))


def _base(stream: TokenStream, texts: Sequence[str]) -> np.ndarray:
    """Return how many characters precede the text of each token, all texts being concatenated, ``(tokens,)``."""
    sizes = np.fromiter(map(len, texts), np.int64, len(texts))
    return (np.cumsum(sizes) - sizes)[stream.text]


def _word_starts(stream: TokenStream) -> np.ndarray:
    """Return where a text or the tokenizer's own word begins, ``(tokens,)``."""
    starts = np.ones(len(stream), bool)
    starts[1:] = stream.text[1:] != stream.text[:-1]
    starts[1:] |= (stream.word_ids[1:] != stream.word_ids[:-1]) | (stream.word_ids[1:] < 0)
    return starts


def units_at(
    stream: TokenStream, texts: Sequence[str], tokens: np.ndarray, *, whole: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Return first character, and character after the last, of the units that `words_of` finds for a few tokens.

    Args:
        stream: all tokens.
        texts: the texts that the offsets refer to.
        tokens: stream indices, ``(n,)``.
        whole: as of `words_of`.
    """
    if not len(tokens):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    starts = _word_starts(stream) if whole else np.ones(len(stream), bool)
    first = np.append(np.flatnonzero(starts), len(stream))
    word = np.unique(np.searchsorted(first, tokens, side="right") - 1)
    begins, stops = first[word], first[word + 1]
    # Only words without shared characters: if neighbours share a character, all have to be examined. A text begins
    # apart from the one before it in any case.
    base = _base(stream, texts)
    reach = np.maximum.accumulate(stream.offsets[:, 1] + base)
    edges = np.concatenate([begins[begins > 0], stops[stops < len(stream)]])
    apart = stream.offsets[edges, 0] + base[edges] >= reach[edges - 1]
    if not bool((apart | (stream.text[edges] != stream.text[edges - 1])).all()):
        words = words_of(stream, texts, whole=whole)
        return words.start[words.of_token[tokens]], words.end[words.of_token[tokens]]
    lengths = stops - begins
    chosen = np.arange(int(lengths.sum())) + np.repeat(begins - (np.cumsum(lengths) - lengths), lengths)
    few = stream.chosen(chosen)
    heads = np.flatnonzero(np.append(True, np.diff(few.text) > 0))
    low = np.minimum.reduceat(few.offsets[:, 0], heads)
    high = np.maximum.reduceat(few.offsets[:, 1], heads)
    pieces: list[Any] = [
        texts[t][a:b] for t, a, b in zip(few.text[heads].tolist(), low.tolist(), high.tolist(), strict=True)
    ]
    text = np.repeat(np.arange(len(heads)), np.diff(np.append(heads, len(few))))
    number = np.repeat(np.arange(len(word)), lengths)
    part = replace(few, text=text, offsets=few.offsets - low[text][:, None], word_ids=number)
    words = words_of(part, pieces, whole=whole)
    place = np.searchsorted(chosen, tokens)
    unit, shift = words.of_token[place], low[text[place]]
    return words.start[unit] + shift, words.end[unit] + shift


def words_of(stream: TokenStream, texts: Sequence[str], *, whole: bool = True, split_punctuation: bool = True) -> Words:
    """Return the units in which tokens are decoded.

    A unit is a run of tokens with the same word index; a token without one stands alone. Some pre-tokenisers
    cut
    at white space only, so that a word contains its comma: with ``split_punctuation`` tokens of punctuation at
        either
    end of a word are separate units, while those inside (``O'Brien``, ``3.14``) stay. Tokens that share a
    character, as the bytes of an emoji do, are never parted.

    Args:
        stream: the tokens.
        texts: the texts that the offsets refer to.
        whole: False for one unit per token, still without parting characters.
        split_punctuation: whether outer punctuation leaves its word.
    """
    total = len(stream)
    if total == 0:
        none = np.zeros(0, np.int64)
        return Words(none, none, none, none, none)
    new_text = np.ones(total, bool)
    new_text[1:] = stream.text[1:] != stream.text[:-1]
    starts = np.ones(total, bool)
    if whole:
        starts = _word_starts(stream)
        if split_punctuation and not bool(starts.all()):
            starts |= _outer_punctuation(stream, starts, texts)
    # A text's characters all follow the previous text's, so one running maximum serves all texts.
    base = _base(stream, texts)
    reach = np.maximum.accumulate(stream.offsets[:, 1] + base)
    starts[1:] &= new_text[1:] | (stream.offsets[1:, 0] + base[1:] >= reach[:-1])
    first = np.flatnonzero(starts)
    return Words(
        first=first,
        last=np.append(first[1:], total),
        start=np.minimum.reduceat(stream.offsets[:, 0], first),
        end=np.maximum.reduceat(stream.offsets[:, 1], first),
        of_token=np.cumsum(starts) - 1,
    )


def _outer_punctuation(stream: TokenStream, starts: np.ndarray, texts: Sequence[str]) -> np.ndarray:
    """Return the positions, inside the words given by ``starts``, where outer punctuation is split off."""
    classes, base = _classes_of(texts), _base(stream, texts)
    # Running counts of characters that are neither space nor punctuation, and of punctuation characters.
    inner, marks = _running(classes == 0), _running(classes == _PUNCTUATION)
    low, high = stream.offsets[:, 0] + base, stream.offsets[:, 1] + base
    is_inner = inner[high] > inner[low]
    is_mark = ~is_inner & (marks[high] > marks[low])
    first = np.flatnonzero(starts)
    word = np.cumsum(starts) - 1
    index = np.arange(len(starts))
    none = len(starts)
    first_inner = np.minimum.reduceat(np.where(is_inner, index, none), first)[word]
    last_inner = np.maximum.reduceat(np.where(is_inner, index, -1), first)[word]
    zone = np.where(last_inner < 0, 0, np.where(index < first_inner, 1, np.where(index > last_inner, 2, 0)))
    # A token of mere space (the mark of a word's beginning) goes with the token after it.
    blank = ~is_inner & ~is_mark
    blank[-1] = False
    follows = blank[:-1] & (word[:-1] == word[1:])
    zone[:-1][follows] = zone[1:][follows]
    parted = np.zeros(len(starts), bool)
    parted[1:] = (word[1:] == word[:-1]) & (zone[1:] != zone[:-1])
    return parted

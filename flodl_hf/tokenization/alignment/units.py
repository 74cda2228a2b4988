"""Positions of the words, or the tokens, of one text in its windows.

Determines the first token of each word, the window with the most context around it, and its characters. Uses offsets
and word numbers of tokenized rows only; ``tokenization.rows`` cuts windows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from flodl.errors import DataError

Extent = tuple[int, int]
"""Characters ``(start, end)`` of a text, ``end`` exclusive."""


class TokenWindow(Protocol):
    """What alignment reads of a tokenized row; ``flodl_hf.tokenization.rows.Row`` has it."""

    @property
    def offsets(self) -> Sequence[tuple[int, int]]:
        """Return the characters of each token."""
        ...

    @property
    def word_ids(self) -> Sequence[int | None]:
        """Return the word of each token."""
        ...

    @property
    def sequence_ids(self) -> Sequence[int | None]:
        """Return the text that each token belongs to."""
        ...

    @property
    def first_token(self) -> int:
        """Return how many tokens of the cut text come before this window."""
        ...

    @property
    def last_token(self) -> int:
        """Return how many tokens of the cut text come before the end of this window."""
        ...


@dataclass(frozen=True)
class Units:
    """Where the units (words or tokens) of one text lie in its windows.

    Attributes:
        unit: for each window and token the number of its unit, None outside the text.
        first: for each window and token, whether it is the first token of its unit.
        extents: for each unit its characters, or ``(-1, -1)`` if no window holds it.
        owner: for each unit the window in which its first token has the most context, -1 if none holds it.
    """

    unit: list[list[int | None]]
    first: list[list[bool]]
    extents: list[Extent]
    owner: list[int]

    @property
    def missing(self) -> list[int]:
        """Return the units that no token speaks for: cut off, or all their characters removed."""
        return [u for u, window in enumerate(self.owner) if window < 0]


def join_words(words: Sequence[str], delimiter: str = " ") -> tuple[str, list[Extent]]:
    """Return the text that the words make, and the characters of each word in it."""
    extents: list[Extent] = []
    at = 0
    for word in words:
        extents.append((at, at + len(word)))
        at += len(word) + len(delimiter)
    return delimiter.join(words), extents


def word_units(
    windows: Sequence[TokenWindow],
    *,
    extents: Sequence[Extent] | None = None,
    num_words: int | None = None,
    sequence: int = 0,
    text: str | None = None,
) -> Units:
    """Return where words lie in the windows of one text.

    Args:
        windows: all windows of the text.
        extents: the words' characters in ascending order, where the text was tokenized whole (see
            :func:`join_words`). Without, the rows' own word numbers count.
        num_words: how many words there are; by default as many as ``extents``, or as the rows show.
        sequence: which text of a pair.
        text: the text; with it, white space at the edges of a token does not count as its own.

    Raises:
        DataError: the rows have no offsets, or name more words than there are.
    """
    if extents is None:
        keys = [
            [w if s == sequence else None for w, s in zip(win.word_ids, win.sequence_ids, strict=True)]
            for win in with_offsets(windows)
        ]
        highest = max((k for row in keys for k in row if k is not None), default=-1)
    else:
        keys = [_overlapped(win, extents, sequence, text) for win in with_offsets(windows)]
        highest = len(extents) - 1
    count = highest + 1 if num_words is None else num_words
    if highest >= count:
        raise DataError(
            f"alignment: the tokens name word {highest}, and there are {count} words; "
            "were the rows made from other words?",
            found=highest,
            expected=count,
        )
    return _units(windows, keys, sequence, count, text, None if extents is None else list(extents))


def token_units(windows: Sequence[TokenWindow], *, sequence: int = 0, text: str | None = None) -> Units:
    """Return each token of one text as a unit of its own, numbered by position in the text.

    Tokens that share their characters, as the bytes of one sign do, are one unit. Tokens without characters
    are none.

    Args:
        windows: all windows of the text.
        sequence: which text of a pair.
        text: the text; with it, white space at the edges of a token does not count as its own.

    Raises:
        DataError: the rows have no offsets.
    """
    spots = [
        [_trimmed(o, text) if s == sequence else (0, 0) for o, s in zip(win.offsets, win.sequence_ids, strict=True)]
        for win in with_offsets(windows)
    ]
    known = sorted({spot for row in spots for spot in row if spot[1] > spot[0]})
    number = {spot: k for k, spot in enumerate(known)}
    return _units(windows, [[number.get(spot) for spot in row] for row in spots], sequence, len(known), text, known)


def with_offsets(windows: Sequence[TokenWindow]) -> Sequence[TokenWindow]:
    """Return ``windows``, refusing rows that were tokenized without offsets."""
    if any(len(win.sequence_ids) != len(win.offsets) for win in windows):
        raise DataError("alignment: the rows have no offsets; ask for them when tokenizing")
    return windows


def _units(
    windows: Sequence[TokenWindow],
    keys: list[list[int | None]],
    sequence: int,
    count: int,
    text: str | None,
    known: list[Extent] | None,
) -> Units:
    start, end, speaker = [-1] * count, [-1] * count, [-1] * count
    places = _places(windows, sequence)
    for win, row, line in zip(windows, keys, places, strict=True):
        for unit, offset, place in zip(row, win.offsets, line, strict=True):
            if unit is not None:
                a, b = _trimmed(offset, text)
                start[unit] = a if start[unit] < 0 else min(start[unit], a)
                end[unit] = max(end[unit], b)
                speaker[unit] = place if speaker[unit] < 0 else min(speaker[unit], place)
    first: list[list[bool]] = []
    owner, best = [-1] * count, [-1] * count
    for number, (row, line) in enumerate(zip(keys, places, strict=True)):
        flags = [False] * len(row)
        inside = [i for i, unit in enumerate(row) if unit is not None]
        for i in inside:
            unit = row[i]
            assert unit is not None
            flags[i] = line[i] == speaker[unit]
            context = min(i - inside[0], inside[-1] - i)
            if flags[i] and context > best[unit]:
                best[unit], owner[unit] = context, number
        first.append(flags)
    found = list(zip(start, end, strict=True)) if known is None else known
    return Units(keys, first, [e if owner[u] >= 0 else (-1, -1) for u, e in enumerate(found)], owner)


def _places(windows: Sequence[TokenWindow], sequence: int) -> list[list[int]]:
    """Return for each window and token its place among the tokens of the whole text, -1 outside the text."""
    held = [[o for o, s in zip(w.offsets, w.sequence_ids, strict=True) if s == sequence] for w in windows]
    # A text that is repeated in every window, as a question is, was not cut. Counts tell it from a text of
    # which every window looks alike.
    cut = any(part != held[0] for part in held) or all(
        len(part) == win.last_token - win.first_token for part, win in zip(held, windows, strict=True)
    )
    places = []
    for win in windows:
        at = win.first_token if cut else 0
        line = []
        for owner in win.sequence_ids:
            line.append(at if owner == sequence else -1)
            at += owner == sequence
        places.append(line)
    return places


def _overlapped(window: TokenWindow, extents: Sequence[Extent], sequence: int, text: str | None) -> list[int | None]:
    starts = [a for a, _ in extents]
    found: list[int | None] = []
    for offset, owner in zip(window.offsets, window.sequence_ids, strict=True):
        a, b = _trimmed(offset, text)
        at = max(bisect_right(starts, a) - 1, 0)
        # a token that begins in the gap before a word belongs to that word
        while at < len(extents) and extents[at][1] <= a:
            at += 1
        hit = owner == sequence and b > a and at < len(extents) and extents[at][0] < b
        found.append(at if hit else None)
    return found


def _trimmed(offset: tuple[int, int], text: str | None) -> Extent:
    start, end = offset
    if text is not None:
        while start < end and text[start].isspace():
            start += 1
        while end > start and text[end - 1].isspace():
            end -= 1
    return start, end

"""Overlapping windows put together again: every token of a text once, seen where it has most context.

This file decides which window is used for a token that occurs in several, and how pre-split words are
joined into one text. Texts are cut into windows by the tokenizers package; merged
tokens are read by ``entities.py`` and ``spans.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flodl_hf.errors import PredictError
from flodl_hf.inference.decode.rows import Content, Rows, content_of


@dataclass(frozen=True, slots=True, eq=False)
class TokenStream:
    """All tokens of many texts, each once, ordered by text and place.

    Attributes:
        row: the row used for the token, ``(tokens,)``.
        column: its place in that row, ``(tokens,)``.
        text: index of the text, ``(tokens,)``, never falling.
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


@dataclass(frozen=True, slots=True)
class JoinedWords:
    """Pre-split words as one text, with the character span of each word in it."""

    text: str
    spans: tuple[tuple[int, int], ...]


def join_words(words: Sequence[str], delimiter: str = " ") -> JoinedWords:
    """Return the words joined by ``delimiter`` and the position of each in the joined text."""
    spans, place = [], 0
    for word in words:
        spans.append((place, place + len(word)))
        place += len(word) + len(delimiter)
    return JoinedWords(delimiter.join(words), tuple(spans))


def _context(content: Content) -> np.ndarray:
    """Return each token's distance, in tokens, to the nearer edge of its window.

    Nothing is missing beyond the beginning and the end of a text, but they need no exception: of two windows
    with a token, the one that reaches the text's edge never has the nearer edge on that side.
    """
    counts = content.counts[content.row]
    rank = np.arange(len(content.row)) - np.repeat(np.cumsum(content.counts) - content.counts, content.counts)
    return np.minimum(rank, counts - 1 - rank)


def stream_of(content: Content, text: np.ndarray) -> TokenStream:
    """Return the tokens unchanged, each of which occurs in one window only.

    Args:
        content: the tokens, ordered by text and place.
        text: the text of each, ``(tokens,)``.
    """
    return TokenStream(content.row, content.column, text, content.position, content.offsets, content.word_ids)


def merge_windows(rows: Rows, owners: np.ndarray, *, sequence: int = 0, content: Content | None = None) -> TokenStream:
    """Return the tokens of each text once; of several windows the one counts in which the token has most
    context.

    Context is the distance in tokens to the nearest edge where the window cuts the text; at equal distance
    the earlier window counts.

    Args:
        rows: the windows of all texts.
        owners: index of the text of each row, ``(rows,)``.
        sequence: which of a pair's two texts was cut into windows.
        content: ``content_of(rows, sequence)`` where the caller has it already.

    Raises:
        PredictError: the windows of a text leave a gap between them.
    """
    found = content_of(rows, sequence) if content is None else content
    text = owners[found.row]
    if len(owners) == 0 or bool((np.diff(owners) > 0).all()):
        chosen = np.arange(len(text))
    else:
        sizes = np.zeros(int(owners.max()) + 1, np.int64)
        np.maximum.at(sizes, text, found.position + 1)
        place = (np.cumsum(sizes) - sizes)[text] + found.position
        # More context ranks higher, then the earlier row.
        rank = _context(found) * len(owners) + (len(owners) - 1 - found.row)
        best = np.full(int(sizes.sum()), -1)
        np.maximum.at(best, place, rank)
        tokens = np.flatnonzero(rank == best[place])
        chosen = np.full(len(best), -1)
        chosen[place[tokens]] = tokens
        chosen = chosen[chosen >= 0]
    stream = TokenStream(
        row=found.row[chosen],
        column=found.column[chosen],
        text=text[chosen],
        position=found.position[chosen],
        offsets=found.offsets[chosen],
        word_ids=found.word_ids[chosen],
    )
    gap = (stream.text[1:] == stream.text[:-1]) & (stream.position[1:] != stream.position[:-1] + 1)
    if bool(gap.any()):
        at = int(np.flatnonzero(gap)[0])
        raise PredictError(
            f"windows of text {stream.text[at]}: tokens {stream.position[at] + 1} to "
            f"{stream.position[at + 1] - 1} are in no window; "
            "expected windows that touch or overlap; pass all windows of each text",
            text=int(stream.text[at]),
            missing=(int(stream.position[at]) + 1, int(stream.position[at + 1])),
        )
    return stream

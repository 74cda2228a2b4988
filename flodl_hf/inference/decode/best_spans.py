"""The best span of each context that fits in one window, for all contexts together.

This file decides how the largest sum of a start and an end logit is found among all spans, and which of equal ones
counts; no sum is kept but the largest. Several answers of a context, and contexts of several windows, are left to
``spans.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Number of tokens per block, so that running sums stay in the cache of a core.
_BLOCK = 1 << 15


@dataclass(frozen=True, slots=True, eq=False)
class BestSpans:
    """Spans with the largest sum of their row: one per row, and ties.

    Attributes:
        row: the row, never falling, ``(spans,)``.
        first: the span's first token, ``(spans,)``.
        last: its last token, ``(spans,)``.
        value: the sum of its logits, float32, ``(spans,)``.
    """

    row: np.ndarray
    first: np.ndarray
    last: np.ndarray
    value: np.ndarray


def best_spans(start: np.ndarray, end: np.ndarray, counts: np.ndarray, longest: int) -> BestSpans:
    """Return the best spans ``first <= last < first + longest`` of each row, by the sum of two logits.

    Args:
        start: finite logits, float32, rows end to end, ``(tokens,)``.
        end: finite logits of ends, in the form of ``start``.
        counts: tokens of each row, each at least 1, ``(rows,)``.
        longest: most tokens of a span.
    """
    ends = np.cumsum(counts)
    parts: list[BestSpans] = []
    row = 0
    while row < len(counts):
        begin = int(ends[row] - counts[row])
        stop = max(row + 1, int(np.searchsorted(ends, begin + _BLOCK, side="right")))
        tokens = slice(begin, int(ends[stop - 1]))
        found = _block(start[tokens], end[tokens], counts[row:stop], longest)
        parts.append(BestSpans(found.row + row, found.first + begin, found.last + begin, found.value))
        row = stop
    if len(parts) == 1:
        return parts[0]
    none = np.zeros(0, np.int64)
    columns = [[part.row, part.first, part.last, part.value] for part in parts] or [[none, none, none, none]]
    return BestSpans(*(np.concatenate(column) for column in zip(*columns, strict=True)))


def _block(start: np.ndarray, end: np.ndarray, counts: np.ndarray, longest: int) -> BestSpans:
    rows = len(counts)
    longest = min(longest, int(counts.max()))
    # A gap behind each row, so that no span reaches into the next one.
    gap = longest - 1
    row_of = np.repeat(np.arange(rows), counts)
    place = np.arange(len(start)) + row_of * gap
    size = len(start) + rows * gap
    first = np.full(size, -np.inf, np.float32)
    last = np.full(size, -np.inf, np.float32)
    first[place], last[place] = start, end
    best = first + last
    sums = np.empty(size, np.float32)
    for apart in range(1, longest):
        part = np.add(first[: size - apart], last[apart:], out=sums[: size - apart])
        np.maximum(best[: size - apart], part, out=best[: size - apart])
    best = best[place]
    most = np.maximum.reduceat(best, np.cumsum(counts) - counts)
    tokens = np.flatnonzero(best == most[row_of])
    spans = np.minimum(place[tokens][:, None] + np.arange(longest), size - 1)
    value = most[row_of[tokens]]
    equal = first[place[tokens]][:, None] + last[spans] == value[:, None]
    # A row that ends a block has its last place looked at more than once.
    equal &= place[tokens][:, None] + np.arange(longest) < size
    which, apart = np.nonzero(equal)
    return BestSpans(row_of[tokens[which]], tokens[which], tokens[which] + apart, value[which])

"""One tokenized window as a record, and where a long token sequence is cut into windows.

Decides: window boundaries, overlap, which tokens repeat in each window, what "truncated" means.
Leaves to others: turning text into tokens, padding, tensors, and how answers from windows are merged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from flodl_hf.errors import TextTooLongError, TokenizerError

Cut = Literal["first", "second", "longer", "longest"]
Overflow = Literal["windows", "truncate", "error"]

_LEAST_SPACE = 4  # windows of a pair contain at least this fraction of the space, 1/4, of the text that is cut


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of tokens ready for a model, special tokens included, without padding.

    Attributes:
        ids: token ids.
        type_ids: segment of each token (0 or 1).
        offsets: for each token ``(start, end)`` in characters of its text, ``(0, 0)`` for
            special tokens. For pre-split words, characters of the word. Empty if offsets were not requested.
        word_ids: for each token the number of its word within its sequence, ``None`` for special tokens.
            Empty if offsets were not requested.
        sequence_ids: 0 for the first text, 1 for the second, ``None`` for special tokens.
        special: whether the token was added by the template around the texts.
        tokens: the text of each token, which for an unknown piece is its own. Empty if offsets were not requested.
        window: position of this row among the windows of its text.
        first_token: first token of the cut sequence in this row, counted without special tokens.
        last_token: one past the last such token.
        truncated: whether no window contains some tokens of the text.
    """

    ids: Sequence[int]
    type_ids: Sequence[int]
    offsets: Sequence[tuple[int, int]]
    word_ids: Sequence[int | None]
    sequence_ids: Sequence[int | None]
    special: Sequence[bool]
    tokens: Sequence[str] = ()
    window: int = 0
    first_token: int = 0
    last_token: int = 0
    truncated: bool = False

    def __len__(self) -> int:
        return len(self.ids)


def plan_windows(
    length: int,
    capacity: int,
    stride: int,
    words: np.ndarray | Sequence[int] | None = None,
    *,
    side: Literal["left", "right"] = "right",
    where: str = "text",
) -> list[tuple[int, int]]:
    """Return half-open token ranges of at most ``capacity`` that cover ``range(length)`` and overlap.

    With ``words`` neighbours overlap by at least ``stride`` tokens, and a range starts and ends between
    words if a word border is near; a stride above three quarters of the capacity is lowered to that.
    Without, ranges are ``capacity`` long and ``capacity - stride`` apart, as the tokenizers library cuts
    them.

    Args:
        length: number of tokens.
        capacity: most tokens in one window; positive.
        stride: tokens that neighbouring windows share.
        words: word of each token, -1 for none; ``None`` to cut anywhere.
        side: "left" plans from the end of the text; ignored with ``words``.
        where: name of the text in errors.

    Raises:
        TokenizerError: without ``words``, the stride is not below the capacity.
    """
    if words is None and stride >= capacity:
        raise TokenizerError(
            f"{where}: found a stride of {stride} and windows of {capacity} tokens of this text; "
            "the stride must be smaller: lower it, or raise max_tokens",
            where=where,
            found=stride,
            expected=capacity,
        )
    if length <= capacity:
        return [(0, length)]
    if words is None:
        starts = range(0, max(1, length - stride), capacity - stride)
        ranges = [(start, min(start + capacity, length)) for start in starts]
        return ranges if side == "right" else [(length - stop, length - start) for start, stop in ranges]

    word = np.asarray(words)
    border = np.ones(length, bool)
    border[1:] = (word[1:] != word[:-1]) | (word[1:] < 0)
    # The last border at or before each token.
    borders = np.maximum.accumulate(np.where(border, np.arange(length), 0))
    stride = min(stride, capacity * 3 // 4)
    # Both searches are shorter than half the advance of a window, so the number of windows is bounded.
    advance = capacity - stride
    search = min(max(stride, capacity // 8), advance // 2)
    windows = []
    start = covered = 0
    while start + capacity < length:
        hard = start + capacity
        last = int(borders[hard])
        end = last if last >= max(hard - search, covered + 1) else hard
        windows.append((start, end))
        covered = end
        wanted = end - stride
        last = int(borders[wanted])
        start = last if last >= max(start + 1, wanted - advance // 4) else wanted
    windows.append((start, length))
    return windows


def _span(row: Row, sequence: int, where: str) -> tuple[int, int]:
    """Return the half-open token range of one text within ``row``."""
    count = row.sequence_ids.count(sequence)
    if not count:
        return (0, 0)
    start = row.sequence_ids.index(sequence)
    if any(found != sequence for found in row.sequence_ids[start : start + count]):
        raise divided_text(where)
    return start, start + count


def divided_text(where: str) -> TokenizerError:
    """Return the error about a text that contains special tokens of the template."""
    return TokenizerError(
        f"{where}: the tokenizer's template puts special tokens inside a text, which cannot be cut into windows; "
        "pass a shorter text, or raise max_tokens",
        where=where,
    )


def _slice(row: Row, keep: list[range], window: int, first: int, last: int, truncated: bool) -> Row:
    def pick(name: str) -> list[Any]:
        values = getattr(row, name)
        return [value for part in keep for value in values[part.start : part.stop]]

    names = ("ids", "type_ids", "offsets", "word_ids", "sequence_ids", "special", "tokens")
    parts = {name: pick(name) for name in names}
    return Row(**parts, window=window, first_token=first, last_token=last, truncated=truncated)


def too_long(where: str, total: int, max_tokens: int, uncut: int | None = -1) -> TextTooLongError:
    """Return the error about a text that does not fit.

    Args:
        where: name of the text.
        total: its tokens, specials included.
        max_tokens: how many fit.
        uncut: tokens that are not to be cut; None if the specials alone do not fit; -1 if truncation is off.
    """
    why, remedy = (
        f"of which {uncut} are not to be cut",
        "raise max_tokens, shorten the other text, or cut the other one",
    )
    if uncut is None:
        why, remedy = "and the special tokens alone are more", "raise max_tokens"
    elif uncut < 0:
        why, remedy = (
            "and truncation is off",
            "shorten it, or pass another long_texts (server: truncate or windows)",
        )
    return TextTooLongError(
        f"{where}: {total} tokens with special tokens, {why}; at most {max_tokens} fit; {remedy}",
        where=where,
        found=total,
        expected=max_tokens,
    )


def longest_first(sizes: np.ndarray, space: np.ndarray | int) -> np.ndarray:
    """Return how many tokens of two texts remain if the longer one loses tokens first, ``(2, rows)``.

    As in the tokenizers library: the longer text loses tokens until both are equal, then both lose tokens.

    Args:
        sizes: tokens of each text, ``(2, rows)``.
        space: tokens that fit, ``(rows,)``.
    """
    short, long = np.sort(sizes, 0)
    long = np.where(short > space, short, np.maximum(short, space - short))
    equal = short + long > space
    short, long = np.where(equal, space // 2, short), np.where(equal, space // 2 + space % 2, long)
    return np.minimum(np.where(sizes[0] > sizes[1], [long, short], [short, long]), sizes)


@dataclass(frozen=True, slots=True, eq=False)
class Cuts:
    """Windows of rows that are too long.

    Attributes:
        row: index of the row, never falling, ``(windows,)``.
        window: number of the window among those of its row, ``(windows,)``.
        text: which text is cut, 0 or 1, ``(windows,)``.
        first: first token of each text, ``(2, windows)``.
        last: one past the last token of each text, ``(2, windows)``.
        truncated: whether no window of a row contains some of its tokens, ``(rows,)``.
    """

    row: np.ndarray
    window: np.ndarray
    text: np.ndarray
    first: np.ndarray
    last: np.ndarray
    truncated: np.ndarray


def plan_cuts(
    lengths: np.ndarray,
    sizes: np.ndarray,
    words: Callable[[int, int], np.ndarray | None],
    limit: int,
    *,
    cut: Cut,
    overflow: Overflow,
    stride: int,
    side: Literal["left", "right"],
    names: Sequence[str],
) -> Cuts:
    """Return the windows of rows that are too long, or how they are truncated.

    Args:
        lengths: tokens of each row, specials included, ``(rows,)``.
        sizes: tokens of both texts of each row, ``(2, rows)``.
        words: word of each token of a text, -1 for none, by row and text; None to cut anywhere.
        limit: most tokens of a window, specials included.
        cut: which text is cut; the other one is repeated in every window. ``"longer"`` cuts the longer of the two into
            windows; if the shorter one leaves less than a quarter of the tokens, both are truncated as by
            ``"longest"``, which only truncates: the longer text loses tokens until both are equal.
        overflow: make windows, drop what does not fit, or raise.
        stride: tokens of the cut text that neighbouring windows share.
        side: which end is dropped when truncating, and comes last among windows without words.
        names: names of the rows in errors.

    Raises:
        TokenizerError: a text that is not cut leaves no tokens, or ``overflow`` is "error".
    """
    if overflow == "error":
        raise too_long(names[0], int(lengths[0]), limit)
    space, row = limit - (lengths - sizes.sum(0)), np.arange(len(lengths))
    both = np.full(len(row), cut in ("longest", "longer"))
    text = np.full(len(row), int(cut == "second"))
    if cut == "longer" and overflow == "windows":
        both = (space - sizes.min(0)) * _LEAST_SPACE < space
        text = np.where(both | (sizes[0] > sizes[1]), 0, 1)
    capacity = np.where(both, space, space - sizes[1 - text, row])
    if (faults := np.flatnonzero(capacity < np.where(both, 0, 1))).size:
        at = int(faults[0])
        raise too_long(names[at], int(lengths[at]), limit, None if both[at] else int(limit - capacity[at]))
    windowed = ~both & (overflow == "windows")
    kept = np.where(both, longest_first(sizes, space), sizes)
    one = ~both & ~windowed
    kept[text[one], row[one]] = capacity[one]
    first = sizes - kept if side == "left" else np.zeros_like(kept)
    last, times, ranges = first + kept, np.ones_like(row), []
    for at in np.flatnonzero(windowed).tolist():
        size = int(sizes[text[at], at])
        found = words(at, int(text[at]))
        ranges.append(plan_windows(size, int(capacity[at]), stride, found, side=side, where=names[at]))
        times[at] = len(ranges[-1])
    row = np.repeat(row, times)
    first, last, text = first[:, row], last[:, row], text[row]
    planned = np.flatnonzero(windowed[row])
    if len(planned):
        cuts = text[planned], planned
        first[cuts], last[cuts] = np.array([pair for pairs in ranges for pair in pairs], np.int64).T
    window = np.arange(len(row)) - np.repeat(np.cumsum(times) - times, times)
    return Cuts(row, window, text, first, last, ~windowed)


def cut_each(
    rows: Sequence[Row],
    max_tokens: int | None,
    *,
    stride: int = 0,
    cut: Cut = "first",
    overflow: Overflow = "windows",
    snap: bool = True,
    side: Literal["left", "right"] = "right",
) -> list[list[Row]]:
    """Return the windows of each row, each with its special tokens and at most ``max_tokens`` long.

    Args:
        rows: whole texts, or pairs.
        max_tokens: most tokens in a window, special tokens counted; ``None`` leaves all rows whole.
        stride: tokens of the cut text that neighbouring windows share.
        cut: see `plan_cuts`.
        overflow: make windows, drop what does not fit, or raise.
        snap: start and end windows between words where possible.
        side: which end is dropped when truncating, and comes last among windows that do not snap.

    Raises:
        TokenizerError: see `plan_cuts`.
    """
    if cut == "longest" and overflow == "windows":
        raise TokenizerError("cut='longest' only truncates; use cut='first' or 'second' for windows")
    found = [[replace(row, last_token=row.sequence_ids.count(int(cut == "second")))] for row in rows]
    long = [at for at, row in enumerate(rows) if max_tokens is not None and len(row.ids) > max_tokens]
    if max_tokens is None or not long:
        return found
    names = [f"text {at}" for at in long]
    spans = [[_span(rows[at], text, name) for text in (0, 1)] for at, name in zip(long, names, strict=True)]

    def words(at: int, text: int) -> np.ndarray | None:
        row, (start, stop) = rows[long[at]], spans[at][text]
        if not (snap and row.word_ids):
            return None
        return np.array([-1 if word is None else word for word in row.word_ids[start:stop]])

    cuts = plan_cuts(
        np.array([len(rows[at]) for at in long]), np.array([[b - a for a, b in pair] for pair in spans]).T, words,
        max_tokens, cut=cut, overflow=overflow, stride=stride, side=side, names=names,
    )  # fmt: skip
    for at in long:
        found[at] = []
    for at, text, first, last in zip(
        cuts.row.tolist(), cuts.text.tolist(), cuts.first.T.tolist(), cuts.last.T.tolist(), strict=True
    ):
        row, parts, begin = rows[long[at]], [], 0
        for (start, stop), low, high in sorted(zip(spans[at], first, last, strict=True)):
            if stop > start:
                parts += [range(begin, start), range(start + low, start + high)]
                begin = stop
        parts.append(range(begin, len(row.ids)))
        group = found[long[at]]
        group.append(_slice(row, parts, len(group), first[text], last[text], bool(cuts.truncated[at])))
    return found


def with_space(part: Row, whole: Row) -> Row:
    """Return a part of a row in which the offsets of the first token include the space before it, as in the tokenizers
    library.

    Args:
        part: of `cut_each`.
        whole: the row that was cut.
    """
    offsets = list(part.offsets)
    for sequence in (0, 1):
        if sequence not in part.sequence_ids:
            continue
        first, start = part.sequence_ids.index(sequence), whole.sequence_ids.index(sequence)
        if offsets[first] != whole.offsets[start] and part.tokens[first][:1] in ("\u0120", " "):
            begin, end = offsets[first]
            offsets[first] = (begin - 1, max(begin - 1, end - (begin == end)))
    return replace(part, offsets=offsets)

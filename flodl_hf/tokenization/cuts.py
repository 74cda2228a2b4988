"""One tokenized window as a record, and where a long token sequence is cut into windows.

Decides: window boundaries, overlap, which tokens repeat in each window, what "truncated" means.
Leaves to others: turning text into tokens, padding, tensors, and how answers from windows are merged.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from flodl_hf.errors import TextTooLongError, TokenizerError

Cut = Literal["first", "second", "longer", "longest"]
Overflow = Literal["windows", "truncate", "error"]

_LEAST_SPACE = 4  # windows of a pair contain at least a quarter of the space of the text that is cut


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
    sizes: np.ndarray,
    capacity: np.ndarray,
    stride: int,
    words: np.ndarray | None = None,
    *,
    side: Literal["left", "right"] = "right",
    names: Sequence[str] = (),
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return windows that cover texts and overlap: number of the text, first token, and one past the last token.

    With ``words`` neighbours overlap by at least ``stride`` tokens, and a window starts and ends between
    words if a word border is near; a stride above three quarters of the capacity is lowered to that.
    Without, windows are ``capacity`` long and ``capacity - stride`` apart, as the tokenizers library cuts
    them.

    Args:
        sizes: tokens of each text, ``(texts,)``.
        capacity: most tokens in a window of each text; positive, ``(texts,)``.
        stride: tokens that neighbouring windows share.
        words: word of each token, -1 for none, texts end to end; None to cut anywhere.
        side: "left" plans from the end of the text; ignored with ``words``.
        names: names of the texts in errors.

    Raises:
        TokenizerError: without ``words``, the stride is not below the capacity.
    """
    if words is None:
        if (faults := np.flatnonzero(stride >= capacity)).size:
            at = int(faults[0])
            raise TokenizerError(
                f"{names[at]}: found a stride of {stride} and windows of {capacity[at]} tokens of this text; "
                "the stride must be smaller: lower it, or raise max_tokens",
                where=names[at],
                found=stride,
                expected=int(capacity[at]),
            )
        times = np.maximum(1, -(-(sizes - stride) // (capacity - stride)))
        text = np.repeat(np.arange(len(sizes)), times)
        start = _counted(times) * (capacity - stride)[text]
        stop = np.minimum(start + capacity[text], sizes[text])
        return (text, start, stop) if side == "right" else (text, sizes[text] - stop, sizes[text] - start)
    begins = np.cumsum(sizes) - sizes
    border = np.append(True, (words[1:] != words[:-1]) | (words[1:] < 0))[: len(words)]
    border[begins[sizes > 0]] = True
    # The last border at or before each token.
    borders = np.maximum.accumulate(np.where(border, np.arange(len(words)), 0))
    strides = np.minimum(stride, capacity * 3 // 4)
    # Both searches are shorter than half the advance of a window, so the number of windows is bounded.
    advance = capacity - strides
    search = np.minimum(np.maximum(strides, capacity // 8), advance // 2)
    text = np.arange(len(sizes))
    start, covered = np.zeros_like(sizes), np.zeros_like(sizes)
    parts = [(text[:0], start[:0], start[:0])]
    while len(text):
        hard = start + capacity[text]
        ends = hard >= sizes[text]
        parts.append((text[ends], start[ends], sizes[text[ends]]))
        text, start, covered, hard = text[~ends], start[~ends], covered[~ends], hard[~ends]
        last = borders[begins[text] + hard] - begins[text]
        covered = np.where(last >= np.maximum(hard - search[text], covered + 1), last, hard)
        parts.append((text, start, covered))
        wanted = covered - strides[text]
        last = borders[begins[text] + wanted] - begins[text]
        start = np.where(last >= np.maximum(start + 1, wanted - advance[text] // 4), last, wanted)
    texts, starts, stops = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(texts, kind="stable")
    return texts[order], starts[order], stops[order]


def _counted(times: np.ndarray) -> np.ndarray:
    """Return the numbers from 0 below each of ``times``, end to end."""
    return np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times)


def _span(row: Row, sequence: int, name: str) -> tuple[int, int]:
    """Return the half-open token range of one text within ``row``."""
    count = row.sequence_ids.count(sequence)
    if not count:
        return (0, 0)
    start = row.sequence_ids.index(sequence)
    if any(found != sequence for found in row.sequence_ids[start : start + count]):
        raise divided_text(name)
    return start, start + count


def divided_text(name: str) -> TokenizerError:
    """Return the error about a text that contains special tokens of the template."""
    return TokenizerError(
        f"{name}: the tokenizer's template puts special tokens inside a text, which cannot be cut into windows; "
        "pass a shorter text, or raise max_tokens",
        where=name,
    )


def too_long(name: str, total: int, max_tokens: int, uncut: int | None = -1) -> TextTooLongError:
    """Return the error about a text that does not fit.

    Args:
        name: name of the text.
        total: its tokens, specials included.
        max_tokens: how many fit.
        uncut: tokens that are not to be cut; None if the specials alone do not fit; -1 if truncation is off.
    """
    why, remedy = "and truncation is off", "shorten it, or pass another long_texts (server: truncate or windows)"
    if uncut is None:
        why, remedy = "and the special tokens alone are more", "raise max_tokens"
    elif uncut >= 0:
        why = f"of which {uncut} are not to be cut"
        remedy = "raise max_tokens, shorten the other text, or cut the other one"
    return TextTooLongError(
        f"{name}: {total} tokens with special tokens, {why}; at most {max_tokens} fit; {remedy}",
        where=name,
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
    words: Callable[[np.ndarray, np.ndarray], np.ndarray | None],
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
        words: word of each token of some texts end to end, -1 for none, by rows and texts; None to cut anywhere.
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
    last, times = first + kept, np.ones_like(row)
    chosen = np.flatnonzero(windowed)
    cuts = text[chosen], chosen
    owner, low, high = plan_windows(
        sizes[cuts],
        capacity[chosen],
        stride,
        words(chosen, text[chosen]),
        side=side,
        names=[names[i] for i in chosen.tolist()],
    )
    times[chosen] = np.bincount(owner, minlength=len(chosen))
    row = np.repeat(row, times)
    first, last, text = first[:, row], last[:, row], text[row]
    planned = np.flatnonzero(windowed[row])
    first[text[planned], planned], last[text[planned], planned] = low, high
    return Cuts(row, _counted(times), text, first, last, ~windowed)


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

    def words(chosen: np.ndarray, texts: np.ndarray) -> np.ndarray | None:
        if not snap or not all(rows[at].word_ids for at in long):
            return None
        places = zip(chosen.tolist(), texts.tolist(), strict=True)
        numbers = [rows[long[at]].word_ids[slice(*spans[at][text])] for at, text in places]
        return np.array([-1 if word is None else word for words in numbers for word in words], np.int64)

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
        made: dict[str, Any] = {
            name: [value for part in parts for value in getattr(row, name)[part.start : part.stop]]
            for name in ("ids", "type_ids", "offsets", "word_ids", "sequence_ids", "special", "tokens")
        }
        group.append(
            Row(
                **made, window=len(group), first_token=first[text], last_token=last[text],
                truncated=bool(cuts.truncated[at]),
            )
        )  # fmt: skip
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


def rows_from_joined(
    rows: Sequence[Row], texts: Sequence[Sequence[str]], pairs: Sequence[Sequence[str]] | None
) -> list[Row]:
    """Return ``rows`` of joined words with word numbers and offsets that refer to the words.

    Args:
        rows: rows of texts that are the words, without empty ones, joined by spaces.
        texts: the words of each first text.
        pairs: the words of each second text.
    """
    out = []
    for index, row in enumerate(rows):
        words = (texts[index], () if pairs is None else pairs[index])
        # The number of each word that is not empty, and where it starts in the joined text.
        numbers = [[number for number, word in enumerate(text) if word] for text in words]
        starts = [
            list(accumulate((len(text[number]) + 1 for number in found), initial=0))[:-1]
            for text, found in zip(words, numbers, strict=True)
        ]
        word_ids: list[int | None] = []
        offsets: list[tuple[int, int]] = []
        for sequence, (start, end) in zip(row.sequence_ids, row.offsets, strict=True):
            if sequence is None:
                word_ids.append(None)
                offsets.append((0, 0))
                continue
            # The last character decides: the first may be the space before the word.
            at = bisect_right(starts[sequence], max(start, end - 1)) - 1
            base, number = starts[sequence][at], numbers[sequence][at]
            length = len(words[sequence][number])
            word_ids.append(number)
            offsets.append((min(max(start - base, 0), length), min(max(end - base, 0), length)))
        out.append(replace(row, word_ids=word_ids, offsets=offsets))
    return out

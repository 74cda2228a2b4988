"""Answers to questions from start and end logits.

This file decides how likely each span of a context is, over all of its windows together, and which spans are
answers. The tokenizers package creates model inputs; the removed pipeline's rules are in
``compat/question_answering.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from flodl_hf.errors import PredictError
from flodl_hf.inference.decode.rows import (
    Placed,
    Record,
    TokenStream,
    TokenTable,
    build_records,
    content_of,
    merge_windows,
)
from flodl_hf.inference.decode.words import Words, trimmed, units_at, words_of

Distinct: TypeAlias = Literal["span", "place", "text"]

# Upper bound on the elements of one band of span sums: 64 MB of float32.
_BAND_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True)
class Answer(Record):
    """A span of a context, or the statement that the context contains no answer.

    Attributes:
        text: exactly ``context[start:end]``; empty for no answer.
        score: probability that the answer begins and ends here, from 0 to 1.
        start: first character, 0 for no answer.
        end: character after the last one, 0 for no answer.
        no_answer: True if the context contains no answer.
    """

    text: str
    score: float
    start: int
    end: int
    no_answer: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Windows:
    """Context logits of all windows at one width, ``(windows, width)``, ``-inf`` where there is no token."""

    start: Tensor
    end: Tensor
    first: np.ndarray  # position of column 0 in the context's token stream, (windows,)
    owner: np.ndarray
    log_start: np.ndarray  # log of the normaliser of each context, (contexts,)
    log_end: np.ndarray
    null: np.ndarray  # start plus end logit of the null answer, (contexts,)


def decode_answers_batch(
    logits: Placed,
    table: TokenTable,
    contexts: Sequence[str],
    *,
    top_k: int = 1,
    max_answer_length: int = 30,
    no_answer: bool = False,
    null_margin: float = 0.0,
    whole_words: bool = True,
    distinct: Distinct = "place",
) -> list[list[Answer]]:
    """Return for each question and context up to ``top_k`` answers, best first.

    **Score.** Start and end are each normalised once over a whole context: all its tokens, however many
    windows it took, and the null position. A token in several windows counts once, with its largest
    logit, so that overlap does not dilute the score. A span is within one window; its score is the product
    of the two probabilities, and the scores of disjoint answers of one context can be compared and sum to at
    most 1.

    **No answer.** Each window scores "nothing here" at its first special token. A context has no answer only
    if no window finds one, so the window with the smallest sum of null logits speaks for it. The null answer
    is always part of the normalisation; it is returned only with ``no_answer=True``, and then comes
    before an answer if ``log(null score) - log(answer score) > null_margin``. Raise the margin to answer more
    often.

    Args:
        logits: of all tokens, as starts and as ends, ``(tokens, 2)``.
        table: the windows: question and context.
        contexts: the contexts that the offsets refer to.
        top_k: most answers per context.
        max_answer_length: most tokens of an answer, counted before it is widened to whole words.
        no_answer: whether the null answer may be returned.
        null_margin: see above; 0 compares the probabilities as they are.
        whole_words: widen answers that begin or end inside a word.
        distinct: ``"place"`` drops answers that overlap a better one; ``"text"`` also answers with the same
            words at another place (case ignored); ``"span"`` only the same characters twice.

    Raises:
        PredictError: an option makes no sense, or logits are not finite.
    """
    _check_options(top_k, max_answer_length, distinct)
    owner, content = table.owners, content_of(table, 1)
    values = logits.values.float().numpy()
    starts_ends = np.ascontiguousarray(values[logits.starts[content.row] + content.column].T)
    nulls = values[logits.starts + table.nulls].T.astype(np.float64)
    if not bool(np.isfinite(starts_ends).all()):
        raise PredictError(
            "answers: the logits are not finite; expected numbers; half precision may have overflowed, "
            "so predict in float32 or bfloat16"
        )
    found: list[list[Answer]] = [[] for _ in contexts]
    left = np.ones(len(table), bool)
    if top_k == 1:
        left = _decode_alone(
            found, starts_ends, nulls, content, owner, contexts, max_answer_length, no_answer, null_margin, whole_words
        )
        if not bool(left.any()):
            return found
    if not bool(left.all()):
        starts_ends, nulls, content, owner = _of_rows(left, starts_ends, nulls, content, owner)
    stream = merge_windows(content, owner)
    windows = _windows_of(starts_ends, nulls, content, owner, len(contexts))
    # Characters of contexts that are answered already are not looked at.
    read = set(owner.tolist())
    words = words_of(stream, [text if i in read else "" for i, text in enumerate(contexts)], whole=whole_words)
    pending = np.unique(content.text)
    # An answer may be dropped as a duplicate, so more spans are read than requested, and more again if
    # too few.
    candidates = 4 * top_k + 8
    while len(pending):
        chosen = np.flatnonzero(np.isin(windows.owner, pending))
        value, first, last, floor = _best_spans(windows, chosen, max_answer_length, candidates, len(contexts))
        order = np.argsort(windows.owner[chosen], kind="stable")
        edges = np.searchsorted(windows.owner[chosen][order], np.append(pending, len(contexts)))
        short: list[int] = []
        for place, text in enumerate(pending.tolist()):
            here = order[edges[place] : edges[place + 1]]
            real = np.isfinite(value[here])
            spans = _span_arrays(stream, words, text, value[here][real], first[here][real], last[here][real])
            lost = float(floor[text])
            answers, complete = _distinct(spans, windows, text, str(contexts[text]), top_k, distinct, lost)
            if complete:
                found[text] = answers
            else:
                short.append(text)
        pending = np.array(short, np.int64)
        candidates *= 8
    if no_answer:
        for text in np.unique(owner).tolist():
            log_null = float(windows.null[text] - windows.log_start[text] - windows.log_end[text])
            found[text] = _with_null(found[text], log_null, top_k, null_margin)
    return found


def _decode_alone(
    found: list[list[Answer]],
    logits: np.ndarray,
    nulls: np.ndarray,
    content: TokenStream,
    owner: np.ndarray,
    contexts: Sequence[str],
    longest: int,
    no_answer: bool,
    null_margin: float,
    whole_words: bool,
) -> np.ndarray:
    """Fill in the best answer of each context that has one window, and return which rows are left, ``(rows,)``.

    The result contains the windows of contexts with several, and those with a best span of white space only.
    """
    counts = np.bincount(content.row, minlength=len(owner))
    left = (np.bincount(owner, minlength=len(contexts))[owner] > 1) | (counts == 0)
    chosen = np.flatnonzero(~left)
    if not len(chosen) or bool((np.diff(owner[chosen]) < 0).any()):
        return np.ones(len(owner), bool)
    if len(chosen) < len(owner):
        logits, nulls, content, owner = _of_rows(~left, logits, nulls, content, owner)
    text = owner
    best = best_spans(logits[0], logits[1], counts[chosen], longest)
    ends = np.concatenate([best.first, best.last])
    units = units_at(content, contexts, ends, whole=whole_words)
    start, end = units[0][: len(best.first)], units[1][len(best.first) :]
    order = np.lexsort((end, start, best.row))
    order = order[np.append(True, np.diff(best.row[order]) > 0)]
    norm = np.stack(
        [np.logaddexp(*sums) for sums in zip(_log_sums(logits, content.row, len(text)), nulls, strict=True)]
    )
    scores = np.minimum(1.0, np.exp(best.value[order].astype(np.float64) - (norm[0] + norm[1])))
    texts, starts, ends = text.tolist(), start[order].tolist(), end[order].tolist()
    own: list[Any] = list(contexts)
    surfaces: list[str] = [own[at][low:high] for at, low, high in zip(texts, starts, ends, strict=True)]
    bare = list(map(str.strip, surfaces))
    for i, surface in enumerate(bare):
        if surface is not surfaces[i]:
            starts[i], ends[i] = trimmed(own[texts[i]], starts[i], ends[i])
    answers = build_records(Answer, bare, scores.tolist(), starts, ends, repeat(False, len(bare)))
    for at, answer in zip(texts, answers, strict=True):
        found[at] = [answer]
    if no_answer:
        for at, log_null in zip(texts, (nulls.sum(0) - norm[0] - norm[1]).tolist(), strict=True):
            found[at] = _with_null(found[at], log_null, 1, null_margin)
    left[chosen[[not surface for surface in bare]]] = True
    return left


def _check_options(top_k: int, max_answer_length: int, distinct: str) -> None:
    problems = []
    if top_k < 1:
        problems.append(f"top_k={top_k} must be at least 1")
    if max_answer_length < 1:
        problems.append(f"max_answer_length={max_answer_length} must be at least 1 token")
    if distinct not in get_args(Distinct):
        problems.append(f"distinct={distinct!r} must be one of {', '.join(get_args(Distinct))}")
    if problems:
        raise PredictError("answers: " + "; ".join(problems), problems=problems)


def _of_rows(
    kept: np.ndarray, logits: np.ndarray, nulls: np.ndarray, content: TokenStream, owner: np.ndarray
) -> tuple[np.ndarray, np.ndarray, TokenStream, np.ndarray]:
    """Return the arguments of some rows, ``(rows,)`` flags; rows are renumbered."""
    tokens = kept[content.row]
    content = content.chosen(tokens)
    content = replace(content, row=(np.cumsum(kept) - 1)[content.row])
    return logits[:, tokens], nulls[:, kept], content, owner[kept]


def _windows_of(
    logits: np.ndarray, nulls: np.ndarray, content: TokenStream, owner: np.ndarray, contexts: int
) -> _Windows:
    rows = len(owner)
    width = int(content.rank.max(initial=-1)) + 1
    first = np.zeros(rows, np.int64)
    first[content.row] = content.position - content.rank
    padded = np.full((2, rows, width), -np.inf, np.float32)
    padded[:, content.row, content.rank] = logits
    null = np.full(contexts, np.inf)
    np.minimum.at(null, owner, nulls.sum(0))
    speaks = np.zeros(contexts, np.int64)
    order = np.lexsort((np.arange(rows), nulls.sum(0)))[::-1]
    speaks[owner[order]] = order
    # Tokens that occur in several windows, once each.
    text = content.text
    order = np.lexsort((content.position, text))
    new = np.ones(len(order), bool)
    new[1:] = (text[order][1:] != text[order][:-1]) | (content.position[order][1:] != content.position[order][:-1])
    heads = np.flatnonzero(new)
    once = np.maximum.reduceat(logits[:, order], heads, axis=1) if len(heads) else logits
    log_start, log_end = _log_sums(once, text[order][heads], contexts)
    if rows:
        log_start, log_end = np.logaddexp(log_start, nulls[0, speaks]), np.logaddexp(log_end, nulls[1, speaks])
    return _Windows(torch.from_numpy(padded[0]), torch.from_numpy(padded[1]), first, owner, log_start, log_end, null)


def _log_sums(logits: np.ndarray, group: np.ndarray, groups: int) -> np.ndarray:
    """Return the log of the summed exponentials of each group, ``(2, groups)``; -inf for one without logits.

    Args:
        logits: ``(2, n)``.
        group: of each logit, never falling, ``(n,)``.
        groups: how many there are.
    """
    out = np.full((2, groups), -np.inf)
    if not len(group):
        return out
    heads = np.flatnonzero(np.append(True, np.diff(group) > 0))
    for values, sums in zip(logits.astype(np.float64), out, strict=True):
        peak = np.full(groups, -np.inf)
        peak[group[heads]] = np.maximum.reduceat(values, heads)
        total = np.bincount(group, np.exp(values - peak[group]), groups)
        seen = total > 0
        sums[seen] = peak[seen] + np.log(total[seen])
    return out


def _best_spans(
    windows: _Windows, chosen: np.ndarray, longest: int, candidates: int, contexts: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return each window's best spans: logit sums, first and last token position; and the number omitted.

    Only the band ``first <= last < first + longest`` is built: width × longest sums for a window instead of
    width².

    Returns:
        sums, first, last as ``(windows, candidates)``, and for each context the largest sum that a span which
        was not returned can have, ``(contexts,)``.
    """
    width = windows.start.shape[1]
    longest = min(longest, width)
    count = min(candidates, width * longest)
    step = max(1, _BAND_ELEMENTS // (width * longest))
    values, indices = [], []
    for begin in range(0, len(chosen), step):
        part = torch.from_numpy(chosen[begin : begin + step]).to(windows.start.device)
        start, end = windows.start.index_select(0, part), windows.end.index_select(0, part)
        end = torch.nn.functional.pad(end, (0, longest - 1), value=-torch.inf)
        band = start[:, :, None] + end.unfold(1, longest, 1)
        best = band.flatten(1).topk(count, dim=1)
        values.append(best.values.cpu())
        indices.append(best.indices.cpu())
    value = torch.cat(values).double().numpy()
    index = torch.cat(indices).numpy()
    first = windows.first[chosen][:, None] + index // longest
    floor = np.full(contexts, -np.inf)
    if count < width * longest:
        np.maximum.at(floor, windows.owner[chosen], value[:, -1])
    return value, first, first + index % longest, floor


def _span_arrays(
    stream: TokenStream, words: Words, text: int, value: np.ndarray, first: np.ndarray, last: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return logit sum, start and end character of the spans, best first; equal sums by place."""
    base = int(np.searchsorted(stream.text, text))
    base -= int(stream.position[base])
    start = words.start[words.of_token[base + first]]
    end = words.end[words.of_token[base + last]]
    order = np.lexsort((end, start, -value))
    return value[order], start[order], end[order]


def _distinct(
    spans: tuple[np.ndarray, np.ndarray, np.ndarray],
    windows: _Windows,
    text: int,
    context: str,
    top_k: int,
    distinct: str,
    floor: float,
) -> tuple[list[Answer], bool]:
    """Return the answers that do not repeat a better one, and whether no span left out could change them."""
    answers: list[Answer] = []
    seen: set[object] = set()
    norm = windows.log_start[text] + windows.log_end[text]
    for value, low, high in zip(*(array.tolist() for array in spans), strict=True):
        if value <= floor:
            return answers, False
        start, end = trimmed(context, low, high)
        surface = context[start:end]
        if start == end or (start, end) in seen or (distinct == "text" and surface.casefold() in seen):
            continue
        if distinct != "span" and any(start < a.end and a.start < end for a in answers):
            continue
        seen |= {(start, end), surface.casefold()}
        answers.append(Answer(surface, min(1.0, float(np.exp(value - norm))), start, end))
        if len(answers) == top_k:
            return answers, True
    # The last span of a window that was cut short equals the floor, so here nothing was left out.
    return answers, True


def _with_null(answers: list[Answer], log_null: float, top_k: int, null_margin: float) -> list[Answer]:
    null = Answer("", min(1.0, float(np.exp(log_null))), 0, 0, True)
    with np.errstate(divide="ignore"):
        logs = [float(np.log(answer.score)) for answer in answers]
    place = next((i for i, log in enumerate(logs) if log_null - log > null_margin), len(answers))
    return [*answers[:place], null, *answers[place:]][:top_k]


# ---- the best span of each context that fits in one window --------------------------------------------

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

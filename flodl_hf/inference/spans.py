"""Answers to questions from start and end logits.

This file decides how likely each span of a context is, over all of its windows together, and which spans are
answers. The tokenizers package creates model inputs; the removed pipeline's rules are in
``compat/question_answering.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Literal, TypeAlias, get_args

import numpy as np

from flodl_hf.errors import PredictError
from flodl_hf.inference.batch import Placed
from flodl_hf.inference.results import Answer, not_finite
from flodl_hf.inference.token_table import TokenTable
from flodl_hf.inference.words import TokenStream, content_of, merge_windows, units_at

Distinct: TypeAlias = Literal["span", "place", "text"]

# Larger than any number of tokens of a context.
_APART = 1 << 40
# Number of spans that are read at once after the first time.
_SPANS = 1 << 13


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
    content = content_of(table, 1)
    values = logits.values.float().numpy()
    starts_ends = np.ascontiguousarray(values[logits.starts[content.row] + content.column].T)
    nulls = values[logits.starts + table.nulls].T.astype(np.float64)
    if not bool(np.isfinite(starts_ends).all()):
        raise not_finite("answers")
    stream = merge_windows(content, table.owners)
    log_start, log_end, null = _normalisers(starts_ends, nulls, content, stream, table, len(contexts))
    answers: list[list[Answer]] = [[] for _ in contexts]
    # An answer may be blank or a duplicate, so more spans are read than requested, and more again if too few.
    count = 1 if top_k == 1 else 4 * top_k + 8
    work = [(content, starts_ends, count)] if len(content) else []
    while work:
        own, sides, count = work.pop()
        first, last, value, least = best_spans(sides, own.row, own.text, max_answer_length, count, len(contexts))
        ends, text = np.concatenate([first, last]), own.text[first]
        if stream is not own:
            keys = stream.text * _APART + stream.position
            ends = np.searchsorted(keys, own.text[ends] * _APART + own.position[ends])
        units = units_at(stream, contexts, ends, whole=whole_words)
        start, end = units[0][: len(first)], units[1][len(first) :]
        order = np.lexsort((end, start, -value, text))
        scores = np.minimum(1.0, np.exp(value.astype(np.float64) - (log_start + log_end)[text]))
        spans = zip(*(column[order].tolist() for column in (scores, start, end)), strict=True)
        for at, size in zip(*(array.tolist() for array in np.unique(text, return_counts=True)), strict=True):
            answers[at] = _distinct(list(islice(spans, size)), str(contexts[at]), top_k, distinct)
        found = np.fromiter(map(len, answers), np.int64, len(answers))
        pending = np.unique(text[(found[text] < top_k) & (least[text] > -np.inf)])
        size = max(1, _SPANS // count)
        for part in (pending[at : at + size] for at in range(0, len(pending), size)):
            tokens = np.flatnonzero(np.isin(own.text, part))
            work.append((own.chosen(tokens), sides[:, tokens], 3 * count))
    if no_answer:
        for at, log_null in enumerate((null - log_start - log_end).tolist()):
            if np.isfinite(null[at]):  # others have no window
                answers[at] = _with_null(answers[at], log_null, top_k, null_margin)
    return answers


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


def _normalisers(
    logits: np.ndarray, nulls: np.ndarray, content: TokenStream, stream: TokenStream, table: TokenTable, contexts: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the logs of both normalisers and the sum of null logits of each context, ``(contexts,)`` each."""
    owner, sums = table.owners, nulls.sum(0)
    null = np.full(contexts, np.inf)
    np.minimum.at(null, owner, sums)
    best_row = np.zeros(contexts, np.int64)
    order = np.argsort(sums, kind="stable")[::-1]
    best_row[owner[order]] = order
    group = content.text
    if stream is not content:  # tokens that occur in several windows, once each
        sizes = np.zeros(contexts, np.int64)
        np.maximum.at(sizes, owner, table.first_token + np.bincount(content.row, minlength=len(owner)))
        place = (np.cumsum(sizes) - sizes)[group] + content.position
        once = np.full((2, int(sizes.sum())), -np.inf, np.float32)
        for side, values in zip(once, logits, strict=True):
            np.maximum.at(side, place, values)
        logits, group = once, np.repeat(np.arange(contexts), sizes)
    logs = _log_sums(logits, group, contexts)
    if len(owner):
        logs = np.logaddexp(logs, nulls[:, best_row])
    return logs[0], logs[1], null


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


def _distinct(spans: Iterable[tuple[float, int, int]], context: str, top_k: int, distinct: str) -> list[Answer]:
    """Return the first answers that are not blank and do not repeat a better one; spans are ``(score, start, end)``."""
    answers: list[Answer] = []
    seen: set[object] = set()
    taken = bytearray(len(context))
    for score, low, high in spans:
        surface = context[low:high]
        bare = surface.strip()
        start = low + len(surface) - len(surface.lstrip())
        end = start + len(bare)
        if not bare or (start, end) in seen or (distinct == "text" and bare.casefold() in seen):
            continue
        if distinct != "span" and taken.find(1, start, end) >= 0:
            continue
        answers.append(Answer(bare, score, start, end))
        if len(answers) == top_k:
            break
        seen |= {(start, end), bare.casefold()}
        taken[start:end] = b"\1" * len(bare)
    return answers


def _with_null(answers: list[Answer], log_null: float, top_k: int, null_margin: float) -> list[Answer]:
    null = Answer("", min(1.0, float(np.exp(log_null))), 0, 0, True)
    with np.errstate(divide="ignore"):
        logs = [float(np.log(answer.score)) for answer in answers]
    place = next((i for i, log in enumerate(logs) if log_null - log > null_margin), len(answers))
    return [*answers[:place], null, *answers[place:]][:top_k]


# ---- the best spans of each context -------------------------------------------------------------------

# Number of tokens per block, so that running sums stay in the cache of a core.
_BLOCK = 1 << 15
# Number of sums of spans that are computed at once.
_BAND = 1 << 15


def best_spans(
    logits: np.ndarray, row: np.ndarray, text: np.ndarray, longest: int, count: int, contexts: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the ``count`` best spans of each context, and all others that have at least the least of their sums.

    Of a context with several windows, ``count`` spans of each window and more may be returned.

    Args:
        logits: of starts and ends, ``(2, tokens)``.
        row: the window of each token, never falling, ``(tokens,)``; a span is within one window.
        text: the context of each token, ``(tokens,)``.
        longest: most tokens of a span.
        count: number of spans of a context.
        contexts: number of contexts.

    Returns:
        First and last tokens and sums of the spans, ``(spans,)`` each, and the least sum of each context,
        ``(contexts,)``; ``-inf`` if all its spans are returned.
    """
    counts = np.bincount(row)
    counts = counts[counts > 0]
    ends = np.cumsum(counts)
    heads = ends - counts
    best, least = np.empty(len(row), np.float32), np.full(contexts, -np.inf, np.float32)
    at = 0
    while at < len(heads):
        stop = max(at + 1, int(np.searchsorted(ends, heads[at] + _BLOCK, side="right")))
        tokens = slice(int(heads[at]), int(ends[stop - 1]))
        best[tokens] = sums = _best_from(logits[:, tokens], counts[at:stop], longest)
        width = int(counts[at:stop].max())
        least_sums = np.full(stop - at, -np.inf, np.float32)
        if count == 1:
            least_sums = np.maximum.reduceat(sums, heads[at:stop] - heads[at])
        elif count <= width:
            padded = np.full((stop - at, width), -np.inf, np.float32)
            padded[np.arange(width) < counts[at:stop, None]] = sums
            least_sums = np.partition(padded, -count, axis=1)[:, -count]
        np.maximum.at(least, text[heads[at:stop]], least_sums)
        at = stop
    starts = np.flatnonzero(best >= least[text])
    apart = np.arange(min(longest, int(counts.max())))
    parts = []
    for first in np.array_split(starts, len(starts) * len(apart) // _BAND + 1):
        last, stops = first[:, None] + apart, ends[np.searchsorted(ends, first, side="right")]
        sums = logits[0][first][:, None] + logits[1][np.minimum(last, len(row) - 1)]
        which, step = np.nonzero((last < stops[:, None]) & (sums >= least[text[first]][:, None]))
        parts.append(_best_of(first[which], first[which] + step, sums[which, step], text, count, least))
    if len(parts) > 1:
        first, last, value = map(np.concatenate, zip(*parts, strict=True))
        parts = [_best_of(first, last, value, text, count, least)]
    return *parts[0], least


def _best_of(
    first: np.ndarray, last: np.ndarray, value: np.ndarray, text: np.ndarray, count: int, least: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the ``count`` best spans of each context with all ties, and raise ``least`` to the last one's sum."""
    own = text[first]
    heads = np.flatnonzero(np.diff(own, prepend=-1, append=-1))
    for group in np.flatnonzero(np.diff(heads) > count):
        low, high = heads[group : group + 2]
        least[own[low]] = max(least[own[low]], np.partition(value[low:high], -count)[-count])
    kept = value >= least[own]
    return first[kept], last[kept], value[kept]


def _best_from(logits: np.ndarray, counts: np.ndarray, longest: int) -> np.ndarray:
    """Return the largest sum of a span from each token, ``(tokens,)``; ``counts`` are the tokens of each window."""
    # A gap behind each row, so that no span reaches into the next one.
    gap = min(longest, int(counts.max())) - 1
    place = np.arange(logits.shape[1]) + np.repeat(np.arange(len(counts)), counts) * gap
    size = len(place) + len(counts) * gap
    first = np.full(size, -np.inf, np.float32)
    last = np.full(size, -np.inf, np.float32)
    first[place], last[place] = logits
    best = first + last
    sums = np.empty(size, np.float32)
    for apart in range(1, gap + 1):
        part = np.add(first[: size - apart], last[apart:], out=sums[: size - apart])
        np.maximum(best[: size - apart], part, out=best[: size - apart])
    return best[place]

"""Answers to questions from start and end logits.

This file decides how likely each span of a context is, over all of its windows together, and which spans are
answers. It leaves the model inputs to the text room and the removed pipeline's habits to
``compat/question_answering.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from flodl.errors import PredictError
from flodl_hf.decode.rows import Content, Logits, Rows, content_of, flat_logits, null_columns, owners_of
from flodl_hf.decode.windows import TokenStream, merge_windows
from flodl_hf.decode.words import Words, trimmed, words_of

__all__ = ["Answer", "Distinct", "decode_answers", "decode_answers_batch"]

Distinct: TypeAlias = Literal["span", "place", "text"]

# Upper bound on the elements of one band of span sums: 64 MB of float32.
_BAND_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True)
class Answer:
    """A span of a context, or the statement that the context holds no answer.

    Attributes:
        text: exactly ``context[start:end]``; empty for no answer.
        score: probability that the answer begins and ends here, from 0 to 1.
        start: first character, 0 for no answer.
        end: character after the last one, 0 for no answer.
        no_answer: True if this says that there is none.
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


def decode_answers(
    start_logits: Logits,
    end_logits: Logits,
    rows: Rows,
    context: str,
    *,
    top_k: int = 1,
    max_answer_length: int = 30,
    no_answer: bool = False,
    null_margin: float = 0.0,
    whole_words: bool = True,
    distinct: Distinct = "place",
    sequence: int = 1,
) -> list[Answer]:
    """Return the answers in one context, best first; the same as ``decode_answers_batch`` with it alone."""
    return decode_answers_batch(
        start_logits,
        end_logits,
        rows,
        [context],
        owners=[0] * len(rows),
        top_k=top_k,
        max_answer_length=max_answer_length,
        no_answer=no_answer,
        null_margin=null_margin,
        whole_words=whole_words,
        distinct=distinct,
        sequence=sequence,
    )[0]


def decode_answers_batch(
    start_logits: Logits,
    end_logits: Logits,
    rows: Rows,
    contexts: Sequence[str],
    *,
    owners: Sequence[int] | np.ndarray | None = None,
    top_k: int = 1,
    max_answer_length: int = 30,
    no_answer: bool = False,
    null_margin: float = 0.0,
    whole_words: bool = True,
    distinct: Distinct = "place",
    sequence: int = 1,
) -> list[list[Answer]]:
    """Return for each question and context up to ``top_k`` answers, best first.

    **Score.** Start and end are each normalised once over a whole context: all its tokens, however many
    windows it took, and the null position. A token that several windows hold counts once, with its largest
    logit, so that overlap does not dilute the score. A span lies within one window; its score is the product
    of the two probabilities, and the scores of disjoint answers of one context can be compared and sum to at
    most 1.

    **No answer.** Each window scores "nothing here" at its first special token. A context has no answer only
    if no window finds one, so the window with the smallest sum of null logits speaks for it. The null answer
    takes part in the normalisation always; it is returned only with ``no_answer=True``, and then stands
    before an answer if ``log(null score) - log(answer score) > null_margin``. Raise the margin to answer more
    often.

    Args:
        start_logits: ``(rows, seq)`` padded, ``(tokens,)`` packed, or one array per row.
        end_logits: likewise.
        rows: the windows: question and context.
        contexts: the contexts that the offsets refer to.
        owners: index of the context of each row; without it row ``i`` is context ``i``, or all are the only
            one.
        top_k: most answers per context.
        max_answer_length: most tokens of an answer, counted before it is widened to whole words.
        no_answer: whether the null answer may be returned.
        null_margin: see above; 0 compares the probabilities as they are.
        whole_words: widen answers that begin or end inside a word.
        distinct: ``"place"`` drops answers that overlap a better one; ``"text"`` also those with the same
            words at another place (case ignored); ``"span"`` only the same characters twice.
        sequence: which of the two texts is the context.

    Raises:
        PredictError: an option makes no sense, or logits, rows and contexts do not fit each other.
    """
    _check_options(top_k, max_answer_length, distinct)
    owner = owners_of(owners, len(rows), len(contexts))
    content = content_of(rows, sequence)
    stream = merge_windows(rows, owner, sequence=sequence, content=content)
    windows = _window_logits(start_logits, end_logits, rows, content, owner, len(contexts))
    words = words_of(stream, contexts, whole=whole_words)
    found: list[list[Answer]] = [[] for _ in contexts]
    pending = np.unique(owner[content.row])
    # An answer may be dropped as a duplicate, so more spans are looked at than asked for, and more again if
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
            found[text] = _with_null(found[text], windows, text, top_k, null_margin)
    return found


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


def _window_logits(
    start_logits: Logits,
    end_logits: Logits,
    rows: Rows,
    content: Content,
    owner: np.ndarray,
    contexts: int,
) -> _Windows:
    flat_start, row_starts = flat_logits(start_logits, rows, trailing=0)
    flat_end, end_starts = flat_logits(end_logits, rows, trailing=0)
    device = flat_start.device
    width = int(content.counts.max()) if len(rows) else 0
    rank = np.arange(len(content.row)) - np.repeat(np.cumsum(content.counts) - content.counts, content.counts)
    first = np.zeros(len(rows), np.int64)
    first[content.row] = content.position - rank
    into = torch.from_numpy(content.row * width + rank).to(device)

    def padded(flat: Tensor, starts: np.ndarray) -> Tensor:
        values = flat.index_select(0, torch.from_numpy(starts[content.row] + content.column).to(device)).float()
        if not bool(torch.isfinite(values).all()):
            raise PredictError(
                "answers: the logits are not finite; expected numbers; half precision may have overflowed, "
                "so predict in float32 or bfloat16"
            )
        out = torch.full((len(rows) * width,), -torch.inf, device=device)
        return out.index_copy_(0, into, values).view(len(rows), width)

    start, end = padded(flat_start, row_starts), padded(flat_end, end_starts)
    columns = null_columns(rows)
    null_start = flat_start.index_select(0, torch.from_numpy(row_starts + columns).to(device)).double()
    null_end = flat_end.index_select(0, torch.from_numpy(end_starts + columns).to(device)).double()
    null_pair = torch.stack([null_start, null_end]).cpu().numpy()
    null = np.full(contexts, np.inf)
    np.minimum.at(null, owner, null_pair.sum(0))
    speaks = np.zeros(contexts, np.int64)
    order = np.lexsort((np.arange(len(rows)), null_pair.sum(0)))[::-1]
    speaks[owner[order]] = order
    log_start = _log_normaliser(start, content, rank, owner, contexts)
    log_end = _log_normaliser(end, content, rank, owner, contexts)
    if len(rows):
        log_start = np.logaddexp(log_start, null_pair[0, speaks])
        log_end = np.logaddexp(log_end, null_pair[1, speaks])
    return _Windows(start, end, first, owner, log_start, log_end, null)


def _log_normaliser(values: Tensor, content: Content, rank: np.ndarray, owner: np.ndarray, contexts: int) -> np.ndarray:
    """Return for each context the log of the summed exponentials of its tokens, each at its largest logit."""
    tokens = values.double().cpu().numpy()[content.row, rank]
    text = owner[content.row]
    order = np.lexsort((content.position, text))
    out = np.full(contexts, -np.inf)
    if len(order) == 0:
        return out
    new = np.ones(len(order), bool)
    new[1:] = (text[order][1:] != text[order][:-1]) | (content.position[order][1:] != content.position[order][:-1])
    heads = np.flatnonzero(new)
    largest, text = np.maximum.reduceat(tokens[order], heads), text[order][heads]
    peak = np.full(contexts, -np.inf)
    np.maximum.at(peak, text, largest)
    total = np.bincount(text, np.exp(largest - peak[text]), contexts)
    seen = total > 0
    out[seen] = peak[seen] + np.log(total[seen])
    return out


def _best_spans(
    windows: _Windows, chosen: np.ndarray, longest: int, candidates: int, contexts: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return each window's best spans: logit sums, first and last token position; and what was left out.

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


def _with_null(answers: list[Answer], windows: _Windows, text: int, top_k: int, null_margin: float) -> list[Answer]:
    log_null = float(windows.null[text] - windows.log_start[text] - windows.log_end[text])
    null = Answer("", min(1.0, float(np.exp(log_null))), 0, 0, True)
    with np.errstate(divide="ignore"):
        logs = [float(np.log(answer.score)) for answer in answers]
    place = next((i for i, log in enumerate(logs) if log_null - log > null_margin), len(answers))
    return [*answers[:place], null, *answers[place:]][:top_k]

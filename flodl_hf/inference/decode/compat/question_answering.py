"""The answers of the question-answering pipeline that transformers shipped up to 4.57.

This file repeats its arithmetic, its candidates and its order of ties, with their weak points: each window is
normalised alone, equal answers add up, the null answer is the smallest of the windows'. ``spans.py`` has none
of these properties; this is for callers with thresholds and tests based on the old numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flodl_hf.errors import PredictError

if TYPE_CHECKING:
    from flodl_hf.tokenization.cuts import Row

_BARRED = -10000.0


def question_answering(
    logits: Sequence[torch.Tensor],
    rows: Sequence[Row],
    context: str,
    *,
    cls_id: int | None,
    top_k: int = 1,
    max_answer_len: int = 15,
    handle_impossible_answer: bool = False,
    align_to_words: bool = True,
) -> dict[str, Any] | list[dict[str, Any]]:
    """Return ``{"score", "start", "end", "answer"}``, or a list of them if there is not exactly one.

    Args:
        logits: of each window of one question and context, as starts and as ends, ``(tokens, 2)``.
        rows: the windows.
        context: the text that the offsets refer to.
        cls_id: id of the classification token, which is included in the normalisation.
        top_k: most answers.
        max_answer_len: most tokens of an answer.
        handle_impossible_answer: whether the empty answer is a candidate.
        align_to_words: widen answers to whole words.

    Raises:
        PredictError: an option is below 1.
    """
    if top_k < 1 or max_answer_len < 1:
        raise PredictError(
            f"question answering: top_k={top_k}, max_answer_len={max_answer_len}; expected both at least 1",
            top_k=top_k,
            max_answer_len=max_answer_len,
        )
    # Some candidates coincide once they are widened to words.
    candidates = top_k * 2 + 10 if align_to_words else top_k
    null_score: float = 1000000
    answers: list[dict[str, Any]] = []
    by_text: dict[str, dict[str, Any]] = {}
    for row, values in zip(rows, logits, strict=True):
        allowed = np.array([s == 1 or i == cls_id for s, i in zip(row.sequence_ids, row.ids, strict=True)])
        start, end = (_normalised(side, allowed) for side in values.unbind(-1))
        if handle_impossible_answer:
            null_score = min(null_score, (start[0] * end[0]).item())
        start[0] = end[0] = 0.0
        for first, last, score in _candidates(start, end, candidates, max_answer_len, allowed):
            low, high = _characters(row, first, last, align_to_words)
            text = context[low:high]
            known = by_text.get(text.lower())
            if known is not None:
                known["score"] += score
                continue
            by_text[text.lower()] = {"score": score, "start": low, "end": high, "answer": text}
            answers.append(by_text[text.lower()])
    if handle_impossible_answer:
        answers.append({"score": null_score, "start": 0, "end": 0, "answer": ""})
    answers = sorted(answers, key=lambda answer: answer["score"], reverse=True)[:top_k]
    return answers[0] if len(answers) == 1 else answers


def _normalised(logits: torch.Tensor, allowed: np.ndarray) -> np.ndarray:
    """Return the soft-max over one window, barred tokens pushed down first; float16 stays float16."""
    if logits.dtype == torch.bfloat16:
        logits = logits.float()
    values = np.where(allowed, logits.cpu().numpy(), _BARRED)
    powers = np.exp(values - values.max())
    return powers / powers.sum()


def _candidates(
    start: np.ndarray, end: np.ndarray, count: int, longest: int, allowed: np.ndarray
) -> list[tuple[int, int, float]]:
    """Return the best spans as first token, last token, score.

    Equal products keep the order of numpy's partition, so the whole square is built and
    partitioned as in the pipeline. Position 0 is always a candidate, as there, with a score of 0.
    """
    square = np.tril(np.triu(np.outer(start, end)), longest - 1)
    flat = square.ravel()
    if count == 1:
        order = np.array([flat.argmax()])
    elif len(flat) < count:
        order = np.argsort(-flat)
    else:
        order = np.argpartition(-flat, count)[:count]
        order = order[np.argsort(-flat[order])]
    first, last = np.divmod(order, len(start))
    open_to = allowed.copy()
    open_to[0] = True
    kept = open_to[first] & open_to[last]
    return [(int(i), int(j), square[i, j].item()) for i, j in zip(first[kept], last[kept], strict=True)]


def _characters(row: Row, first: int, last: int, align_to_words: bool) -> tuple[int, int]:
    """Return the span of characters, widened to words if both ends are inside words of the context."""
    if align_to_words:
        low = _word_tokens(row, row.word_ids[first])
        high = _word_tokens(row, row.word_ids[last])
        if low and high:
            return row.offsets[low[0]][0], row.offsets[high[-1]][1]
    return row.offsets[first][0], row.offsets[last][1]


def _word_tokens(row: Row, word: int | None) -> list[int]:
    if word is None:
        return []
    pairs = zip(row.word_ids, row.sequence_ids, strict=True)
    return [place for place, (w, s) in enumerate(pairs) if w == word and s == 1]

"""Exact match and word F1 of extracted answers, by the rules of the SQuAD evaluation.

Rajpurkar et al., "SQuAD: 100,000+ Questions for Machine Comprehension of Text" (2016), and "Know What You
Don't Know" (2018) for questions without an answer. Figures are percentages, as published ones are.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from flodl.errors import DataError

__all__ = ["AnswerF1", "answer_scores", "normalized_answer"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized_answer(text: str) -> str:
    """Return ``text`` in lower case, without ASCII punctuation, English articles and surplus white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def answer_scores(prediction: str, answers: Sequence[str]) -> tuple[float, float]:
    """Return exact match and F1 of one prediction, each within 0 and 1: the best over the true answers.

    Args:
        prediction: the answer given; empty for "no answer".
        answers: all accepted answers; none, or only ones without a word, for a question without an answer.
    """
    # answers that normalise to nothing are no answers, by the rules of version 2
    accepted = [answer for answer in answers if normalized_answer(answer)] or [""]
    pairs = [_scores(prediction, answer) for answer in accepted]
    return max(exact for exact, _ in pairs), max(f1 for _, f1 in pairs)


def _scores(prediction: str, answer: str) -> tuple[float, float]:
    said, meant = normalized_answer(prediction), normalized_answer(answer)
    exact = float(said == meant)
    if not said or not meant:
        return exact, exact
    shared = sum((Counter(said.split()) & Counter(meant.split())).values())
    if not shared:
        return exact, 0.0
    precision, recall = shared / len(said.split()), shared / len(meant.split())
    return exact, 2 * precision * recall / (precision + recall)


class AnswerF1:
    """Exact match and F1 over questions, in percent: ``exact_match``, ``f1`` and ``count``.

    Where some questions have no answer, the two kinds are reported apart as well (``exact_match/answerable``,
    ``f1/answerable``, ``exact_match/unanswerable``).
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything summed."""
        # per kind, answerable first: questions, exact matches, sum of F1
        self._sums = [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]

    def update(self, predictions: Sequence[str], answers: Sequence[Sequence[str]]) -> None:
        """Count questions.

        Args:
            predictions: one answer for each question, empty for "no answer".
            answers: the accepted answers of each question.

        Raises:
            DataError: the numbers of questions differ.
        """
        if len(predictions) != len(answers):
            raise DataError(
                f"AnswerF1: {len(predictions)} predictions for {len(answers)} questions; expected one for each",
                predictions=len(predictions),
                answers=len(answers),
            )
        for prediction, accepted in zip(predictions, answers, strict=True):
            if isinstance(accepted, str):
                raise DataError(f"AnswerF1: answers of a question are the text {accepted!r}; expected a list of texts")
            exact, f1 = answer_scores(prediction, accepted)
            row = self._sums[0 if any(normalized_answer(answer) for answer in accepted) else 1]
            row[0] += 1
            row[1] += exact
            row[2] += f1

    def merge(self, other: AnswerF1) -> None:
        """Add what another rank has summed."""
        self._sums = [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(self._sums, other._sums, strict=True)]

    def compute(self) -> dict[str, float]:
        """Return the figures, in percent; NaN-free: 0 before anything was seen."""
        (n, exact, f1), (m, exact_none, _) = self._sums
        count = n + m
        figures = {
            "exact_match": 100 * (exact + exact_none) / count if count else 0.0,
            "f1": 100 * (f1 + self._sums[1][2]) / count if count else 0.0,
            "count": count,
        }
        if n and m:
            figures["exact_match/answerable"] = 100 * exact / n
            figures["f1/answerable"] = 100 * f1 / n
            figures["exact_match/unanswerable"] = 100 * exact_none / m
        return figures

    def state_dict(self) -> dict[str, Any]:
        """Return the sums; JSON-able."""
        return {"sums": [list(row) for row in self._sums]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over sums."""
        self._sums = [list(row) for row in state["sums"]]

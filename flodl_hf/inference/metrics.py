"""Metrics of texts: F1 of spans, exact match and F1 of extracted answers, and perplexity.

Answers follow the SQuAD evaluation: Rajpurkar et al., "SQuAD: 100,000+ Questions for Machine Comprehension of Text"
(2016), and "Know What You Don't Know" (2018) for questions without an answer.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flodl.errors import DataError, capped
from flodl.metrics import Sums
from flodl_hf.tokenization.alignment import Scheme, spans_of


class SpanF1:
    """Precision, recall and F1 of spans, and the accuracy of tags.

    A span is correct if its type and both ends are. Counts of all types are pooled (micro average).

    Args:
        scheme: None for the rules of the CoNLL-2000 evaluation, or a scheme that spans must follow.
    """

    def __init__(self, scheme: Scheme | None = None) -> None:
        self.scheme: Scheme | None = scheme
        self.reset()

    def reset(self) -> None:
        """Set all counts to zero."""
        self._spans: dict[str, Counter[str]] = {name: Counter() for name in ("right", "predicted", "true")}
        self._tags = [0, 0]

    def update(self, predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> None:
        """Count sequences of tags.

        Args:
            predictions: predicted tags of each sequence.
            references: true tags of each sequence.

        Raises:
            DataError: the numbers of sequences or of tags differ; ``problems`` lists each difference.
        """
        problems = [
            f"sequence {i}: {len(p)} predicted tags for {len(r)} true ones"
            for i, (p, r) in enumerate(zip(predictions, references, strict=False))
            if len(p) != len(r)
        ]
        if len(predictions) != len(references):
            problems.append(f"{len(predictions)} predicted sequences for {len(references)} true ones")
        if problems:
            raise DataError(f"SpanF1: found sequences of different lengths:\n{capped(problems)}", problems=problems)
        for predicted, true in zip(predictions, references, strict=True):
            found, expected = set(spans_of(predicted, self.scheme)), set(spans_of(true, self.scheme))
            for counts, spans in zip(self._spans.values(), (found & expected, found, expected), strict=True):
                counts.update(kind for kind, _, _ in spans)
            self._tags[0] += sum(p == t for p, t in zip(predicted, true, strict=True))
            self._tags[1] += len(true)

    def merge(self, other: SpanF1) -> None:
        """Add the counts of another rank."""
        for name, counts in self._spans.items():
            counts.update(other._spans[name])
        self._tags = [a + b for a, b in zip(self._tags, other._tags, strict=True)]

    def compute(self) -> dict[str, float]:
        """Return ``precision``, ``recall``, ``f1``, ``f1/<type>``, ``accuracy`` of tags and ``count`` of true spans."""
        right, total = self._tags
        return {
            **scores_of_counts(*(counts.total() for counts in self._spans.values())),
            "accuracy": _ratio(right, total),
            "count": float(self._spans["true"].total()),
            **{f"f1/{kind}": scores["f1"] for kind, scores in self.per_type().items()},
        }

    def per_type(self) -> dict[str, dict[str, float]]:
        """Return ``precision``, ``recall``, ``f1`` and ``support`` (true spans) of each type."""
        return {
            kind: {
                **scores_of_counts(*(counts[kind] for counts in self._spans.values())),
                "support": float(self._spans["true"][kind]),
            }
            for kind in sorted(self._spans["predicted"].keys() | self._spans["true"].keys())
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as JSON values."""
        return {**{name: dict(counts) for name, counts in self._spans.items()}, "tags": list(self._tags)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the counts."""
        self._spans = {name: Counter(state[name]) for name in self._spans}
        self._tags = list(state["tags"])


def scores_of_counts(right: int, predicted: int, true: int) -> dict[str, float]:
    """Return ``precision``, ``recall`` and ``f1`` of a class; 0.0 where nothing was predicted or true."""
    return {
        "precision": _ratio(right, predicted),
        "recall": _ratio(right, true),
        "f1": _ratio(2 * right, predicted + true),
    }


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


# ---- answers -------------------------------------------------------------------------------------------

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def answer_scores(prediction: str, answers: Sequence[str]) -> tuple[float, float]:
    """Return exact match and F1 of one prediction, each within 0 and 1: the best over the true answers.

    Args:
        prediction: the predicted answer; empty for "no answer".
        answers: all accepted answers; none, or only ones without a word, if the question has no answer.
    """
    predicted = _normalized(prediction)
    # According to the rules of version 2, answers that normalise to nothing are no answers.
    accepted = [words for answer in answers if (words := _normalized(answer))] or [""]
    pairs = [(float(predicted == words), _word_f1(predicted.split(), words.split())) for words in accepted]
    return max(exact for exact, _ in pairs), max(f1 for _, f1 in pairs)


def _normalized(text: str) -> str:
    """Return ``text`` in lower case, without ASCII punctuation, English articles and repeated blanks."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _word_f1(predicted: Sequence[str], true: Sequence[str]) -> float:
    if not predicted or not true:
        return float(predicted == true)
    shared = (Counter(predicted) & Counter(true)).total()
    if not shared:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(true)
    return 2 * precision * recall / (precision + recall)


class AnswerF1(Sums):
    """Exact match and F1 of answers, in percent: ``exact_match``, ``f1`` and ``count``.

    If some questions have no answer, the figures of both kinds of questions are also returned separately
    (``exact_match/answerable``, ``f1/answerable``, ``exact_match/unanswerable``).
    """

    def __init__(self) -> None:
        # Questions, exact matches and sum of F1, first of answerable questions, then of unanswerable ones.
        super().__init__(6, dtype=torch.float64, key="sums")

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
                f"AnswerF1: found {len(predictions)} predictions for {len(answers)} questions, expected one for each",
                predictions=len(predictions),
                answers=len(answers),
            )
        sums = self._sums.tolist()
        for prediction, accepted in zip(predictions, answers, strict=True):
            if isinstance(accepted, str):
                raise DataError(f"AnswerF1: found the text {accepted!r} as answers, expected a list of texts")
            exact, f1 = answer_scores(prediction, accepted)
            start = 0 if any(map(_normalized, accepted)) else 3
            sums[start] += 1
            sums[start + 1] += exact
            sums[start + 2] += f1
        self._sums = torch.tensor(sums, dtype=torch.float64)

    def compute(self) -> dict[str, float]:
        """Return the figures in percent; 0 if nothing was counted."""
        n, exact, f1, m, exact_none, f1_none = self._sums.tolist()
        count = n + m
        figures = {
            "exact_match": 100 * (exact + exact_none) / count if count else 0.0,
            "f1": 100 * (f1 + f1_none) / count if count else 0.0,
            "count": count,
        }
        if n and m:
            figures["exact_match/answerable"] = 100 * exact / n
            figures["f1/answerable"] = 100 * f1 / n
            figures["exact_match/unanswerable"] = 100 * exact_none / m
        return figures


# ---- language models -----------------------------------------------------------------------------------


class Perplexity(Sums):
    """Exponential of the mean loss per token: ``perplexity``, ``loss`` and ``count``.

    For a masked language model the tokens are the masked ones, so the figures depend on the masking.

    Args:
        ignore_index: labels with this value do not count.
    """

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__(2, dtype=torch.float64, key="sums")
        self.ignore_index = ignore_index

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch.

        Args:
            logits: ``(..., vocabulary)``.
            labels: token numbers, ``(...)``.
        """
        flat = labels.reshape(-1)
        losses = functional.cross_entropy(
            logits.detach().reshape(-1, logits.shape[-1]).float(),
            flat,
            ignore_index=self.ignore_index,
            reduction="none",
        )
        # Summed in double precision, so that the figure does not depend on the size of batches.
        self.add(losses.sum(dtype=torch.float64), (flat != self.ignore_index).sum())

    def add(self, total_loss: Tensor | float, num_tokens: Tensor | int) -> None:
        """Add a known sum of losses, in nats, of ``num_tokens`` tokens."""
        device = total_loss.device if isinstance(total_loss, Tensor) else self._sums.device
        more = torch.stack(
            [torch.as_tensor(v, dtype=torch.float64, device=device).detach() for v in (total_loss, num_tokens)]
        )
        self._add(more)

    def compute(self) -> dict[str, float]:
        """Return ``perplexity``, ``loss`` (nats per token) and ``count``; NaN if nothing was counted."""
        total, count = self._sums.tolist()
        loss = total / count if count else math.nan
        # exp overflows near 709 nats.
        return {"perplexity": math.exp(loss) if not loss > 700 else math.inf, "loss": loss, "count": count}

"""Metrics that are fed batch by batch, keep counts and no logits, and add up over ranks."""

from flodl.metrics.answers import AnswerF1, answer_scores, normalized_answer
from flodl.metrics.classification import Accuracy, Classification, MultiLabel
from flodl.metrics.language import Perplexity
from flodl.metrics.metric import Metric, merged
from flodl.metrics.regression import Pearson, Spearman, SquaredError
from flodl.metrics.spans import SpanF1, spans_of

__all__ = [
    "Accuracy",
    "AnswerF1",
    "Classification",
    "Metric",
    "MultiLabel",
    "Pearson",
    "Perplexity",
    "SpanF1",
    "Spearman",
    "SquaredError",
    "answer_scores",
    "merged",
    "normalized_answer",
    "spans_of",
]

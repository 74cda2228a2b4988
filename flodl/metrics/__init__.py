"""Metrics that receive batches, store counts and no logits, and can be added over ranks."""

from flodl.metrics.classification import Accuracy, Classification, MultiLabel
from flodl.metrics.metric import Metric, Sums, merged
from flodl.metrics.regression import Pearson, Spearman, SquaredError

__all__ = [
    "Accuracy",
    "Classification",
    "Metric",
    "MultiLabel",
    "Pearson",
    "Spearman",
    "SquaredError",
    "Sums",
    "merged",
]

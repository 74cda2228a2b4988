"""Accuracy, precision, recall, F1 and Matthews correlation, from counts of classes.

Definitions equal scikit-learn: a quotient with a zero denominator is 0, and averages over classes leave out
classes that occur neither among labels nor among predictions. Counts stay on the device of the batches, and no update
waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from flodl.errors import DataError
from flodl.metrics.metric import Sums

Average = Literal["macro", "micro", "weighted", "binary"]


def _pairs(predictions: Tensor, labels: Tensor, metric: str) -> tuple[Tensor, Tensor]:
    """Return class numbers and labels as flat tensors. Scores are reduced by argmax over their last dimension."""
    predictions, labels = predictions.detach(), labels.detach()
    if predictions.dim() == labels.dim() + 1:
        predictions = predictions.argmax(-1)
    if predictions.shape != labels.shape:
        raise DataError(
            f"{metric}: found predictions of shape {tuple(predictions.shape)} and labels of shape "
            f"{tuple(labels.shape)}, expected equal shapes, or scores with one more dimension at the end",
            predictions=tuple(predictions.shape),
            labels=tuple(labels.shape),
        )
    return predictions.reshape(-1).to(labels.device), labels.reshape(-1)


class Accuracy(Sums):
    """Share of correct predictions, for any number of classes: ``accuracy`` and ``count``.

    Args:
        ignore_index: labels with this value do not count.
    """

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__(2)
        self.ignore_index = ignore_index

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        """Count a batch.

        Args:
            predictions: class numbers of the shape of ``labels``, or scores ``(*labels.shape, classes)``.
            labels: class numbers, any shape.
        """
        predicted, labels = _pairs(predictions, labels, "Accuracy")
        kept = labels != self.ignore_index
        self._add(torch.stack([((predicted == labels) & kept).sum(), kept.sum()]))

    def compute(self) -> dict[str, float]:
        """Return ``accuracy`` and ``count``."""
        right, total = self._sums.tolist()
        return {"accuracy": _ratio(right, total), "count": float(total)}


class Classification(Sums):
    """Accuracy, precision, recall, F1 and Matthews correlation of one class per sample, from a confusion matrix.

    Args:
        num_classes: number of classes of labels and predictions.
        average: average over classes: ``"macro"`` (mean), ``"micro"`` (pooled counts), ``"weighted"`` (by the number of
            labels of a class) or ``"binary"`` (class 1 only).
        ignore_index: labels with this value do not count.
    """

    def __init__(self, num_classes: int, average: Average = "macro", *, ignore_index: int = -100) -> None:
        _check_average(average, num_classes)
        self.num_classes = num_classes
        self.average: Average = average
        self.ignore_index = ignore_index
        # The last cell counts pairs with a class out of range, which compute() reports.
        super().__init__(num_classes**2 + 1)

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        """Count a batch.

        Args:
            predictions: class numbers of the shape of ``labels``, or scores ``(*labels.shape, num_classes)``.
            labels: class numbers, any shape.
        """
        predicted, labels = _pairs(predictions, labels, "Classification")
        kept = labels != self.ignore_index
        n = self.num_classes
        valid = (labels >= 0) & (labels < n) & (predicted >= 0) & (predicted < n)
        cell = torch.where(valid, labels * n + predicted, n * n)
        self._sums = self._sums.to(labels.device).index_add(0, cell, kept.to(torch.int64))

    def matrix(self) -> Tensor:
        """Return the confusion matrix on the host, int64 ``(labels, predictions)``.

        Raises:
            DataError: a label or prediction was outside of ``0 .. num_classes-1``.
        """
        counts = self._sums.cpu()
        if counts[-1]:
            raise DataError(
                f"Classification: found {int(counts[-1])} pairs with classes outside of 0 to {self.num_classes - 1}. "
                "Increase num_classes, or correct the labels.",
                count=int(counts[-1]),
            )
        return counts[:-1].view(self.num_classes, self.num_classes)

    def compute(self) -> dict[str, float]:
        """Return ``accuracy``, ``precision``, ``recall``, ``f1``, ``mcc`` and ``count``."""
        matrix = self.matrix()
        true = matrix.sum(1).tolist()
        predicted = matrix.sum(0).tolist()
        right = matrix.diagonal().tolist()
        return {
            "accuracy": _ratio(sum(right), sum(true)),
            **_averaged(right, predicted, true, self.average),
            "mcc": _matthews(right, predicted, true),
            "count": float(sum(true)),
        }


class MultiLabel(Sums):
    """Precision, recall, F1 and exact match of samples with any number of labels.

    Args:
        num_labels: number of labels.
        average: ``"macro"`` (over all labels), ``"micro"`` or ``"weighted"``.
    """

    def __init__(self, num_labels: int, average: Average = "macro") -> None:
        if average == "binary":
            raise DataError(
                "MultiLabel: found average 'binary', expected 'macro', 'micro' or 'weighted'", average=average
            )
        _check_average(average, num_labels)
        self.num_labels = num_labels
        self.average: Average = average
        # Correct, predicted and true counts of each label, then exact samples and all samples.
        super().__init__(3 * num_labels + 2)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch.

        Args:
            logits: floating-point scores, which predict a label above 0, or a boolean or integer table of decisions,
                ``(batch, num_labels)``.
            labels: 0 or 1, ``(batch, num_labels)``.
        """
        if logits.shape != labels.shape or labels.dim() != 2 or labels.shape[1] != self.num_labels:
            raise DataError(
                f"MultiLabel: found scores {tuple(logits.shape)} and labels {tuple(labels.shape)}, "
                f"expected both (batch, {self.num_labels})",
            )
        predicted = logits.detach() > 0 if logits.is_floating_point() else logits.bool()
        true = (labels.detach() > 0.5).to(predicted.device)
        batch = torch.cat(
            [
                (predicted & true).sum(0),
                predicted.sum(0),
                true.sum(0),
                (predicted == true).all(1).sum()[None],
                torch.tensor([labels.shape[0]], device=predicted.device),
            ]
        )
        self._add(batch)

    def compute(self) -> dict[str, float]:
        """Return ``accuracy`` (samples with all labels correct), ``precision``, ``recall``, ``f1`` and ``count``."""
        n = self.num_labels
        counts = self._sums.tolist()
        right, predicted, true = counts[:n], counts[n : 2 * n], counts[2 * n : 3 * n]
        return {
            "accuracy": _ratio(counts[-2], counts[-1]),
            **_averaged(right, predicted, true, self.average, count_absent=True),
            "count": float(counts[-1]),
        }


def _averaged(
    right: Sequence[int],
    predicted: Sequence[int],
    true: Sequence[int],
    average: Average,
    *,
    count_absent: bool = False,
) -> dict[str, float]:
    """Return ``precision``, ``recall`` and ``f1`` over classes, from counts of each class.

    Args:
        right: correct predictions of each class.
        predicted: predictions of each class.
        true: labels of each class.
        average: average over classes.
        count_absent: whether classes without labels and predictions count in a macro average, as zeros.
    """
    if average == "binary":
        return _scores(right[1], predicted[1], true[1])
    if average == "micro":
        return _scores(sum(right), sum(predicted), sum(true))
    rows = [
        (_scores(r, p, t), t if average == "weighted" else 1)
        for r, p, t in zip(right, predicted, true, strict=True)
        if count_absent or p or t
    ]
    total = sum(weight for _, weight in rows)
    return {
        name: sum(scores[name] * weight for scores, weight in rows) / total if total else 0.0
        for name in ("precision", "recall", "f1")
    }


def _scores(right: int, predicted: int, true: int) -> dict[str, float]:
    return {
        "precision": _ratio(right, predicted),
        "recall": _ratio(right, true),
        "f1": _ratio(2 * right, predicted + true),
    }


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _matthews(right: list[int], predicted: list[int], true: list[int]) -> float:
    # Gorodkin, "Comparing two K-category assignments by a K-category correlation coefficient", 2004
    total = sum(true)
    above = sum(right) * total - sum(p * t for p, t in zip(predicted, true, strict=True))
    below = (total**2 - sum(p * p for p in predicted)) * (total**2 - sum(t * t for t in true))
    return above / math.sqrt(below) if below else 0.0


def _check_average(average: str, num_classes: int) -> None:
    if average not in ("macro", "micro", "weighted", "binary"):
        raise DataError(
            f"metric: found average {average!r}, expected 'macro', 'micro', 'weighted' or 'binary'",
            average=average,
        )
    if num_classes < 1 or (average == "binary" and num_classes != 2):
        raise DataError(
            f"metric: found {num_classes} classes for average {average!r}, expected at least 1, and 2 for 'binary'",
            num_classes=num_classes,
        )

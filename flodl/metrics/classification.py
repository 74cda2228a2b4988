"""Accuracy, precision, recall, F1 and Matthews correlation, from counts of classes.

Definitions and corner cases are scikit-learn's: a quotient without a denominator is 0, and averages over
classes leave out classes that occur neither among labels nor among predictions. Counts stay on the device
they are made on, and no update waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from flodl.errors import DataError
from flodl.metrics.sums import Sums

__all__ = ["Accuracy", "Average", "Classification", "MultiLabel"]

Average = Literal["macro", "micro", "weighted", "binary"]


def _pairs(predictions: Tensor, labels: Tensor, where: str) -> tuple[Tensor, Tensor]:
    """Return class numbers and labels, both flat; scores with one more dimension are reduced by argmax."""
    predictions, labels = predictions.detach(), labels.detach()
    if predictions.dim() == labels.dim() + 1:
        predictions = predictions.argmax(-1)
    if predictions.shape != labels.shape:
        raise DataError(
            f"{where}: predictions have shape {tuple(predictions.shape)}, labels {tuple(labels.shape)}; "
            "expected equal shapes, or scores with one more dimension at the end",
            predictions=tuple(predictions.shape),
            labels=tuple(labels.shape),
        )
    return predictions.reshape(-1).to(labels.device), labels.reshape(-1)


class Accuracy(Sums):
    """The share of right predictions, for any number of classes: ``accuracy`` and ``count``.

    Args:
        ignore_index: labels of this value do not count.
    """

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__(2)
        self.ignore_index = ignore_index

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        """Count a batch.

        Args:
            predictions: class numbers shaped like ``labels``, or scores ``(*labels.shape, classes)``.
            labels: class numbers, any shape.
        """
        predicted, labels = _pairs(predictions, labels, "Accuracy")
        kept = labels != self.ignore_index
        self._add(torch.stack([((predicted == labels) & kept).sum(), kept.sum()]))

    def compute(self) -> dict[str, float]:
        """Return ``accuracy`` and ``count``."""
        right, total = self._sums.tolist()
        return {"accuracy": right / total if total else 0.0, "count": float(total)}


class Classification(Sums):
    """Accuracy, precision, recall, F1 and Matthews correlation of one class per sample, from a confusion
    matrix.

    Args:
        num_classes: classes that labels and predictions may have.
        average: how classes make one figure: ``"macro"`` (plain mean), ``"micro"`` (pooled counts),
            ``"weighted"`` (by how often a class is the label) or ``"binary"`` (class 1 alone).
        ignore_index: labels of this value do not count.
        names: names of classes; with them, ``compute`` adds ``f1/<name>`` and its siblings for each class
            that occurs.
    """

    def __init__(
        self,
        num_classes: int,
        average: Average = "macro",
        *,
        ignore_index: int = -100,
        names: Sequence[str] | None = None,
    ) -> None:
        _check_average(average, num_classes)
        if names is not None and len(names) != num_classes:
            raise DataError(f"Classification: {len(names)} names for {num_classes} classes", names=list(names))
        self.num_classes = num_classes
        self.average: Average = average
        self.ignore_index = ignore_index
        self.names = names
        # one cell more than the matrix: pairs with a class out of range, which compute() reports
        super().__init__(num_classes**2 + 1)

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        """Count a batch.

        Args:
            predictions: class numbers shaped like ``labels``, or scores ``(*labels.shape, num_classes)``.
            labels: class numbers, any shape.
        """
        predicted, labels = _pairs(predictions, labels, "Classification")
        kept = labels != self.ignore_index
        n = self.num_classes
        valid = (labels >= 0) & (labels < n) & (predicted >= 0) & (predicted < n)
        cell = torch.where(valid, labels * n + predicted, n * n)
        self._sums = self._sums.to(labels.device).index_add(0, cell, kept.to(torch.int64))

    def matrix(self) -> Tensor:
        """Return the confusion matrix on the host, int64 ``(num_classes, num_classes)``: row label, column
        prediction.

        Raises:
            DataError: a label or prediction was outside ``0 .. num_classes-1``.
        """
        counts = self._sums.cpu()
        if counts[-1]:
            raise DataError(
                f"Classification: {int(counts[-1])} pairs have a label or prediction outside 0 to "
                f"{self.num_classes - 1}; raise num_classes or mend the labels",
                count=int(counts[-1]),
                num_classes=self.num_classes,
            )
        return counts[:-1].view(self.num_classes, self.num_classes)

    def compute(self) -> dict[str, float]:
        """Return ``accuracy``, ``precision``, ``recall``, ``f1``, ``mcc`` and ``count``."""
        matrix = self.matrix()
        true = matrix.sum(1).tolist()
        predicted = matrix.sum(0).tolist()
        right = matrix.diagonal().tolist()
        figures = {
            "accuracy": _ratio(sum(right), sum(true)),
            **averaged(right, predicted, true, self.average),
            "mcc": _matthews(right, predicted, true),
            "count": float(sum(true)),
        }
        for k, name in enumerate(self.names or ()):
            if true[k] or predicted[k]:
                each = averaged(right[k : k + 1], predicted[k : k + 1], true[k : k + 1], "macro")
                figures.update({f"{figure}/{name}": value for figure, value in each.items()})
        return figures

    def per_class(self) -> list[dict[str, float]]:
        """Return ``precision``, ``recall``, ``f1`` and ``support`` of each class, by class number."""
        matrix = self.matrix()
        columns = zip(matrix.diagonal().tolist(), matrix.sum(0).tolist(), matrix.sum(1).tolist(), strict=True)
        return [{**_scores(r, p, t), "support": float(t)} for r, p, t in columns]


class MultiLabel(Sums):
    """Precision, recall, F1 and the share of samples with all labels right, where a sample may have any
    number of labels.

    Args:
        num_labels: labels per sample.
        average: ``"macro"`` (over all labels), ``"micro"`` or ``"weighted"``.
        threshold: a label is predicted when its probability is above this. Scores are taken as logits.
    """

    def __init__(self, num_labels: int, average: Average = "macro", *, threshold: float = 0.5) -> None:
        if average == "binary":
            raise DataError("MultiLabel: average is 'binary'; expected 'macro', 'micro' or 'weighted'", average=average)
        _check_average(average, num_labels)
        if not 0 < threshold < 1:
            raise DataError(f"MultiLabel: threshold is {threshold}; expected a number in (0, 1)", threshold=threshold)
        self.num_labels = num_labels
        self.average: Average = average
        self.threshold = threshold
        # right, predicted, true for each label; then exact samples and samples
        super().__init__(3 * num_labels + 2)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch.

        Args:
            logits: floating-point scores, or a boolean or integer table of decisions, ``(batch,
                num_labels)``.
            labels: 0 or 1, ``(batch, num_labels)``.
        """
        if logits.shape != labels.shape or labels.dim() != 2 or labels.shape[1] != self.num_labels:
            raise DataError(
                f"MultiLabel: scores {tuple(logits.shape)}, labels {tuple(labels.shape)}; "
                f"expected both (batch, {self.num_labels})",
                logits=tuple(logits.shape),
                labels=tuple(labels.shape),
            )
        if logits.is_floating_point():
            # compared as logits, because a probability in half precision is too coarse near the threshold
            said = logits.detach() > math.log(self.threshold / (1 - self.threshold))
        else:
            said = logits.bool()
        true = (labels.detach() > 0.5).to(said.device)
        batch = torch.cat(
            [
                (said & true).sum(0),
                said.sum(0),
                true.sum(0),
                (said == true).all(1).sum()[None],
                torch.tensor([labels.shape[0]], device=said.device),
            ]
        )
        self._add(batch)

    def compute(self) -> dict[str, float]:
        """Return ``accuracy`` (samples with all labels right), ``precision``, ``recall``, ``f1``, ..."""
        n = self.num_labels
        counts = self._sums.tolist()
        right, predicted, true = counts[:n], counts[n : 2 * n], counts[2 * n : 3 * n]
        return {
            "accuracy": _ratio(counts[-2], counts[-1]),
            **averaged(right, predicted, true, self.average, absent_count=True),
            "count": float(counts[-1]),
        }


def averaged(
    right: Sequence[int],
    predicted: Sequence[int],
    true: Sequence[int],
    average: Average,
    *,
    absent_count: bool = False,
) -> dict[str, float]:
    """Return ``precision``, ``recall`` and ``f1`` over classes, from counts per class.

    Args:
        right: how often each class was predicted rightly.
        predicted: how often it was predicted.
        true: how often it was the label.
        average: how classes make one figure.
        absent_count: let classes that occur nowhere enter a macro average, as zeros.
    """
    if average == "binary":
        return _scores(right[1], predicted[1], true[1])
    if average == "micro":
        return _scores(sum(right), sum(predicted), sum(true))
    rows = [
        (_scores(r, p, t), t if average == "weighted" else 1)
        for r, p, t in zip(right, predicted, true, strict=True)
        if absent_count or p or t
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
            f"metric: average is {average!r}; expected 'macro', 'micro', 'weighted' or 'binary'",
            average=average,
        )
    if num_classes < 1 or (average == "binary" and num_classes != 2):
        raise DataError(
            f"metric: {num_classes} classes, average {average!r}; expected at least 1, and 2 for 'binary'",
            num_classes=num_classes,
        )

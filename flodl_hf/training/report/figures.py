"""Statistics of predictions and gold labels: pure functions, compared with other libraries in
the tests.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flodl_hf.inference.metrics import SpanF1, scores_of_counts
from flodl_hf.tokenization.alignment import spans_of
from flodl_hf.training.evaluators import hits_above

Numbers = NDArray[Any]


def confusion(predicted: Numbers, truth: Numbers, classes: int) -> Numbers:
    """Return the confusion matrix, ``(classes, classes)``; rows are true classes.

    Args:
        predicted: ids, ``(examples,)``.
        truth: ids, ``(examples,)``.
        classes: how many there are.
    """
    flat = np.bincount(truth.astype(np.int64) * classes + predicted.astype(np.int64), minlength=classes * classes)
    return flat.reshape(classes, classes)


@dataclass(frozen=True)
class LabelTable:
    """How often each label is predicted right.

    Attributes:
        labels: label of each row and column of ``confusion``.
        confusion: rows are true labels, columns predicted labels; with several labels per text for each label
            ``[[true negatives, false positives], [false negatives, true positives]]``.
        rows: ``precision``, ``recall``, ``f1`` and ``support`` of each label; 0.0 where nothing was predicted or true.
    """

    labels: list[str]
    confusion: list[Any]
    rows: dict[str, dict[str, float]]


def label_table(kind: str, predictions: Any, truth: Any, names: Sequence[str]) -> LabelTable | None:
    """Return precision, recall and F1 of each label with the confusion matrix; None for tasks without labels.

    Args:
        kind: kind of the loss, as `flodl_hf.training.step.Kind`.
        predictions: scores ``(examples, labels)``, or tags or label numbers of each token.
        truth: label numbers ``(examples,)``, flags ``(examples, labels)``, or tags or label numbers of each token.
        names: label names by number.
    """
    if kind in ("single_label", "pairs"):
        return _of_classes(np.asarray(predictions).argmax(1), np.asarray(truth), names)
    if kind == "replaced":
        flat = [np.concatenate([*map(np.asarray, lines)]) for lines in (predictions, truth)]
        return _of_classes(flat[0], flat[1], ("original", "replaced"))
    if kind == "tokens":
        return _of_tags(predictions, truth, names)
    if kind != "multi_label":
        return None
    said, there = np.asarray(predictions) > 0, np.asarray(truth) > 0.5  # logits
    tables = [confusion(said[:, i], there[:, i], 2) for i in range(len(names))]
    rows = {
        name: _row(table[1, 1], table[:, 1].sum(), table[1].sum()) for name, table in zip(names, tables, strict=True)
    }
    return LabelTable(list(names), [table.tolist() for table in tables], rows)


def _row(right: int, predicted: int, there: int) -> dict[str, float]:
    return {**scores_of_counts(right, predicted, there), "support": int(there)}


def _of_classes(predicted: Numbers, there: Numbers, names: Sequence[str]) -> LabelTable:
    counted = confusion(predicted, there, len(names))
    columns = zip(names, counted.diagonal(), counted.sum(0), counted.sum(1), strict=True)
    rows = {name: _row(right, found, true) for name, right, found, true in columns}
    return LabelTable(list(names), counted.tolist(), rows)


def _of_tags(predictions: Any, truth: Any, names: Sequence[str]) -> LabelTable:
    """Return the words by label, without B- and I-; precision and recall are of whole spans where tags mark spans."""
    kinds = {tag.split("-", 1)[-1] for tag in (*names, *(tag for tags in truth for tag in tags))}
    labels = sorted(kinds, key=lambda name: (name == "O", name))
    ids = {name: i for i, name in enumerate(labels)}
    said, there = (
        np.asarray([ids[tag.split("-", 1)[-1]] for tags in lines for tag in tags], np.int64)
        for lines in (predictions, truth)
    )
    words = _of_classes(said, there, labels)
    if "O" not in names or any(tag != "O" and tag[1:2] != "-" for tag in names):
        return words
    spans = SpanF1()
    spans.update(*([conll_tags(tags, names) for tags in lines] for lines in (predictions, truth)))
    return LabelTable(labels, words.confusion, {kind: {**row} for kind, row in spans.per_type().items()})


_BILOU = {"L-": "E-", "U-": "S-"}


def conll_tags(tags: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return tags with the letters of the CoNLL evaluation: E and S for the L and U of a BILOU scheme.

    Args:
        tags: of one text.
        names: all label names, which define the scheme.
    """
    prefixes = {name[:2] for name in names}
    if not prefixes & set(_BILOU) or not prefixes <= {*_BILOU, "B-", "I-", "O"}:
        return list(tags)
    return [_BILOU.get(tag[:2], tag[:2]) + tag[2:] for tag in tags]


@dataclass(frozen=True)
class Calibration:
    """Confidence and accuracy of predictions.

    Attributes:
        sure: mean confidence of each bin; NaN where it is empty.
        right: share of each bin that is right; NaN where it is empty.
        counts: how many are in each bin.
        error: the expected calibration error: mean distance of the two, weighted by counts (Guo et al. 2017, eq. 3).
    """

    sure: Numbers
    right: Numbers
    counts: Numbers
    error: float


def calibration(confidence: Numbers, hits: Numbers, bins: int = 15) -> Calibration:
    """Return the calibration over bins of equal width; a bin includes its upper end.

    Args:
        confidence: from 0 to 1, ``(n,)``.
        hits: whether each was right, ``(n,)``.
        bins: how many.
    """
    at = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    counts = np.bincount(at, minlength=bins)
    with np.errstate(invalid="ignore"):
        sure = np.bincount(at, weights=confidence, minlength=bins) / counts
        right = np.bincount(at, weights=hits.astype(np.float64), minlength=bins) / counts
    filled = counts > 0
    error = float((np.abs(sure - right)[filled] * counts[filled]).sum() / max(1, counts.sum()))
    return Calibration(sure, right, counts, error)


@dataclass(frozen=True)
class Curve:
    """Precision and recall as the threshold falls from the highest score to the lowest.

    Attributes:
        thresholds: scores at or above which an example counts as found.
        precision: share of those found that are right.
        recall: share of what there is that is found.
        average: average precision: precision weighted by the steps of recall; NaN where there is nothing to find.
    """

    thresholds: Numbers
    precision: Numbers
    recall: Numbers
    average: float


def precision_recall(scores: Numbers, truth: Numbers) -> Curve:
    """Return the curve of one class.

    Args:
        scores: ``(n,)``, more is surer.
        truth: whether each is of the class, ``(n,)``.
    """
    ranked, ends, hits = hits_above(scores, truth)
    precision = hits / (ends + 1)
    recall = hits / hits[-1] if hits.any() else np.full(len(hits), np.nan)
    average = float((np.diff(recall, prepend=0.0) * precision).sum()) if hits.any() else float("nan")
    return Curve(ranked[ends], precision, recall, average)


def best_thresholds(scores: Numbers, truth: Numbers) -> Numbers:
    """Return for each label the threshold with the best F1, halfway to the next lower score; 0.5 for labels without
    examples.

    Of several that are as good the one nearest to 0.5 is taken.

    Args:
        scores: probabilities, ``(examples, labels)``.
        truth: 0 or 1, ``(examples, labels)``.
    """
    chosen = np.full(scores.shape[1], 0.5)
    for label in range(scores.shape[1]):
        total = truth[:, label].sum()
        if not total or total == len(truth):
            continue
        curve = precision_recall(scores[:, label], truth[:, label])
        with np.errstate(invalid="ignore"):
            f1 = np.nan_to_num(2 * curve.precision * curve.recall / (curve.precision + curve.recall))
        below = np.append(curve.thresholds[1:], 0.0)
        middle = (curve.thresholds + below) / 2
        good = np.flatnonzero(f1 >= f1.max() - 1e-12)
        chosen[label] = middle[good[np.abs(middle[good] - 0.5).argmin()]]
    return chosen


def sigmoid(logits: Any) -> Any:
    """Return the probabilities of logits."""
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-logits))


def f1_at(scores: Numbers, truth: Numbers, thresholds: Any) -> Numbers:
    """Return the F1 of each label at its threshold; NaN for a label that is neither true nor predicted.

    Args:
        scores: probabilities, ``(examples, labels)``.
        truth: whether each is of the label, ``(examples, labels)``.
        thresholds: one for each label, or one for all.
    """
    predicted = scores >= np.asarray(thresholds)
    with np.errstate(invalid="ignore"):
        return 2 * (predicted & truth).sum(0) / (predicted.sum(0) + truth.sum(0))


SPAN_ERRORS = ("right", "wrong_border", "wrong_label", "missed", "spurious")


def span_errors(predicted: Sequence[Sequence[str]], truth: Sequence[Sequence[str]]) -> dict[str, Counter[str]]:
    """Count correct, wrong, missed and spurious spans of tagged sentences by label, the most frequent label first.

    Every true span is counted once, under its own label, with the best match: ``right``; ``wrong_label`` with equal
    borders; ``wrong_border`` where it overlaps a span of its label; else ``missed``. A predicted span that matches no
    true span is ``spurious``, under its predicted label.

    Args:
        predicted: tags of each sentence.
        truth: tags of each sentence.
    """
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for tags_found, tags in zip(predicted, truth, strict=True):
        there, guessed = spans_of(tags), spans_of(tags_found)
        used: set[tuple[str, int, int]] = set()
        for label, start, end in there:
            if (label, start, end) in guessed:
                counts[label]["right"] += 1
                used.add((label, start, end))
                continue
            same = [g for g in guessed if g[1:] == (start, end)]
            touching = [g for g in guessed if g[0] == label and g[1] < end and start < g[2] and g not in there]
            counts[label]["wrong_label" if same else "wrong_border" if touching else "missed"] += 1
            used.update(same or touching)
        for span in guessed:
            if span not in used:
                counts[span[0]]["spurious"] += 1
    return dict(sorted(counts.items(), key=lambda item: (-sum(item[1].values()), item[0])))


@dataclass(frozen=True)
class Tuned:
    """Thresholds, and their F1 on the examples they were chosen on.

    Attributes:
        thresholds: by label.
        usual: F1 of each label with 0.5; for two labels the F1 of the second, under its name.
        tuned: F1 of each label with its threshold.
        examples: how many there were.
        where: name of the set; empty where there is one.
    """

    thresholds: dict[str, float]
    usual: dict[str, float]
    tuned: dict[str, float]
    examples: int
    where: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON types."""
        return {
            "thresholds": self.thresholds, "f1_at_0.5": self.usual, "f1_tuned": self.tuned, "examples": self.examples,
            "set": self.where,
        }  # fmt: skip


def tune_thresholds(predictions: Any, labels: tuple[str, ...]) -> Tuned:
    """Return the thresholds of the best F1.

    Args:
        predictions: scores and gold labels of the evaluation examples.
        labels: label names by number.
    """
    logits, truth = np.asarray(predictions.predictions, np.float64), np.asarray(predictions.truth)
    is_binary = truth.ndim == 1
    if is_binary:
        # The probability of the second of two, as a softmax has it.
        scores, there = sigmoid(logits[:, 1:] - logits[:, :1]), (truth == 1)[:, None]
    else:
        scores, there = sigmoid(logits), truth > 0.5
    found = [round(float(value), 6) for value in best_thresholds(scores, there)]
    named = labels[1:] if is_binary else labels
    usual, tuned = (
        dict(zip(named, np.nan_to_num(f1_at(scores, there, at)).tolist(), strict=True)) for at in (0.5, found)
    )
    thresholds = dict(zip(named, found, strict=True))
    if is_binary:
        thresholds = {labels[0]: round(1 - found[0], 6), **thresholds}
    return Tuned(thresholds, usual, tuned, len(scores), predictions.name)

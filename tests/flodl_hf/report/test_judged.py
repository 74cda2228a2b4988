"""What is counted agrees with counting by hand, for drawn predictions of every size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from flodl_hf.inference.metrics import SpanF1
from flodl_hf.tokenization.alignment import spans_of
from flodl_hf.training.report.figures import best_thresholds, calibration, confusion, precision_recall, span_errors

DRAWN = settings(max_examples=60, deadline=None)


@DRAWN
@given(some.lists(some.tuples(some.integers(0, 3), some.integers(0, 3)), max_size=40))
def test_confusion(pairs: list[tuple[int, int]]) -> None:
    said, truth = (np.array([pair[i] for pair in pairs], np.int64) for i in (0, 1))
    table = confusion(said, truth, 4)
    assert table.tolist() == [[pairs.count((j, i)) for j in range(4)] for i in range(4)]


def test_calibration_by_hand() -> None:
    found = calibration(np.array([0.15, 0.2, 0.95, 0.85, 1.0]), np.array([True, False, True, True, False]), bins=10)
    assert found.counts.tolist() == [0, 2, 0, 0, 0, 0, 0, 0, 1, 2]
    expected = (2 * abs(0.175 - 0.5) + abs(0.85 - 1) + 2 * abs(0.975 - 0.5)) / 5
    assert found.error == pytest.approx(expected)
    assert np.isnan(found.sure[0])
    perfect = calibration(np.array([1.0, 1.0, 0.0]), np.array([True, True, False]))
    assert perfect.error == 0
    assert calibration(np.zeros(0), np.zeros(0, bool)).error == 0


@DRAWN
@given(some.lists(some.tuples(some.integers(0, 9), some.booleans()), min_size=1, max_size=30))
def test_precision_and_recall(pairs: list[tuple[int, bool]]) -> None:
    scores, truth = np.array([p[0] / 9 for p in pairs]), np.array([p[1] for p in pairs])
    curve = precision_recall(scores, truth)
    assert curve.thresholds.tolist() == sorted(set(scores.tolist()), reverse=True)
    for threshold, precision, recall in zip(curve.thresholds, curve.precision, curve.recall, strict=True):
        found = scores >= threshold
        assert precision == pytest.approx((found & truth).sum() / found.sum())
        assert recall == pytest.approx((found & truth).sum() / truth.sum()) if truth.any() else np.isnan(recall)
    if truth.any():
        steps = zip(curve.precision, np.diff(curve.recall, prepend=0.0), strict=True)
        assert curve.average == pytest.approx(sum(p * step for p, step in steps))
    else:
        assert np.isnan(curve.average)


def test_precision_and_recall_of_no_scores() -> None:
    curve = precision_recall(np.zeros(0), np.zeros(0, bool))
    assert curve.thresholds.size == curve.precision.size == curve.recall.size == 0
    assert np.isnan(curve.average)


def f1_of(scores: np.ndarray, truth: np.ndarray, threshold: float) -> float:
    said = scores >= threshold
    total = said.sum() + truth.sum()
    return 2 * (said & truth).sum() / total if total else 0.0


@DRAWN
@given(some.lists(some.tuples(some.integers(0, 20), some.booleans()), min_size=2, max_size=40))
def test_no_threshold_is_better_than_the_best(pairs: list[tuple[int, bool]]) -> None:
    scores, truth = np.array([p[0] / 20 for p in pairs]), np.array([p[1] for p in pairs])
    chosen = best_thresholds(scores[:, None], truth[:, None])[0]
    if not truth.any() or truth.all():
        assert chosen == 0.5
        return
    best = max(f1_of(scores, truth, t) for t in np.linspace(0, 1, 81))
    assert f1_of(scores, truth, chosen) == pytest.approx(best)


TAGS = some.sampled_from(("O", "B-A", "I-A", "B-B", "I-B"))


@DRAWN
@given(some.lists(some.lists(some.tuples(TAGS, TAGS), max_size=12), max_size=5))
def test_every_span_is_counted_once(sentences: list[list[tuple[str, str]]]) -> None:
    said = [[pair[0] for pair in line] for line in sentences]
    truth = [[pair[1] for pair in line] for line in sentences]
    found = span_errors(said, truth)
    there = sum(len(spans_of(tags)) for tags in truth)
    counted = sum(count for row in found.values() for kind, count in row.items() if kind != "spurious")
    assert counted == there
    if there and any(spans_of(tags) for tags in said):
        metric = SpanF1()
        metric.update(said, truth)
        recall = metric.compute()["recall"]
        assert sum(row.get("right", 0) for row in found.values()) == pytest.approx(recall * there)


def test_span_errors_by_hand() -> None:
    truth = [["B-A", "I-A", "O", "B-B", "O", "B-A", "O", "O"]]
    said = [["B-A", "O", "O", "B-A", "O", "O", "B-B", "O"]]
    found = span_errors(said, truth)
    assert found == {"A": {"wrong_border": 1, "missed": 1}, "B": {"wrong_label": 1, "spurious": 1}}

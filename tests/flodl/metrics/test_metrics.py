"""Metrics equal the established tools' figures, and any split into batches and ranks gives the same ones.

The golden file was recorded from scikit-learn 1.9 and SciPy 1.17; neither is needed to run the tests.
"""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flodl.errors import DataError
from flodl.metrics import (
    Accuracy,
    Classification,
    Metric,
    MultiLabel,
    Pearson,
    Spearman,
    SquaredError,
    merged,
    regression,
)

HERE = Path(__file__).parent
FIGURES = json.loads((HERE / "golden_figures.json").read_text())


def close(found, expected):
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


# ------------------------------------------------------------------------------------------- golden files


@pytest.mark.parametrize("case", FIGURES["classes"])
def test_class_figures_equal_those_of_scikit_learn(case):
    for average, scores in case["scores"].items():
        metric = Classification(case["n"], average)
        metric.update(torch.tensor(case["pred"]), torch.tensor(case["true"]))
        out = metric.compute()
        close([out["precision"], out["recall"], out["f1"]], scores)
        close([out["accuracy"], out["mcc"]], [case["accuracy"], case["mcc"]])


@pytest.mark.parametrize("case", FIGURES["multilabel"])
def test_multi_label_figures_equal_those_of_scikit_learn(case):
    true, pred = torch.tensor(case["true"]), torch.tensor(case["pred"])
    for average, scores in case["scores"].items():
        for said in (pred, (pred.float() - 0.5) * 8):
            metric = MultiLabel(true.shape[1], average)
            metric.update(said, true)
            out = metric.compute()
            close([out["precision"], out["recall"], out["f1"], out["accuracy"]], [*scores, case["accuracy"]])


@pytest.mark.parametrize("case", FIGURES["numbers"])
def test_correlations_and_errors_equal_those_of_scipy(case):
    x, y = torch.tensor(case["x"], dtype=torch.float64), torch.tensor(case["y"], dtype=torch.float64)
    metrics = [Pearson(), Spearman(), SquaredError()]
    for start in range(0, len(x), 5):
        for metric in metrics:
            metric.update(x[start : start + 5], y[start : start + 5])
    out = {k: v for metric in metrics for k, v in metric.compute().items()}
    for name in ("pearson", "spearman", "mse", "mae"):
        # at a mean of 1e6 a double keeps ten digits of a distance of 1
        assert out[name] == pytest.approx(case[name], rel=1e-8)
    assert out["rmse"] == pytest.approx(math.sqrt(case["mse"]))


# -------------------------------------------------------------------------------------- splits and ranks


def make_metrics():
    return [
        Accuracy(),
        Classification(3),
        MultiLabel(3, "micro"),
        SquaredError(),
        Pearson(),
        Spearman(),
    ]


def feed(metric, logits, labels):
    if isinstance(metric, (Accuracy, Classification)):
        metric.update(logits, labels)
    elif isinstance(metric, MultiLabel):
        metric.update(logits, torch.nn.functional.one_hot(labels.clamp(min=0), 3))
    else:
        metric.update(logits[:, 0], labels.double())


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 25), st.lists(st.integers(1, 24), max_size=4), st.integers(1, 3), st.integers(0, 10**6))
def test_any_split_over_batches_and_ranks_gives_the_same_figures(n, cuts, ranks, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, 3, generator=generator)
    labels = torch.randint(-1, 3, (n,), generator=generator)
    labels[labels < 0] = -100
    edges = sorted({0, n, *(c for c in cuts if c < n)})
    for whole, *parts in zip(make_metrics(), *(make_metrics() for _ in range(ranks)), strict=True):
        assert isinstance(whole, Metric)
        feed(whole, logits, labels)
        for k, (a, b) in enumerate(pairwise(edges)):
            feed(parts[k % ranks], logits[a:b], labels[a:b])
        states = json.loads(json.dumps([part.state_dict() for part in parts]))
        together = merged(parts[0], states).compute()
        expected = whole.compute()
        assert together.keys() == expected.keys()
        for name, value in expected.items():
            assert together[name] == pytest.approx(value, rel=1e-6, abs=1e-9, nan_ok=True), (name, whole)


def test_nothing_kept_grows_with_the_data_but_spearman():
    sizes = []
    for rounds in (1, 50):
        metrics = make_metrics()
        for _ in range(rounds):
            for metric in metrics:
                feed(metric, torch.ones(4, 3), torch.tensor([0, 1, 2, -100]))
        sizes.append([len(json.dumps(m.state_dict())) for m in metrics if not isinstance(m, Spearman)])
    assert max(b - a for a, b in zip(*sizes, strict=True)) < 40


@pytest.mark.parametrize("index", range(6))
def test_reset_forgets_and_empty_metrics_have_figures(index):
    fresh, used = make_metrics()[index], make_metrics()[index]
    feed(used, torch.eye(3), torch.tensor([0, 1, 1]))
    assert used.state_dict() != fresh.state_dict()
    used.reset()
    assert used.state_dict() == fresh.state_dict()
    assert used.compute()["count"] == 0


# ------------------------------------------------------------------------------------------- behaviours


def test_no_gradient_is_kept():
    metric = SquaredError()
    metric.update(torch.ones(2, requires_grad=True), torch.zeros(2))
    assert not metric._sums.requires_grad


def test_ignored_labels_do_not_count():
    logits, labels = torch.eye(3)[None], torch.tensor([[0, -100, 1]])
    accuracy, classes = Accuracy(), Classification(3)
    accuracy.update(logits, labels)
    classes.update(logits, labels)
    assert accuracy.compute() == {"accuracy": 0.5, "count": 2.0}
    assert classes.matrix().tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 0]]


def test_undefined_correlations_are_nan():
    metric = Pearson()
    metric.update(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 2.0]))
    assert math.isnan(metric.compute()["pearson"])


def test_pearson_survives_a_large_mean():
    x = torch.arange(1000, dtype=torch.float64)
    metric = Pearson()
    for part in x.split(7):
        metric.update(part + 1e9, -part)
    assert metric.compute()["pearson"] == pytest.approx(-1, abs=1e-9)


def test_spearman_is_bounded(monkeypatch):
    monkeypatch.setattr(regression, "MAX_VALUES", 3)
    metric = Spearman()
    metric.update(torch.ones(3), torch.ones(3))
    with pytest.raises(DataError, match="expected at most 3"):
        metric.update(torch.ones(1), torch.ones(1))


@pytest.mark.parametrize(
    "act",
    [
        lambda: Classification(3, "micro-macro"),  # type: ignore[arg-type]
        lambda: Classification(3, "binary"),
        lambda: Classification(2).update(torch.ones(3), torch.ones(2)),
        lambda: Classification(2).load_state_dict({"counts": [1, 2]}),
        lambda: MultiLabel(2, "binary"),
        lambda: MultiLabel(2).update(torch.ones(1, 3), torch.ones(1, 3)),
        lambda: Pearson().update(torch.ones(1), torch.ones(2)),
    ],
)
def test_what_cannot_be_measured_is_refused(act):
    with pytest.raises(DataError):
        act()


def test_labels_out_of_range_are_reported_when_figures_are_asked():
    metric = Classification(2)
    metric.update(torch.tensor([0, 1]), torch.tensor([0, 7]))
    with pytest.raises(DataError) as caught:
        metric.compute()
    assert caught.value.count == 1

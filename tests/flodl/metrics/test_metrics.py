"""Metrics equal the established tools' figures, and any split into batches and ranks gives the same ones.

The golden files were recorded from seqeval 1.2.2 (``golden_spans.json``) and from scikit-learn 1.9 and
SciPy 1.17 (``golden_figures.json``); neither is needed to run the tests.
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
    AnswerF1,
    Classification,
    Metric,
    MultiLabel,
    Pearson,
    Perplexity,
    SpanF1,
    Spearman,
    SquaredError,
    answer_scores,
    merged,
    normalized_answer,
    spans_of,
)

HERE = Path(__file__).parent
SPANS = json.loads((HERE / "golden_spans.json").read_text())
FIGURES = json.loads((HERE / "golden_figures.json").read_text())


def close(found, expected):
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


# ------------------------------------------------------------------------------------------- golden files


@pytest.mark.parametrize("case", SPANS, ids=lambda c: str(c["scheme"]))
def test_spans_equal_those_of_seqeval(case):
    assert [[list(s) for s in spans_of(tags, case["scheme"])] for tags in case["true"]] == case["spans"]
    for average, scores in case["scores"].items():
        metric = SpanF1(case["scheme"], average)
        metric.update(case["pred"], case["true"])
        out = metric.compute()
        # seqeval warns and gives NaN where neither side has a span; 0 is what its other averages give there
        expected = [0.0 if score is None else score for score in scores]
        assert None not in scores or not metric.per_type()
        close([out["precision"], out["recall"], out["f1"]], expected)


def test_the_span_cases_cover_each_scheme():
    assert {case["scheme"] for case in SPANS} == {None, "IOB2", "IOBES", "BILOU"}


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
        Classification(3, names=["a", "b", "c"]),
        MultiLabel(3, "micro"),
        SquaredError(),
        Pearson(),
        Spearman(),
        Perplexity(),
        SpanF1(),
        AnswerF1(),
    ]


def feed(metric, logits, labels):
    if isinstance(metric, (Accuracy, Classification, Perplexity)):
        metric.update(logits, labels)
    elif isinstance(metric, MultiLabel):
        metric.update(logits, torch.nn.functional.one_hot(labels.clamp(min=0), 3))
    elif isinstance(metric, (SquaredError, Pearson, Spearman)):
        metric.update(logits[:, 0], labels.double())
    elif isinstance(metric, SpanF1):
        metric.update_ids(logits[:, None], labels[:, None], ["O", "B-x", "I-y"])
    else:
        words = ["the cat", "a dog", "dog"]
        said = [words[i] for i in logits.argmax(-1).tolist()]
        metric.update(said, [[words[i]] if i >= 0 else [] for i in labels.tolist()])


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


@pytest.mark.parametrize("index", range(9))
def test_reset_forgets_and_empty_metrics_have_figures(index):
    fresh, used = make_metrics()[index], make_metrics()[index]
    feed(used, torch.eye(3), torch.tensor([0, 1, 1]))
    assert used.state_dict() != fresh.state_dict()
    used.reset()
    assert used.state_dict() == fresh.state_dict()
    assert used.compute()["count"] == 0


def test_half_precision_logits_and_no_gradient():
    logits = torch.tensor([[4.0, 0.0]], dtype=torch.bfloat16, requires_grad=True)
    metric = Perplexity()
    metric.update(logits, torch.tensor([0]))
    assert metric.compute()["loss"] == pytest.approx(math.log(1 + math.exp(-4)), rel=1e-5)
    assert not metric._sums.requires_grad


# ------------------------------------------------------------------------------------------- behaviours


def test_ignored_labels_do_not_count():
    logits, labels = torch.eye(3)[None], torch.tensor([[0, -100, 1]])
    accuracy, classes = Accuracy(), Classification(3)
    accuracy.update(logits, labels)
    classes.update(logits, labels)
    assert accuracy.compute() == {"accuracy": 0.5, "count": 2.0}
    assert classes.matrix().tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 0]]


def test_figures_per_class_carry_their_names():
    metric = Classification(3, names=["neg", "neu", "pos"])
    metric.update(torch.tensor([0, 2, 2]), torch.tensor([0, 2, 0]))
    out = metric.compute()
    assert out["f1/pos"] == pytest.approx(2 / 3)
    assert "f1/neu" not in out
    assert [row["support"] for row in metric.per_class()] == [2, 0, 1]


def test_multi_label_threshold_is_a_probability():
    logits = torch.tensor([[0.0, 1.0, 3.0]])
    for threshold, count in ((0.4, 3), (0.6, 2), (0.9, 1)):
        metric = MultiLabel(3, "micro", threshold=threshold)
        metric.update(logits, torch.tensor([[0, 0, 1]]))
        assert metric.compute()["precision"] == pytest.approx(1 / count)


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


def test_spearman_is_bounded():
    metric = Spearman(max_values=3)
    metric.update(torch.ones(3), torch.ones(3))
    with pytest.raises(DataError, match="max_values"):
        metric.update(torch.ones(1), torch.ones(1))


def test_perplexity_of_uniform_guesses_is_the_vocabulary_size():
    metric = Perplexity()
    metric.update(torch.zeros(2, 3, 50), torch.tensor([[1, 2, -100], [-100, 4, 5]]))
    out = metric.compute()
    assert out["perplexity"] == pytest.approx(50, rel=1e-6)
    assert out["count"] == 4
    metric.add(1e9, 1)
    assert metric.compute()["perplexity"] == math.inf


def test_a_type_may_hold_dashes_and_figures_are_per_type():
    metric = SpanF1()
    metric.update([["B-creative-work", "O", "B-a"]], [["B-creative-work", "I-creative-work", "B-a"]])
    out = metric.compute()
    assert out["f1/creative-work"] == 0
    assert out["f1/a"] == 1
    assert (out["f1"], out["count"]) == (0.5, 2)


NORMAL = [
    ("The  Cat!", "cat"),
    ("an A the", ""),
    ("theory of a-b", "theory of ab"),
    ("U.S.", "us"),
    ("\u201cQuoted\u201d", "\u201cquoted\u201d"),
]
SCORES = [
    ("Norman", ["Normans", "Norman"], 1, 1),
    ("the big cat", ["big cat sat"], 0, 0.8),
    ("dog", ["cat"], 0, 0),
    ("", [], 1, 1),
    ("cat", [], 0, 0),
    ("", ["cat"], 0, 0),
    ("the", ["a"], 1, 1),
    ("cat cat", ["cat"], 0, 2 / 3),
    ("", ["the", "cat"], 0, 0),
]


@pytest.mark.parametrize(("text", "expected"), NORMAL)
def test_answers_are_normalised_as_published(text, expected):
    assert normalized_answer(text) == expected


@pytest.mark.parametrize(("said", "answers", "exact", "f1"), SCORES)
def test_answers_are_scored_as_published(said, answers, exact, f1):
    assert answer_scores(said, answers) == (exact, pytest.approx(f1))


def test_answer_figures_are_percentages_and_kinds_stand_apart():
    metric = AnswerF1()
    metric.update([row[0] for row in SCORES], [row[1] for row in SCORES])
    out = metric.compute()
    assert out["count"] == 9
    assert out["exact_match"] == pytest.approx(100 * 3 / 9)
    assert out["exact_match/unanswerable"] == pytest.approx(100 * 2 / 3)
    assert out["exact_match/answerable"] == pytest.approx(100 / 6)


@pytest.mark.parametrize(
    "act",
    [
        lambda: Classification(3, "micro-macro"),  # type: ignore[arg-type]
        lambda: Classification(3, "binary"),
        lambda: Classification(2, names=["a"]),
        lambda: Classification(2).update(torch.ones(3), torch.ones(2)),
        lambda: Classification(2).load_state_dict({"counts": [1, 2]}),
        lambda: MultiLabel(2, "binary"),
        lambda: MultiLabel(2, threshold=1),
        lambda: MultiLabel(2).update(torch.ones(1, 3), torch.ones(1, 3)),
        lambda: Pearson().update(torch.ones(1), torch.ones(2)),
        lambda: SpanF1(average="binary"),
        lambda: SpanF1("IOB2").update([["E-x"]], [["O"]]),
        lambda: spans_of(["O"], "IOB9"),  # type: ignore[arg-type]
        lambda: SpanF1().update([["O"]], [["O", "O"]]),
        lambda: SpanF1().update([], [["O"]]),
        lambda: AnswerF1().update(["a"], []),
        lambda: AnswerF1().update(["a"], ["abc"]),
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

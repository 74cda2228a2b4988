"""Metrics of texts equal published figures, and any split into batches and ranks gives the same ones.

The golden file was recorded from seqeval 1.2.2, which is not needed to run the tests.
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
from flodl.metrics import Metric, merged
from flodl_hf.inference.metrics import AnswerF1, Perplexity, SpanF1, answer_scores
from flodl_hf.tokenization.alignment import spans_of

SPANS = json.loads((Path(__file__).parent / "golden_spans.json").read_text())
TAGS = ["O", "B-x", "I-y"]
TEXTS = ["the cat", "a dog", "dog"]


@pytest.mark.parametrize("case", SPANS, ids=lambda c: str(c["scheme"]))
def test_spans_equal_those_of_seqeval(case):
    assert [[list(s) for s in spans_of(tags, case["scheme"])] for tags in case["true"]] == case["spans"]
    metric = SpanF1(case["scheme"])
    metric.update(case["pred"], case["true"])
    out = metric.compute()
    assert [out["precision"], out["recall"], out["f1"]] == pytest.approx(case["scores"]["micro"], rel=1e-9, abs=1e-12)
    kinds = metric.per_type().values()
    mean = [sum(row[name] for row in kinds) / max(1, len(kinds)) for name in ("precision", "recall", "f1")]
    expected = [score or 0.0 for score in case["scores"]["macro"]]
    assert mean == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_the_span_cases_cover_each_scheme():
    assert {case["scheme"] for case in SPANS} == {None, "IOB2", "IOBES", "BILOU"}


def feed(metric, logits, labels):
    found, true = logits.argmax(-1).tolist(), labels.tolist()
    if isinstance(metric, Perplexity):
        metric.update(logits, labels)
    elif isinstance(metric, SpanF1):
        metric.update([[TAGS[i]] for i in found], [[TAGS[max(i, 0)]] for i in true])
    else:
        metric.update([TEXTS[i] for i in found], [[TEXTS[i]] if i >= 0 else [] for i in true])


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 25), st.lists(st.integers(1, 24), max_size=4), st.integers(1, 3), st.integers(0, 10**6))
@pytest.mark.parametrize("make", [Perplexity, SpanF1, AnswerF1])
def test_any_split_over_batches_and_ranks_gives_the_same_figures(make, n, cuts, ranks, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, 3, generator=generator)
    labels = torch.randint(-1, 3, (n,), generator=generator)
    labels[labels < 0] = -100
    edges = sorted({0, n, *(c for c in cuts if c < n)})
    whole, parts = make(), [make() for _ in range(ranks)]
    assert isinstance(whole, Metric)
    feed(whole, logits, labels)
    for k, (a, b) in enumerate(pairwise(edges)):
        feed(parts[k % ranks], logits[a:b], labels[a:b])
    states = json.loads(json.dumps([part.state_dict() for part in parts]))
    expected = whole.compute()
    assert merged(make(), states).compute() == pytest.approx(expected, rel=1e-6, abs=1e-9, nan_ok=True)
    whole.reset()
    assert whole.state_dict() == make().state_dict()
    assert whole.compute()["count"] == 0


def test_half_precision_logits_and_no_gradient():
    logits = torch.tensor([[4.0, 0.0]], dtype=torch.bfloat16, requires_grad=True)
    metric = Perplexity()
    metric.update(logits, torch.tensor([0]))
    assert metric.compute()["loss"] == pytest.approx(math.log(1 + math.exp(-4)), rel=1e-5)
    assert not metric._sums.requires_grad


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
    assert answer_scores(text, [expected])[0] == 1


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

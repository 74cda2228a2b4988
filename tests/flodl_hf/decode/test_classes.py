"""Scores are those of the chosen function, merged over windows as documented, in a stable order."""

from __future__ import annotations

from math import exp

import numpy as np
import pytest
import torch

from flodl_hf.errors import PredictError
from flodl_hf.inference.classes import (
    Classification,
    activation_for,
    contradiction_id,
    decode_classes,
    decode_ranking,
    decode_zero_shot,
    entailment_id,
)


@pytest.mark.parametrize(
    ("problem", "size", "asked", "expected"),
    [
        (None, 2, None, "softmax"),
        (None, 1, None, "sigmoid"),
        ("single_label_classification", 3, None, "softmax"),
        ("multi_label_classification", 3, None, "sigmoid"),
        ("regression", 1, None, "none"),
        ("regression", 3, None, "none"),
        ("regression", 1, "sigmoid", "sigmoid"),
        (None, 2, "NONE", "none"),
    ],
)
def test_the_function_is_chosen_as_transformers_chooses_it(problem, size, asked, expected) -> None:
    assert activation_for(problem, size, asked) == expected


def test_an_unknown_function_is_refused() -> None:
    with pytest.raises(PredictError, match="softplus"):
        activation_for(None, 2, "softplus")


def test_labels_come_best_first_and_equal_ones_in_order() -> None:
    (found,) = decode_classes(torch.tensor([[1.0, 2.0, 1.0]]), ["a", "b", "c"])
    assert [c.label for c in found] == ["b", "a", "c"]
    assert found[0].score == pytest.approx(exp(1) / (2 + exp(1)))
    assert sum(c.score for c in found) == pytest.approx(1)
    (best,) = decode_classes(torch.tensor([[1.0, 2.0, 1.0]]), ["a", "b", "c"], top_k=1)
    assert best == found[:1]


def test_regression_gives_the_value_itself() -> None:
    (found,) = decode_classes(torch.tensor([[3.7]]), ["stars"], problem_type="regression")
    assert found == [Classification("stars", pytest.approx(3.7), 1)]


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        (None, ["b", "c", "a"]),
        (0.5, ["b", "c"]),
        (0.95, []),
        ([0.1, 0.95, 0.0], ["c", "a"]),
        ({"b": 0.95}, ["c", "a"]),
    ],
)
def test_thresholds_choose_labels(threshold, expected) -> None:
    logits = torch.tensor([[-1.0, 2.0, 0.5]])
    (found,) = decode_classes(logits, ["a", "b", "c"], problem_type="multi_label_classification", threshold=threshold)
    assert [c.label for c in found] == expected


def test_a_long_text_has_the_weighted_mean_of_its_windows() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 3.0]])
    short, long = decode_classes(logits, ["a", "b"], owners=np.array([1, 0, 1]), weights=[30, 7, 10], texts=2)
    assert [c.windows for c in short + long] == [1, 1, 2, 2]
    p, q = exp(2) / (exp(2) + 1), 1 / (exp(3) + 1)
    assert {c.label: c.score for c in long}["a"] == pytest.approx((30 * p + 10 * q) / 40)
    assert short == decode_classes(logits[1:2], ["a", "b"])[0]


def test_windows_of_no_content_still_count() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 0.0]])
    (found,) = decode_classes(logits, ["a", "b"], owners=np.array([0, 0]), weights=[0, 0], texts=1)
    assert sum(c.score for c in found) == pytest.approx(1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_scores_are_computed_in_float32(dtype) -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]], dtype=dtype)
    assert decode_classes(logits, ["a", "b", "c"]) == decode_classes(logits.float(), ["a", "b", "c"])


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"logits": torch.zeros(1, 3)}, "2 labels"),
        ({"logits": torch.full((1, 2), torch.inf)}, "finite"),
        ({"top_k": 0}, "top_k"),
        ({"threshold": [0.1]}, "1 thresholds"),
        ({"threshold": {"z": 0.1}}, "unknown labels"),
    ],
)
def test_what_does_not_fit_is_refused(change, word) -> None:
    given = {"logits": torch.zeros(1, 2), "labels": ["a", "b"], **change}
    with pytest.raises(PredictError, match=word):
        decode_classes(**given)


NLI = ["contradiction", "neutral", "entailment"]


@pytest.mark.parametrize(
    ("labels", "entailment", "contradiction"),
    [
        (NLI, 2, 0),
        (["ENTAILMENT", "NEUTRAL", "CONTRADICTION"], 0, 2),
        (["neutral", "entailment", "contradiction"], 1, 2),
        (["entailment", "not_entailment"], 0, 1),
        (["LABEL_0", "entails", "LABEL_2"], 1, 0),
    ],
)
def test_nli_labels_are_found_by_name(labels, entailment, contradiction) -> None:
    assert entailment_id(labels) == entailment
    assert contradiction_id(labels, entailment) == contradiction


def test_a_model_without_entailment_is_no_nli_model() -> None:
    with pytest.raises(PredictError, match="entail"):
        entailment_id(["positive", "negative"])


def test_zero_shot_weighs_candidates_against_each_other_or_each_alone() -> None:
    logits, ones = torch.tensor([[0.0, 9.0, 1.0], [2.0, 0.0, 3.0]]), np.ones(2)
    how = {"entailment": 2, "contradiction": 0, "owners": np.arange(2), "weights": ones}
    (one,) = decode_zero_shot(logits, ["sport", "politics"], **how)
    one_candidate = torch.tensor([[1.0, 0.0, 2.0]])
    (alone,) = decode_zero_shot(one_candidate, ["music"], **{**how, "owners": np.arange(1), "weights": ones[:1]})
    assert [c.label for c in one] == ["politics", "sport"]
    assert one[0].score == pytest.approx(exp(3) / (exp(1) + exp(3)))
    assert alone[0].score == pytest.approx(exp(2) / (exp(1) + exp(2)))
    (many,) = decode_zero_shot(logits, ["sport", "politics"], **how, multi_label=True)
    scores = {c.label: c.score for c in many}
    assert scores["sport"] == pytest.approx(exp(1) / (1 + exp(1)))
    assert scores["politics"] == pytest.approx(exp(3) / (exp(2) + exp(3)))


def test_zero_shot_averages_the_windows_of_a_pair() -> None:
    logits = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 4.0], [0.0, 0.0, 2.0]])
    (found,) = decode_zero_shot(
        logits, ["a", "b"], entailment=2, contradiction=0, owners=np.array([0, 0, 1]), weights=np.array([2, 1, 5])
    )
    assert [c.windows for c in sorted(found, key=lambda c: c.label)] == [2, 1]
    assert found[0].score == pytest.approx(0.5)


def test_ranking_takes_the_best_window_of_each_document() -> None:
    logits = torch.tensor([[0.5], [2.0], [-1.0], [2.0]])
    ranked = decode_ranking(logits, owners=np.array([0, 2, 2, 1]), activation="none")
    assert [(r.index, r.score, r.windows) for r in ranked] == [(1, 2.0, 1), (2, 2.0, 2), (0, 0.5, 1)]
    assert [r.index for r in decode_ranking(logits, top_k=2)] == [1, 3]
    assert decode_ranking(logits)[0].score == pytest.approx(1 / (1 + exp(-2)))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"logits": torch.zeros(2, 2)}, "one label"),
        ({"activation": "softmax"}, "softmax"),
        ({"logits": torch.tensor([torch.nan])}, "finite"),
    ],
)
def test_what_cannot_be_ranked_is_refused(change, word) -> None:
    with pytest.raises(PredictError, match=word):
        decode_ranking(**{"logits": torch.zeros(2, 1), **change})

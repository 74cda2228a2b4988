"""Answers that are made in bulk are what their class makes of the same values."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flodl_hf.errors import PredictError
from flodl_hf.inference.classes import Classification, decode_classes
from flodl_hf.inference.entities import Entity, _best, _entities, _softmax
from flodl_hf.inference.results import build_records


@pytest.mark.parametrize(
    ("kind", "values"),
    [(Classification, ("POSITIVE", 0.75, 2)), (Entity, ("PER", 0.5, 4, 9, "Marie", (1, 2), (2, 4)))],
)
def test_bulk_made_records_are_their_class(kind: type, values: tuple[object, ...]) -> None:
    one, other = build_records(kind, *([value, value] for value in values))
    right = kind(*values)
    assert one == other == right
    assert type(one) is kind
    assert hash(one) == hash(right)
    assert repr(one) == repr(right)
    assert pickle.loads(pickle.dumps(one)) == right
    assert copy.deepcopy(one) == right
    with pytest.raises(FrozenInstanceError):
        one.score = 1.0  # type: ignore[attr-defined]
    assert not hasattr(one, "__dict__")


SPACES = st.text(" \t\n\u3000\u00a0\x1fab", min_size=0, max_size=8)


@given(st.lists(st.tuples(SPACES, st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=4)), max_size=4))
@settings(max_examples=150, deadline=None)
def test_entities_hold_no_outer_white_space_and_empty_ones_are_gone(
    given_: list[tuple[str, list[tuple[int, int]]]],
) -> None:
    texts, expected, columns = [text for text, _ in given_], [], []
    for owner, (text, spans) in enumerate(given_):
        right = []
        for a, b in spans:
            low, high = sorted((min(a, len(text)), min(b, len(text))))
            columns.append((owner, low, high))
            word = text[low:high]
            if word.strip():
                start = low + len(word) - len(word.lstrip())
                right.append((start, start + len(word.strip()), word.strip()))
        expected.append(right)
    rows = np.array(columns, np.int64).reshape(-1, 3)
    count = len(rows)
    spans = tuple(np.arange(count) + i for i in range(4))
    found = _entities(texts, rows[:, 0], ["X"] * count, np.ones(count), rows[:, 1], rows[:, 2], spans)
    assert [[(e.start, e.end, e.word) for e in es] for es in found] == expected


def test_distributions_in_columns_are_those_of_torch() -> None:
    import torch

    logits = torch.randn(50, 9, generator=torch.Generator().manual_seed(0)) * 5
    logits[3] = 0.25
    place = np.array([4, 3, 3, 49, 0])
    for values in (logits, logits.double()):
        right = torch.softmax(values.float()[place], -1).numpy()
        found = _softmax(values, place)
        np.testing.assert_allclose(found.T, right, rtol=0, atol=1e-6)
        labels, score = _best(found)
        assert labels.tolist() == right.argmax(1).tolist()
        np.testing.assert_allclose(score, right.max(1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("labels", [2, 7, 9, 37])
def test_a_tokens_distribution_does_not_depend_on_the_tokens_beside_it(labels: int) -> None:
    logits = torch.randn(200, labels, generator=torch.Generator().manual_seed(0)) * 4
    together = _softmax(logits, np.arange(200))
    for token in range(200):
        assert np.array_equal(_softmax(logits, np.array([token]))[:, 0], together[:, token])


@pytest.mark.parametrize("wrong", [float("inf"), float("-inf"), float("nan")])
def test_logits_that_are_not_finite_are_refused(wrong: float) -> None:
    logits = torch.tensor([[0.0, 1.0, wrong], [0.0, 1.0, 2.0]])
    with pytest.raises(PredictError, match="not finite"):
        _softmax(logits, np.arange(2))
    for function in ("softmax", "sigmoid", "none"):
        with pytest.raises(PredictError, match="not finite"):
            decode_classes(logits, ("A", "B", "C"), function_to_apply=function)

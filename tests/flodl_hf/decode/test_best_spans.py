"""The best span of each context, found among all contexts at once, is the one found context by context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flodl_hf.inference import spans as best_module
from flodl_hf.inference.spans import best_spans
from flodl_hf.inference.words import TokenStream, units_at, words_of
from flodl_hf.tokenization.cuts import Row

from .conftest import answers_of

PIECES = ["Ada", " ", "ü", "(x)", "東京", "3.14", ",", "👩", "o"]


def drawn_text(draw: np.random.Generator) -> tuple[str, list[tuple[int, int]], list[int | None]]:
    """Return a text with spans of tokens, some of which share characters, are blank or have no word."""
    text, spans, words = "", [], []
    for word in range(int(draw.integers(1, 7))):
        for _ in range(int(draw.integers(1, 4))):
            piece = PIECES[int(draw.integers(len(PIECES)))]
            start = len(text)
            text += piece
            # Bytes of one character are tokens of one span.
            spans += [(start, len(text))] * (2 if piece == "👩" else 1)
            words += [None if draw.random() < 0.1 else word] * (2 if piece == "👩" else 1)
    return text, spans, words


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.integers(1, 40))
def test_units_of_a_few_tokens_are_those_among_all(seed: int, whole: bool, wanted: int) -> None:
    draw = np.random.default_rng(seed)
    made = [drawn_text(draw) for _ in range(int(draw.integers(1, 4)))]
    text = np.repeat(np.arange(len(made)), [len(spans) for _, spans, _ in made])
    spans = np.array([span for _, own, _ in made for span in own], np.int64).reshape(-1, 2)
    ids = np.array([-1 if word is None else word for _, _, own in made for word in own], np.int64)
    place = np.arange(len(text))
    stream = TokenStream(text, place, text, place, spans, ids)
    texts = [own for own, _, _ in made]
    tokens = draw.integers(0, len(text), min(wanted, len(text)))
    words = words_of(stream, texts, whole=whole)
    start, end = units_at(stream, texts, tokens, whole=whole)
    assert start.tolist() == words.start[words.of_token[tokens]].tolist()
    assert end.tolist() == words.end[words.of_token[tokens]].tolist()


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 12), st.integers(1, 12), st.integers(0, 10**6),
    st.booleans(),
)  # fmt: skip
def test_best_spans_are_all_from_the_least_sum_on(
    counts: list[int], longest: int, count: int, seed: int, ties: bool
) -> None:
    draw = np.random.default_rng(seed)
    logits = (3 * draw.standard_normal((2, sum(counts)))).astype(np.float32)
    logits = logits.round() if ties else logits
    owner = np.sort(draw.integers(0, 4, len(counts)))
    row, text = np.repeat(np.arange(len(counts)), counts), np.repeat(owner, counts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(best_module, "_BLOCK", int(draw.integers(1, 30)))
        patch.setattr(best_module, "_BAND", int(draw.integers(1, 60)))
        first, last, value, least = best_spans(logits, row, text, longest, count, 4)
    sums = {
        (i, j): logits[0][i] + logits[1][j]
        for i in range(len(row))
        for j in range(i, min(len(row), i + longest))
        if row[i] == row[j]
    }
    found = dict(zip(zip(first.tolist(), last.tolist(), strict=True), value.tolist(), strict=True))
    assert found == {span: value for span, value in sums.items() if value >= least[text[span[0]]]}
    for own in set(owner.tolist()):
        assert least[own] == -np.inf or sum(text[i] == own for i, _ in found) >= count
        if count == 1:
            assert least[own] == max(value for (i, _), value in sums.items() if text[i] == own)


@pytest.mark.parametrize("count", [28, 200])
@pytest.mark.parametrize("tokens", [25, 100])
def test_number_of_best_spans_is_bounded(tokens: int, count: int) -> None:
    draw = np.random.default_rng(0)
    logits = draw.standard_normal((2, 8 * tokens)).astype(np.float32)
    text = np.repeat(np.arange(8), tokens)
    first, _, value, least = best_spans(logits, text, text, 30, count, 8)
    for own in range(8):
        sums = np.sort(value[text[first] == own])
        assert count <= len(sums) <= count + 2  # sums of float32 may be equal
        assert least[own] == sums[0]


def row_of(spans: list[tuple[int, int]], words: Sequence[int | None], first: int) -> Any:
    count = len(spans)
    return Row(
        ids=list(range(3 + count)),
        type_ids=[0] * (3 + count),
        offsets=[(0, 0), (0, 1), (0, 0), *spans],
        word_ids=[None, 0, None, *words],
        sequence_ids=[None, 0, None, *[1] * count],
        special=[True, False, True, *[False] * count],
        first_token=first,
        window=0,
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.booleans(), st.integers(1, 5), st.floats(-2, 2))
def test_one_answer_is_the_first_of_several(
    seed: int, ties: bool, no_answer: bool, longest: int, margin: float
) -> None:
    draw = np.random.default_rng(seed)
    rows: list[Any] = []
    owners: list[int] = []
    texts: list[str] = []
    for number in range(int(draw.integers(1, 6))):
        text, spans, words = drawn_text(draw) if draw.random() < 0.9 else ("   ", [(0, 1), (1, 3)], [0, 1])
        if draw.random() < 0.1:
            text, spans, words = "", [], []
        texts.append(text)
        cut = int(draw.integers(1, len(spans))) if len(spans) > 1 and draw.random() < 0.3 else len(spans)
        for a, b in ((0, cut), (max(0, cut - 1), len(spans))) if cut < len(spans) else ((0, cut),):
            rows.append(row_of(spans[a:b], words[a:b], a))
            owners.append(number)
    if draw.random() < 0.3:
        order = draw.permutation(len(rows)).tolist()
        rows, owners = [rows[i] for i in order], [owners[i] for i in order]
    logits = [[torch.from_numpy(draw.standard_normal(len(row.ids)) * 2).float() for row in rows] for _ in range(2)]
    if ties:
        logits = [[values.round() for values in side] for side in logits]
    given: dict[str, Any] = {
        "owners": owners, "max_answer_length": longest, "no_answer": no_answer, "null_margin": margin,
    }  # fmt: skip
    start, end = logits
    several = answers_of(start, end, rows, texts, top_k=40, **given)
    one = answers_of(start, end, rows, texts, top_k=1, **given)
    for found, all_found in zip(one, several, strict=True):
        assert [(a.text, a.start, a.end, a.no_answer) for a in found] == [
            (a.text, a.start, a.end, a.no_answer) for a in all_found[:1]
        ]
        assert [a.score for a in found] == pytest.approx([a.score for a in all_found[:1]], rel=1e-12)

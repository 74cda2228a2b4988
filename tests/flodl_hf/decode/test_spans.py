"""Answers are slices of their context, scored once over all windows."""

from __future__ import annotations

import itertools
from math import exp, log

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flodl_hf.errors import PredictError
from flodl_hf.inference.results import Answer
from flodl_hf.tokenization.cuts import Row

from .conftest import answers_of, decode_answers


def window(tokens, first_token=0, question=2):
    """``[CLS] question [SEP] tokens [SEP]``; tokens are ``(start, end, word)``."""
    blank = [(0, 0)]
    full = blank + [(i, i + 1) for i in range(question)] + blank + [(s, e) for s, e, _ in tokens] + blank
    sides = [None] + [0] * question + [None] + [1] * len(tokens) + [None]
    return Row(
        ids=list(range(len(full))),
        type_ids=[side or 0 for side in sides],
        offsets=full,
        word_ids=[None, *range(question), None, *(w for *_, w in tokens), None],
        sequence_ids=sides,
        special=[side is None for side in sides],
        first_token=first_token,
        window=0,
    )


def logits(values, null=-9.0, question=2, noise=50.0):
    """Span logits of a window; question and separators hold values that must not matter."""
    return torch.tensor([null] + [noise] * question + [noise] + list(values) + [noise])


def words_of(text):
    tokens, place = [], 0
    for number, word in enumerate(text.split(" ")):
        tokens.append((place, place + len(word), number))
        place += len(word) + 1
    return tokens


TEXT = "Ada Lovelace lived in London"


def test_the_best_span_wins_and_its_score_is_the_product_of_both_ends() -> None:
    start, end = [3.0, 0.0, 0.0, 0.0, 2.0], [0.0, 3.0, 0.0, 0.0, 2.5]
    (found,) = decode_answers([logits(start)], [logits(end)], [window(words_of(TEXT))], TEXT)
    assert (found.text, found.start, found.end, found.no_answer) == ("Ada Lovelace", 0, 12, False)
    norm = sum(map(exp, start)) + exp(-9), sum(map(exp, end)) + exp(-9)
    assert found.score == pytest.approx(exp(3) / norm[0] * exp(3) / norm[1], rel=1e-6)


def test_the_end_is_never_before_the_start_nor_too_far_behind() -> None:
    start, end = [0.0, 0.0, 0.0, 0.0, 9.0], [9.0, 0.0, 0.0, 1.0, 0.0]
    found = decode_answers([logits(start)], [logits(end)], [window(words_of(TEXT))], TEXT, top_k=50, distinct="span")
    assert len(found) == 15
    assert found[0].text in ("Ada", "London")
    assert all(a.score >= b.score for a, b in itertools.pairwise(found))
    short = decode_answers(
        [logits(start)],
        [logits(end)],
        [window(words_of(TEXT))],
        TEXT,
        top_k=50,
        distinct="span",
        max_answer_length=2,
    )
    assert len(short) == 9
    assert max(len(a.text.split()) for a in short) == 2


def test_answers_at_one_place_are_one_answer() -> None:
    start, end = [0.0, 0.0, 0.0, 5.0, 6.0], [3.0, 0.0, 0.0, 0.0, 6.0]
    options = {"start_logits": [logits(start)], "end_logits": [logits(end)], "rows": [window(words_of(TEXT))]}
    places = decode_answers(**options, context=TEXT, top_k=2)
    assert [a.text for a in places] == ["London", "in"]
    spans = decode_answers(**options, context=TEXT, top_k=2, distinct="span")
    assert [a.text for a in spans] == ["London", "in London"]


def test_the_same_words_elsewhere_are_another_place_but_the_same_text() -> None:
    text = "Paris or paris or Rome"
    rows = [window(words_of(text))]
    values = [5.0, 0.0, 4.0, 0.0, 3.0]
    found = decode_answers([logits(values)], [logits(values)], rows, text, top_k=3, max_answer_length=2)
    assert [a.text for a in found] == ["Paris", "paris", "Rome"]
    found = decode_answers(
        [logits(values)], [logits(values)], rows, text, top_k=2, distinct="text", max_answer_length=2
    )
    assert [a.text for a in found] == ["Paris", "Rome"]


def test_overlap_of_windows_neither_doubles_nor_dilutes_an_answer() -> None:
    tokens = words_of(TEXT)
    sure = [0.0, 0.0, 12.0, 0.0, 0.0]
    rows = [window(tokens[:4]), window(tokens[1:], first_token=1), window(tokens[2:], first_token=2)]
    parts = [logits(sure[:4]), logits(sure[1:]), logits(sure[2:])]
    found = decode_answers(parts, parts, rows, TEXT, top_k=5)
    alone = decode_answers([logits(sure)], [logits(sure)], [window(tokens)], TEXT, top_k=5)
    assert [a.text for a in found][:1] == ["lived"]
    assert found == alone
    assert found[0].score > 0.99


def test_answers_do_not_end_inside_words_unless_asked() -> None:
    text = "the London-based firm"
    tokens = [(0, 3, 0), (4, 8, 1), (8, 10, 1), (10, 11, 2), (11, 16, 3), (17, 21, 4)]
    start, end = [0, 0, 9, 0, 0, 0], [0, 0, 9, 0, 0, 0]
    (whole,) = decode_answers([logits(start)], [logits(end)], [window(tokens)], text)
    assert whole.text == "London"
    (piece,) = decode_answers([logits(start)], [logits(end)], [window(tokens)], text, whole_words=False)
    assert piece.text == "on"
    # A tokenizer that parts at spaces only keeps the comma in the word; the answer does not.
    tokens = [(0, 3, 0), (3, 10, 1), (10, 11, 1)]
    (bare,) = decode_answers([logits([0, 9, 0])], [logits([0, 9, 0])], [window(tokens)], "the London,")
    assert (bare.text, bare.start) == ("London", 4)


def test_no_answer_needs_every_window_to_say_so() -> None:
    tokens = words_of(TEXT)
    rows = [window(tokens[:3]), window(tokens[3:], first_token=3)]
    weak, strong = logits([0.0, 0.0, 0.0], null=6.0), logits([0.0, 4.0], null=1.0)
    (found,) = decode_answers([weak, strong], [weak, strong], rows, TEXT, no_answer=True)
    assert found.text == "London"
    nothing = [logits([0.0, 0.0, 0.0], null=6.0), logits([0.0, 4.0], null=5.0)]
    null, second = decode_answers(nothing, nothing, rows, TEXT, no_answer=True, top_k=2)
    assert null == Answer("", null.score, 0, 0, True)
    assert second.text == "London"
    norm = 4 + exp(4) + exp(5)
    assert null.score == pytest.approx((exp(5) / norm) ** 2, rel=1e-6)
    assert second.score == pytest.approx((exp(4) / norm) ** 2, rel=1e-6)


def test_the_margin_says_how_much_surer_no_answer_must_be() -> None:
    rows, parts = [window(words_of(TEXT))], [logits([0.0, 0.0, 0.0, 0.0, 4.0], null=5.0)]
    null, answer = decode_answers(parts, parts, rows, TEXT, no_answer=True, top_k=2)
    gap = log(null.score) - log(answer.score)
    assert gap == pytest.approx(2.0)
    for margin, first in ((1.99, True), (2.01, False), (-50.0, True)):
        found = decode_answers(parts, parts, rows, TEXT, no_answer=True, null_margin=margin)
        assert [a.no_answer for a in found] == [first]
    found = decode_answers(parts, parts, rows, TEXT, no_answer=True, null_margin=2.01, top_k=9)
    assert next(a.text for a in found) == "London"
    assert sum(a.no_answer for a in found) == 1


def test_a_second_answer_is_found_behind_any_number_of_variants_of_the_first() -> None:
    text = " ".join(f"w{i}" for i in range(80))
    start, end = [0.0] * 80, [0.0] * 80
    start[10], start[70], end[70] = 20.0, 3.0, 3.0
    found = decode_answers([logits(start)], [logits(end)], [window(words_of(text))], text, top_k=2)
    # All thirty spans that begin at w10 are better than w70 alone, and all of them overlap the first.
    assert [a.text for a in found] == ["w10", "w70"]


def test_equal_spans_come_in_the_order_of_the_text() -> None:
    text = " ".join(f"w{i}" for i in range(60))
    tokens = words_of(text)
    rows = [window(tokens[a : a + 30], first_token=a) for a in (30, 15, 0)]
    parts = [logits([0.0] * 30)] * 3
    for top_k in (1, 3, 60):
        found = decode_answers(parts, parts, rows, text, top_k=top_k)
        assert [a.text for a in found] == text.split()[:top_k]


def test_an_empty_context_has_no_answer() -> None:
    rows, parts = [window([])], [logits([])]
    assert decode_answers(parts, parts, rows, "") == []
    (found,) = decode_answers(parts, parts, rows, "", no_answer=True)
    assert (found.no_answer, found.score) == (True, pytest.approx(1.0))


def test_a_batch_is_its_contexts_one_by_one() -> None:
    generator = torch.Generator().manual_seed(0)
    texts = ["a b c d e f g h", "", "i j", "k l m n o p"]
    rows, owners, start, end = [], [], [], []
    for i, text in enumerate(texts):
        tokens = words_of(text) if text else []
        for a in range(0, max(1, len(tokens) - 1), 3):
            rows.append(window(tokens[a : a + 5], first_token=a, question=1 + i))
            owners.append(i)
            start.append(torch.randn(len(rows[-1].ids), generator=generator))
            end.append(torch.randn(len(rows[-1].ids), generator=generator))
    options = {"top_k": 4, "no_answer": True, "max_answer_length": 3}
    together = answers_of(start, end, rows, texts, owners=owners, **options)
    assert [len(found) for found in together] == [4, 1, 2, 4]
    order = [5, 0, 3, 2, 4, 1][: len(rows)] if len(rows) == 6 else list(reversed(range(len(rows))))
    shuffled = answers_of(
        [start[i] for i in order],
        [end[i] for i in order],
        [rows[i] for i in order],
        texts,
        owners=[owners[i] for i in order],
        **options,
    )
    assert shuffled == together
    for i, text in enumerate(texts):
        own = [j for j, owner in enumerate(owners) if owner == i]
        assert together[i] == decode_answers(
            [start[j] for j in own], [end[j] for j in own], [rows[j] for j in own], text, **options
        )


@settings(max_examples=60, deadline=None)
@given(
    st.data(),
    st.integers(1, 14),
    st.integers(0, 10**6),
    st.booleans(),
    st.sampled_from(["span", "place", "text"]),
)
def test_windows_change_nothing_and_answers_are_the_best_spans(data, total, seed, ties, distinct) -> None:
    text = " ".join(
        data.draw(st.lists(st.sampled_from(["Ada", "ada", "ü", "東京", "x"]), min_size=total, max_size=total))
    )
    tokens = words_of(text)
    generator = torch.Generator().manual_seed(seed)
    start, end = torch.randn(2, total, generator=generator) * 2
    if ties:
        start, end = start.round(), end.round()
    longest, top_k = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 30))
    options = {"top_k": top_k, "max_answer_length": longest, "distinct": distinct, "no_answer": True}
    whole = decode_answers(
        [logits(start.tolist(), 1.0)], [logits(end.tolist(), 1.0)], [window(tokens)], text, **options
    )
    # Each span of up to `longest` tokens lies whole in some window if neighbours share longest - 1 tokens.
    cuts, at = [], 0
    while True:
        stop = min(total, at + longest - 1 + data.draw(st.integers(1, 4)))
        cuts.append((at, stop))
        if stop == total:
            break
        at = stop - longest + 1
    rows = [window(tokens[a:b], first_token=a) for a, b in cuts]
    parts = [[logits(side[a:b].tolist(), 1.0) for a, b in cuts] for side in (start, end)]
    found = decode_answers(*parts, rows, text, **options)
    assert [(a.text, a.start, a.end) for a in found] == [(a.text, a.start, a.end) for a in whole]
    assert [a.score for a in found] == pytest.approx([a.score for a in whole])
    # The definition, span by span.
    sums = sorted(
        (-float(start[i] + end[j]), tokens[i][0], tokens[j][1])
        for i in range(total)
        for j in range(i, min(total, i + longest))
    )
    expected, seen = [], set()
    for _, low, high in sums:
        surface = text[low:high]
        if distinct != "span" and any(low < h and o < high for o, h in expected):
            continue
        if distinct == "text" and surface.casefold() in seen:
            continue
        seen.add(surface.casefold())
        expected.append((low, high))
    answers = [a for a in whole if not a.no_answer]
    assert [(a.start, a.end) for a in answers] == expected[: len(answers)]
    assert len(whole) == min(top_k, len(expected) + 1)
    assert sum(a.score for a in whole) <= 1 + 1e-6
    for answer in whole:
        assert answer.text == text[answer.start : answer.end]
        assert 0 <= answer.score <= 1
        assert answer.no_answer or 0 <= answer.start < answer.end <= len(text)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"top_k": 0, "max_answer_length": 0}, "top_k=0.*max_answer_length=0"),
        ({"distinct": "all"}, "distinct"),
        ({"start_logits": [torch.full((9,), torch.nan)]}, "finite"),
    ],
)
def test_what_does_not_fit_is_refused(change, word) -> None:
    given = {"start_logits": [torch.zeros(9)], "end_logits": [torch.zeros(9)], "context": "a b c d", **change}
    with pytest.raises(PredictError, match=word):
        decode_answers(rows=[window(words_of("a b c d"))], **given)

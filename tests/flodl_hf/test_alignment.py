"""Alignment comes back: words, spans and answers survive the way to token labels and home, through any windows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flodl.data.rng import Rng
from flodl.errors import DataError
from flodl_hf.tokenization.alignment import (
    IGNORE,
    align_tags,
    answer_positions,
    join_words,
    mask_tokens,
    read_tags,
    spans_of,
    tags_of_spans,
    word_units,
)
from flodl_hf.tokenization.cuts import Cut, Row, cut_each

LABELS = {"O": 0, "B-per": 1, "I-per": 2, "B-loc": 3, "I-loc": 4}
NAMES = list(LABELS)


def row_of(words, *, joined, space=False, question=0):
    """Return a row as a tokenizer would give it: each word is a list of piece lengths (0 repeats a character)."""
    offsets: list = [(0, 0)]
    word_ids: list = [None]
    sequence_ids: list = [None]
    for q in range(question):
        offsets.append((q, q + 1))
        word_ids.append(q)
        sequence_ids.append(0)
    if question:
        offsets.append((0, 0))
        word_ids.append(None)
        sequence_ids.append(None)
    at = 0
    for number, pieces in enumerate(words):
        start = at if joined else 0
        inner = start
        for k, size in enumerate(pieces):
            begin = inner - 1 if size == 0 and inner > start else inner
            end = begin + max(size, 1)
            lead = space and joined and k == 0 and number > 0
            offsets.append((begin - lead, end))
            word_ids.append(number)
            sequence_ids.append(1 if question else 0)
            inner = end
        at = inner + 1
    offsets.append((0, 0))
    word_ids.append(None)
    sequence_ids.append(None)
    n = len(offsets)
    return Row(list(range(n)), [0] * n, offsets, word_ids, sequence_ids, [s is None for s in sequence_ids])


def surface(words):
    return ["x" * sum(max(s, 1) if i == 0 or s else 0 for i, s in enumerate(w)) for w in words]


pieces = st.lists(st.integers(0, 3), min_size=1, max_size=4)
word_lists = st.lists(pieces, min_size=1, max_size=12)


def windows_of(data, row, cut: Cut = "first"):
    fixed = sum(s is None for s in row.sequence_ids) + (row.sequence_ids.count(0) if cut == "second" else 0)
    room = data.draw(st.integers(4, 14))
    stride, snap = data.draw(st.integers(0, 2)), data.draw(st.booleans())
    return cut_each([row], fixed + room, stride=stride, snap=snap, cut=cut)[0]


# --------------------------------------------------------------------------------------------------- words


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_tags_of_words_come_back_through_any_windows(data):
    words = data.draw(word_lists)
    tags = [data.draw(st.sampled_from(NAMES)) for _ in words]
    mode = data.draw(st.sampled_from(["split", "joined", "joined with space"]))
    row = row_of(words, joined=mode != "split", space=mode.endswith("space"))
    windows = windows_of(data, row)
    if mode == "split":
        units = word_units(windows, num_words=len(words))
    else:
        text, extents = join_words(surface(words))
        units = word_units(windows, extents=extents, text=text)
    labels = align_tags(units, tags, LABELS)
    assert read_tags(units, labels, NAMES) == tags
    once = align_tags(units, tags, LABELS, once=True)
    assert sorted(x for line in once for x in line if x != IGNORE) == sorted(LABELS[t] for t in tags)
    assert read_tags(units, once, NAMES) == tags
    for window, line in zip(windows, labels, strict=True):
        assert all(x == IGNORE for x, s in zip(line, window.special, strict=True) if s)


def test_the_label_of_a_word_is_at_its_first_token():
    units = word_units([row_of([[2], [2, 1, 1]], joined=False)])
    assert align_tags(units, ["O", "B-per"], LABELS) == [[-100, 0, 1, -100, -100, -100]]


def test_a_window_that_begins_inside_a_word_does_not_speak_for_it():
    row = row_of([[1, 1, 1, 1, 1]], joined=False)
    windows = cut_each([row], 5, stride=1, snap=False)[0]
    labels = align_tags(word_units(windows), ["B-per"], LABELS)
    assert [[x for x in line if x != IGNORE] for line in labels] == [[1], []]


def test_the_bytes_of_one_sign_split_over_windows_have_one_speaker():
    row = row_of([[1, 0, 0, 0]], joined=False)
    windows = cut_each([row], 5, stride=2, snap=False)[0]
    assert len(windows) > 1
    labels = align_tags(word_units(windows), ["B-per"], LABELS)
    assert [x for line in labels for x in line if x != IGNORE] == [1]


def test_a_word_in_two_windows_is_read_where_it_has_the_most_context():
    row = row_of([[1]] * 9, joined=False)
    windows = cut_each([row], 7, stride=3, snap=False)[0]
    assert [(w.first_token, w.last_token) for w in windows] == [(0, 5), (2, 7), (4, 9)]
    units = word_units(windows)
    assert units.owner == [0, 0, 0, 0, 1, 1, 2, 2, 2]
    # the first and the last window say nothing of word 4, which stands at their edges
    labels = [[0] * 7, [0, 0, 0, 1, 0, 0, 0], [0] * 7]
    assert read_tags(units, labels, NAMES)[4] == "B-per"


def test_words_without_a_token_are_reported_and_filled():
    row = row_of([[1], [1], [1], [1]], joined=False)
    window = cut_each([row], 4, overflow="truncate")[0]
    units = word_units(window, num_words=4)
    assert [u for u, window in enumerate(units.owner) if window < 0] == [2, 3]
    labels = align_tags(units, ["B-per", "I-per", "B-loc", "O"], LABELS)
    assert read_tags(units, labels, NAMES, fill="?") == ["B-per", "I-per", "?", "?"]


# --------------------------------------------------------------------------------------------------- spans


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_spans_come_back_through_any_windows(data):
    words = data.draw(word_lists)
    text, extents = join_words(surface(words))
    row = row_of(words, joined=True, space=data.draw(st.booleans()))
    units = word_units(windows_of(data, row), extents=extents, text=text)
    edges = sorted(data.draw(st.sets(st.integers(0, len(words)), min_size=0, max_size=6)))
    pairs = list(zip(edges[::2], edges[1::2], strict=False))
    kinds = [data.draw(st.sampled_from(["per", "loc"])) for _ in pairs]
    spans = [(extents[a][0], extents[b - 1][1], kind) for (a, b), kind in zip(pairs, kinds, strict=True)]
    labels = align_tags(units, tags_of_spans(units.extents, spans), LABELS)
    tags = read_tags(units, labels, NAMES)
    assert spans_of(tags) == [(kind, a, b) for (a, b), kind in zip(pairs, kinds, strict=True)]


def test_spans_are_widened_to_whole_words():
    extents = [(0, 4), (5, 9)]
    assert tags_of_spans(extents, [(6, 8, "loc")]) == ["O", "B-loc"]
    assert tags_of_spans(extents, [(2, 10, "loc")]) == ["B-loc", "I-loc"]
    assert tags_of_spans(extents, [(20, 30, "loc")]) == ["O", "O"]


def test_spans_that_cannot_be_tags_are_all_named():
    with pytest.raises(DataError) as caught:
        tags_of_spans([(0, 4), (5, 9)], [(0, 6, "a"), (5, 9, "b"), (3, 3, "c"), (-2, 1, "d")])
    assert len(caught.value.problems) == 3


# ------------------------------------------------------------------------------------------------- answers


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_answers_come_back_from_every_window_that_holds_them(data):
    words = data.draw(word_lists)
    _, extents = join_words(surface(words))
    row = row_of(words, joined=True, question=3)
    first = data.draw(st.integers(0, len(words) - 1))
    last = data.draw(st.integers(first, len(words) - 1))
    answer = (extents[first][0], extents[last][1])
    windows = windows_of(data, row, cut="second")
    positions = answer_positions(windows, answer)
    for window, (a, b) in zip(windows, positions, strict=True):
        seen = {o for o, s in zip(window.offsets, window.sequence_ids, strict=True) if s == 1}
        inside = [o for o, s in zip(row.offsets, row.sequence_ids, strict=True) if s == 1]
        inside = {o for o in inside if o[0] < answer[1] and o[1] > answer[0]}
        if (a, b) == (0, 0):
            assert not inside <= seen
        else:
            assert (window.offsets[a][0], window.offsets[b][1]) == answer
    if len(windows) == 1:
        assert positions[0] != (0, 0)


def test_questions_without_an_answer_point_outside():
    row = row_of([[1], [1]], joined=True, question=2)
    assert answer_positions([row, row], None) == [(0, 0)] * 2
    assert answer_positions([row], (90, 95)) == [(0, 0)]
    # offsets of the question are not those of the context
    assert answer_positions([row], (0, 1)) == [(4, 4)]
    with pytest.raises(DataError):
        answer_positions([row], (3, 3))


def test_an_answer_may_begin_with_characters_that_no_token_has():
    row = row_of([[2], [2]], joined=True, question=1)
    assert answer_positions([row], (2, 5)) == [(4, 4)]


# ------------------------------------------------------------------------------------------------- masking


@settings(max_examples=80, deadline=None)
@given(word_lists, st.floats(0.01, 1), st.booleans(), st.integers(0, 99))
def test_masking_is_told_by_its_labels_and_spares_special_tokens(words, probability, whole, seed):
    row = row_of(words, joined=False)

    def masked():
        return mask_tokens(
            row.ids, row.special, mask_id=999, random_ids=[500, 501], rng=Rng(seed, "mask", 0, 7),
            probability=probability, words=row.word_ids if whole else None,
        )  # fmt: skip

    hidden, labels = masked()
    assert [a.tolist() for a in masked()] == [hidden.tolist(), labels.tolist()]
    chosen = labels != IGNORE
    ids = np.array(row.ids)
    assert (labels[chosen] == ids[chosen]).all()
    assert (hidden[~chosen] == ids[~chosen]).all()
    assert not chosen[np.array(row.special)].any()
    assert np.isin(hidden[chosen & (hidden != ids)], [999, 500, 501]).all()
    free = len(ids) - sum(row.special)
    wanted = max(1, int(probability * free + 0.5))
    if whole:
        by_word = {w: {bool(c) for c, x in zip(chosen, row.word_ids, strict=True) if x == w} for w in range(len(words))}
        assert all(len(states) == 1 for states in by_word.values())
        assert 1 <= chosen.sum() <= max(wanted, min(map(len, words)))
    else:
        assert chosen.sum() == wanted


def test_masking_shares_are_eighty_ten_ten_and_change_with_the_epoch():
    ids, special = [7] * 20000, [False] * 20000

    def masked(epoch):
        return mask_tokens(ids, special, mask_id=1, random_ids=100000, rng=Rng(1, "mask", epoch))

    hidden, labels = masked(0)
    chosen = hidden[labels != IGNORE]
    assert chosen.size == 3000
    assert abs((chosen == 1).mean() - 0.8) < 0.03
    assert abs((chosen == 7).mean() - 0.1) < 0.02
    assert (masked(1)[1] != labels).any()


def test_word_numbers_that_start_anew_do_not_join_two_texts():
    hidden, labels = mask_tokens(
        [5, 6, 0, 7, 8], [False, False, True, False, False],
        mask_id=99, random_ids=10, rng=Rng(0), probability=0.5, words=[0, 0, None, 0, 0], mask_share=1, random_share=0,
    )  # fmt: skip
    assert hidden.tolist() in ([99, 99, 0, 7, 8], [5, 6, 0, 99, 99])
    assert (labels != IGNORE).sum() == 2


def test_tokens_without_a_word_are_chosen_one_by_one():
    hidden, _ = mask_tokens(
        [5, 6, 7, 8], [False] * 4, mask_id=99, random_ids=10, rng=Rng(0), probability=0.25, words=[None] * 4,
        mask_share=1, random_share=0,
    )  # fmt: skip
    assert (hidden == 99).sum() == 1


def test_a_row_of_special_tokens_stays():
    hidden, labels = mask_tokens([1, 2], [True, True], mask_id=9, random_ids=5, rng=Rng(0))
    assert hidden.tolist() == [1, 2]
    assert labels.tolist() == [IGNORE, IGNORE]


@pytest.mark.parametrize(
    "act",
    [
        lambda: align_tags(word_units([row_of([[1]], joined=False)]), ["O", "O"], LABELS),
        lambda: align_tags(word_units([row_of([[1]], joined=False)]), ["B-pre"], LABELS),
        lambda: word_units([row_of([[1], [1]], joined=False)], num_words=1),
        lambda: word_units([Row([1], [0], [], [], [0], [False])]),
        lambda: mask_tokens([1], [False], mask_id=1, random_ids=1, rng=Rng(0), probability=0),
        lambda: mask_tokens([1], [False], mask_id=1, random_ids=1, rng=Rng(0), mask_share=0.95),
    ],
)
def test_what_does_not_fit_is_refused(act):
    with pytest.raises(DataError):
        act()

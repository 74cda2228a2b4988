"""Windows cover a text, overlap as asked, break between words, and fit the model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flodl_hf.errors import TokenizerError
from flodl_hf.tokenization import cuts
from flodl_hf.tokenization.cuts import Row
from flodl_hf.tokenization.tokenizer import Tokenizer

from .conftest import CORPUS


def plan_windows(length: int, capacity: int, stride: int, words: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """Return the windows of one text, planned beside a shorter and a longer one."""
    sizes, numbers = np.array([3, length, 90]), None if words is None else [0, 0, 1, *words, *range(90)]
    text, start, stop = cuts.plan_windows(
        sizes, np.array([capacity] * 3), stride, None if numbers is None else np.array(numbers)
    )
    return list(zip(start[text == 1].tolist(), stop[text == 1].tolist(), strict=True))


WORDS = st.lists(st.integers(1, 7), max_size=60).map(
    lambda lengths: [number for number, length in enumerate(lengths) for _ in range(length)]
)


def _border(words: Sequence[int], position: int) -> bool:
    return position in (0, len(words)) or words[position - 1] != words[position]


@settings(max_examples=300, deadline=None)
@given(words=WORDS, capacity=st.integers(1, 40), stride=st.integers(0, 50))
def test_windows_cover_everything_overlap_enough_and_fit(words: list[int], capacity: int, stride: int) -> None:
    windows = plan_windows(len(words), capacity, stride, words)
    assert windows[0][0] == 0
    assert windows[-1][1] == len(words)
    shared = min(stride, capacity * 3 // 4)
    for start, end in windows:
        assert 0 <= end - start <= capacity
    for (start, end), (then, until) in pairwise(windows):
        assert start < then <= end - shared
        assert end < until
    assert len(windows) <= 1 + 8 * len(words) / capacity + len(words) * (capacity < 8)


@settings(max_examples=300, deadline=None)
@given(words=WORDS, capacity=st.integers(30, 60), stride=st.integers(8, 20))
def test_windows_break_between_words(words: list[int], capacity: int, stride: int) -> None:
    # Words of up to seven tokens always leave a border within reach of an overlap of eight or more.
    for start, end in plan_windows(len(words), capacity, stride, words):
        if min(max(stride, capacity // 8), (capacity - stride) // 2) >= 7:
            assert _border(words, end)
        if (capacity - stride) // 4 >= 7:
            assert _border(words, start)


@settings(max_examples=300, deadline=None)
@given(words=WORDS, data=st.data())
def test_a_span_as_long_as_the_overlap_is_whole_in_some_window(words: list[int], data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, 12))
    capacity = data.draw(st.integers(2 * stride, 40))
    if not words:
        return
    start = data.draw(st.integers(0, len(words) - 1))
    end = min(len(words), start + data.draw(st.integers(1, stride)))
    assert any(a <= start and end <= b for a, b in plan_windows(len(words), capacity, stride, words))


def test_a_word_longer_than_a_window_is_cut_anywhere() -> None:
    windows = plan_windows(100, 10, 4, [0] * 100)
    assert windows[0] == (0, 10)
    assert windows[1] == (6, 16)


@pytest.mark.parametrize(
    ("length", "capacity", "stride", "expected"),
    [
        (0, 4, 1, [(0, 0)]),
        (4, 4, 1, [(0, 4)]),
        (5, 4, 1, [(0, 4), (3, 5)]),
        (10, 4, 0, [(0, 4), (4, 8), (8, 10)]),
        (10, 4, 3, [(0, 4), (1, 5), (2, 6), (3, 7), (4, 8), (5, 9), (6, 10)]),
    ],
)
def test_without_words_windows_are_those_of_the_library(
    length: int, capacity: int, stride: int, expected: list[tuple[int, int]]
) -> None:
    assert plan_windows(length, capacity, stride) == expected


def _content(row: Row, sequence: int) -> list[int]:
    return [i for i, owner in zip(row.ids, row.sequence_ids, strict=True) if owner == sequence]


TEXT = " ".join(CORPUS[:13])


@pytest.mark.parametrize("size", [12, 20, 64])
@pytest.mark.parametrize("stride", [0, 3, 8])
def test_every_token_is_in_a_window_with_its_offset(tokenizer: Tokenizer, size: int, stride: int) -> None:
    [[whole]] = tokenizer.encode_rows([TEXT])
    [rows] = tokenizer.encode_rows([TEXT], max_tokens=size, stride=stride)
    specials = tokenizer.num_special_tokens_to_add()
    content, offsets = _content(whole, 0), whole.offsets[1:-1]
    seen: set[int] = set()
    for number, row in enumerate(rows):
        assert row.window == number
        assert len(row) <= size
        assert not row.truncated
        assert len(row) == row.last_token - row.first_token + specials
        assert _content(row, 0) == content[row.first_token : row.last_token]
        assert list(row.offsets[1:-1]) == list(offsets[row.first_token : row.last_token])
        assert (row.ids[0], row.ids[-1]) == (whole.ids[0], whole.ids[-1])
        seen.update(range(row.first_token, row.last_token))
    assert seen == set(range(len(content)))


def test_the_other_text_is_in_every_window(tokenizer: Tokenizer) -> None:
    question = "Where does Ada live?"
    [[whole]] = tokenizer.encode_rows([question], [TEXT])
    [rows] = tokenizer.encode_rows([question], [TEXT], max_tokens=60, stride=10)
    assert len(rows) > 3
    for row in rows:
        assert len(row) <= 60
        assert _content(row, 0) == _content(whole, 0)
        assert _content(row, 1) == _content(whole, 1)[row.first_token : row.last_token]
    [rows] = tokenizer.encode_rows([TEXT], [question], max_tokens=60, stride=10, cut="first")
    assert all(_content(row, 1) == _content(whole, 0) for row in rows)


def test_no_room_for_the_text_that_is_cut_is_an_error_with_the_numbers(tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError) as caught:
        tokenizer.encode_rows(["fine", TEXT], ["short", "x"], max_tokens=20)
    assert "text 1" in str(caught.value)
    assert caught.value.expected == 20
    with pytest.raises(TokenizerError):
        tokenizer.encode_rows([TEXT], max_tokens=2)
    with pytest.raises(TokenizerError):
        tokenizer.encode_rows([TEXT], max_tokens=20, stride=18, snap=False)


def test_truncation_keeps_the_beginning_and_says_so(tokenizer: Tokenizer) -> None:
    [[whole]] = tokenizer.encode_rows([TEXT])
    [[row]] = tokenizer.encode_rows([TEXT], max_tokens=20, overflow="truncate")
    assert row.truncated
    assert list(row.ids) == [*whole.ids[:19], whole.ids[-1]]
    [[short]] = tokenizer.encode_rows(["Ada"], max_tokens=20, overflow="truncate")
    assert not short.truncated


def test_too_long_can_be_an_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError) as caught:
        tokenizer.encode_rows(["Ada", TEXT], max_tokens=20, overflow="error")
    assert "text 1" in str(caught.value)
    [[whole]] = tokenizer.encode_rows([TEXT])
    assert caught.value.found == len(whole)


def test_pre_split_words_are_cut_into_windows_too(tokenizer: Tokenizer) -> None:
    words = TEXT.split()
    [[whole]] = tokenizer.encode_rows([words], words=True)
    [rows] = tokenizer.encode_rows([words], max_tokens=40, stride=8, words=True)
    found = {word for row in rows for word in row.word_ids if word is not None}
    assert found == {word for word in whole.word_ids if word is not None}
    for row in rows:
        assert list(row.word_ids[1:-1]) == list(whole.word_ids[1:-1])[row.first_token : row.last_token]


def test_ten_thousand_words_take_seconds(tokenizer: Tokenizer) -> None:
    text = "Ada lives in Paris and writes programs " * 1430
    [rows] = tokenizer.encode_rows([text], max_tokens=512, stride=128)
    assert rows[-1].offsets[-2][1] >= len(text) - 2
    assert all(len(row) <= 512 for row in rows)


@pytest.mark.parametrize("text", ["Ada lives in Paris " * 100_000, "a" * 1_000_000, TEXT * 300])
def test_the_beginning_of_a_very_long_text_is_that_of_the_whole(tokenizer: Tokenizer, text: str) -> None:
    [[row]] = tokenizer.encode_rows([text], max_tokens=32, overflow="truncate", offsets=False)
    if text.count("a") == len(text):
        # One endless word: WordPiece makes it unknown, the others cut it up.
        assert len(row) in (3, 32)
        return
    [[whole]] = tokenizer.encode_rows([text[:20_000]])
    assert list(row.ids) == [*whole.ids[:31], whole.ids[-1]]
    assert row.truncated

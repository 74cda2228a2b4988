"""Windows of a call on an accelerator end by their characters, so that work on long texts overlaps."""

from __future__ import annotations

import pytest

from flodl_hf.inference.pipeline import MEAN_CHARS, _windows


@pytest.mark.parametrize(
    ("items", "sizes"),
    [
        (["x" * 100] * 7_000, [512, 1024, 2048, 3416]),
        (["x" * 8_000] * 300, [16, 32, 64, 188]),
        (["x" * 2_000] * 100, [32, 68]),
        ([("q" * 30, "x" * 8_000)] * 90, [16, 32, 42]),
        ([{"text": "x" * 8_000}] * 40, [16, 24]),
        (["x" * 10_000_000], [1]),
    ],
)
def test_long_texts_fill_windows_earlier(items: list[object], sizes: list[int]) -> None:
    found = list(_windows(iter(items), 512, 4096, MEAN_CHARS))
    assert [len(window.items) for window in found] == sizes
    assert [item for window in found for item in window.items] == items
    assert [window.place for window in found] == [sum(sizes[:at]) for at in range(len(sizes))]


def test_without_a_limit_only_the_number_of_items_counts() -> None:
    assert [len(window.items) for window in _windows(iter(["x" * 9_000] * 700), 512, 4096, None)] == [512, 188]

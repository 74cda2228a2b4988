"""Messages between doors and workers, with orjson and without."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from flodl_hf.serving import frames


@pytest.fixture(params=["as installed", "without orjson"])
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if request.param == "without orjson":
        monkeypatch.setitem(sys.modules, "orjson", None)
    yield importlib.reload(frames)
    monkeypatch.undo()
    importlib.reload(frames)


def test_a_message_comes_back(module: Any) -> None:
    arrays = [np.arange(12, dtype=np.float32).reshape(3, 4), np.zeros((0, 5), np.float32), np.array([7, -1], np.int64)]
    message = {"id": 3, "items": ['ä 😀 \x00\n"', ["a", "b"]], "none": None, "score": 0.1}
    sent = b"".join(module.packed(message, arrays))
    size, text = module.HEAD.unpack(sent[: module.HEAD.size])
    body = sent[module.HEAD.size :]
    assert len(body) == size
    found, held = module.unpacked(text, body)
    assert found == message
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(held, arrays, strict=True))


@pytest.mark.parametrize("data", [b"", b"{", b"[" * 100_000, b"\xff", b'"\\ud800"', b"NaN", b'{"a": Infinity}'])
def test_what_is_no_json_is_a_value_error(module: Any, data: bytes) -> None:
    with pytest.raises(ValueError):
        module.from_json(data)
    assert module.from_json(b'"\\ud83d\\ude00"') == "😀"


def test_numbers_that_are_not_finite_are_null(module: Any) -> None:
    row = np.array([1.5, np.nan, np.inf], np.float32)
    assert module.from_json(module.as_json({"a": row, "b": [float("nan")], "c": 2})) == {
        "a": [1.5, None, None],
        "b": [None],
        "c": 2,
    }

"""Messages between processes and JSON of responses."""

from __future__ import annotations

import numpy as np
import pytest

from flodl_hf.serving import responses
from flodl_hf.workers import messages


def test_a_message_comes_back() -> None:
    arrays = [np.arange(12, dtype=np.float32).reshape(3, 4), np.zeros((0, 5), np.float32), np.array([7, -1], np.int64)]
    message = {"id": 3, "items": ['ä 😀 \x00\n"', ["a", "b"]], "none": None, "score": 0.1}
    sent = b"".join(messages.pack_message(message, arrays))
    size, text = messages.HEAD.unpack(sent[: messages.HEAD.size])
    body = sent[messages.HEAD.size :]
    assert len(body) == size
    found, held = messages.unpack_message(text, body)
    assert found == message
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(held, arrays, strict=True))


@pytest.mark.parametrize("data", [b"", b"{", b"[" * 100_000, b"\xff", b'"\\ud800"', b"NaN", b'{"a": Infinity}'])
def test_what_is_no_json_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        messages.from_json(data)
    assert messages.from_json(b'"\\ud83d\\ude00"') == "😀"


def test_numbers_that_are_not_finite_are_null() -> None:
    row = np.array([1.5, np.nan, np.inf], np.float32)
    assert messages.from_json(messages.as_json({"a": row, "b": [float("nan")], "c": 2})) == {
        "a": [1.5, None, None],
        "b": [None],
        "c": 2,
    }


VALUES = {
    "rows": np.linspace(-1, 1, 60, dtype=np.float32).reshape(20, 3),
    "rows of texts": [np.ones((rows, 3), np.float32) for rows in (0, 1, 2, 3, 50)],
    "long rows": np.arange(200, dtype=np.float32).reshape(2, 100),
    "no rows": [np.zeros((0, 7), np.float32), np.zeros((90, 0), np.float32)],
    "records": {
        'a "ä"': [{"index": i, "text": "x" * (i % 30)} for i in range(40)], "b": np.zeros((3, 3, 9)), "c": None, 7: []
    },
    "lists": [list(range(40)), [], [[]] * 30, "a", ("b", [1.5, float("nan")])],
    "a text": "ü" * 500,
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_pieces_are_the_whole(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(responses, "CHUNK_NUMBERS", 12)
    pieces = list(responses.json_pieces(VALUES[name]))
    assert b"".join(pieces) == messages.as_json(VALUES[name])
    if name not in ("a text", "no rows"):
        assert len(pieces) > 4
        assert max(map(len, pieces)) < 400

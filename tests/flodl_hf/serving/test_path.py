"""The small parts that a request passes in the doors: messages put together, many timers in one, packets, lines."""

from __future__ import annotations

import asyncio
import io
import logging
from typing import Any

import numpy as np
import pytest

from flodl_hf.serving.frames import packed
from flodl_hf.serving.link import Link
from flodl_hf.serving.log import Lines
from flodl_hf.serving.patience import Patience


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closed = self.aborted = False

    def write(self, data: bytes) -> None:
        self.writes.append(bytes(data))

    def writelines(self, parts: Any) -> None:
        self.writes += [b"large", *map(bytes, parts)]

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.closed


MESSAGES: list[tuple[dict[str, Any], list[np.ndarray]]] = [
    ({"id": 1, "data": "a"}, []),
    ({"id": 2, "data": None}, [np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros(0, np.int64)]),
    ({"id": 3, "data": "ä" * 300}, [np.arange(100)]),
]


@pytest.mark.parametrize("size", [1, 2, 7, 13, 64, 500, 1 << 20])
def test_messages_are_whole_however_they_come(size: int) -> None:
    async def seen() -> list[tuple[dict[str, Any], list[np.ndarray]]]:
        found: list[tuple[dict[str, Any], list[np.ndarray]]] = []
        link = Link(lambda message, arrays: found.append((message, arrays)))
        data = b"".join(part for message, arrays in MESSAGES for part in packed(message, arrays))
        for at in range(0, len(data), size):
            link.data_received(data[at : at + size])
        return found

    found = asyncio.run(seen())
    assert [message for message, _ in found] == [message for message, _ in MESSAGES]
    for (_, arrays), (_, expected) in zip(found, MESSAGES, strict=True):
        assert [one.dtype for one in arrays] == [one.dtype for one in expected]
        assert all(np.array_equal(one, other) for one, other in zip(arrays, expected, strict=True))


def test_a_worker_that_sends_nonsense_loses_its_connection(caplog: pytest.LogCaptureFixture) -> None:
    async def seen() -> bool:
        wire: Any = Wire()
        link = Link(lambda message, arrays: None)
        link.connection_made(wire)
        link.data_received(bytes(packed({})[0]) + b"no")
        return bool(wire.aborted)

    assert asyncio.run(seen())
    assert "not understood" in caplog.text


def test_messages_of_one_turn_go_together_and_the_first_at_once() -> None:
    async def seen() -> list[int]:
        wire: Any = Wire()
        link = Link(lambda message, arrays: None)
        link.connection_made(wire)
        sizes = [len(b"".join(packed({"id": number}))) for number in range(4)]
        for number in range(3):
            link.send({"id": number})
        assert list(map(len, wire.writes)) == sizes[:1]
        await asyncio.sleep(0)
        assert list(map(len, wire.writes)) == [sizes[0], sum(sizes[1:3])]
        link.send({"id": 3})
        link.send({"id": 3})
        link.close()
        assert list(map(len, wire.writes[2:])) == [sizes[3]] * 2
        with pytest.raises(OSError, match="ended"):
            link.send({"id": 3})
        return sizes

    assert asyncio.run(seen())


def test_calls_are_made_in_their_order_unless_taken_back() -> None:
    async def seen() -> list[str]:
        called: list[str] = []
        last = asyncio.Event()
        patience = Patience(0.01)
        patience.begin("a", lambda: called.append("a"))
        patience.begin("b", lambda: called.append("b"))
        patience.end("b")
        patience.begin("c", lambda: (called.append("c"), patience.begin("d", last.set)))  # type: ignore[func-returns-value]
        patience.end("nobody")
        await last.wait()
        return called

    assert asyncio.run(seen()) == ["a", "c"]


def test_head_and_body_of_an_answer_are_one_packet() -> None:
    protocol = pytest.importorskip("flodl_hf.serving.protocol")

    def sent(*writes: bytes, close: bool = False) -> list[bytes]:
        wire = Wire()
        whole = protocol.Whole(wire)
        for write in writes:
            whole.write(write)
        if close:
            whole.close()
            assert wire.closed
            assert whole.is_closing()
        return wire.writes

    head, body = b"HTTP/1.1 200 OK\r\n\r\n", b"answer"
    assert sent(head, body) == [head + body]
    assert sent(head, b"") == [head]
    assert sent(b"HTTP/1.1 100 Continue\r\n\r\n", head, body) == [b"HTTP/1.1 100 Continue\r\n\r\n", head + body]
    assert sent(head, body, b"HTTP/1.1 in an answer") == [head + body, b"HTTP/1.1 in an answer"]
    assert sent(head) == []
    assert sent(head, close=True) == [head]
    large = bytes(protocol.LARGE)
    assert sent(head, large) == [b"large", head, large]


def test_lines_wait_for_others_and_faults_for_none() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "said", None, None)
    grave = logging.LogRecord("x", logging.ERROR, "", 0, "grave", None, None)

    async def seen() -> list[str]:
        stream = io.StringIO()
        lines, states = Lines(stream), []
        lines.handle(record)
        lines.handle(record)
        states.append(stream.getvalue())
        lines.handle(grave)
        states.append(stream.getvalue())
        lines.handle(record)
        while stream.getvalue().count("said") < 3:
            await asyncio.sleep(0.01)
        states.append(stream.getvalue())
        return states

    assert asyncio.run(seen()) == ["", "said\nsaid\ngrave\n", "said\nsaid\ngrave\nsaid\n"]
    stream = io.StringIO()
    Lines(stream).handle(record)  # no loop runs: nobody would write it later
    assert stream.getvalue() == "said\n"

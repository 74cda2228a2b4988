"""The small parts that a request passes in the doors: messages put together, packets, lines."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from functools import partial
from typing import Any

import numpy as np
import pytest

from flodl_hf.serving.metrics import Lines, Log, log_event
from flodl_hf.serving.responses import (
    CHUNK_NUMBERS,
    SEND_CHUNK_BYTES,
    RefusedError,
    Response,
    encode_response,
    encoded,
    send_error,
    send_response,
)
from flodl_hf.serving.settings import Settings, served
from flodl_hf.workers.messages import Link, as_json, pack_message


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

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return None


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
        data = b"".join(part for message, arrays in MESSAGES for part in pack_message(message, arrays))
        for at in range(0, len(data), size):
            link.data_received(data[at : at + size])
        return found

    found = asyncio.run(seen())
    assert [message for message, _ in found] == [message for message, _ in MESSAGES]
    for (_, arrays), (_, expected) in zip(found, MESSAGES, strict=True):
        assert [one.dtype for one in arrays] == [one.dtype for one in expected]
        assert all(np.array_equal(one, other) for one, other in zip(arrays, expected, strict=True))


async def turns_of_another(reply: Response, form: str, size: int) -> tuple[list[Any], int]:
    """Return an answer's parts, and how often another task ran while they were made."""
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.ensure_future(other())
    parts = await encode_response(reply, form, size)
    task.cancel()
    return parts, turns


def test_others_have_their_turn_while_a_large_answer_is_written() -> None:
    vectors = np.zeros((40, CHUNK_NUMBERS // 4), np.float32)
    reply = Response({"vectors": [vectors, vectors]})
    parts, turns = asyncio.run(turns_of_another(reply, "application/json", 2 * vectors.size))
    assert (b"".join(parts), turns) == (as_json(reply.data), 20)
    parts, turns = asyncio.run(turns_of_another(reply, "application/json", 8))
    assert (parts, turns) == ([as_json(reply.data)], 0)  # a small one is written at once


VECTORS = np.random.default_rng(0).standard_normal((3, CHUNK_NUMBERS, 5), np.float32)


def test_messagepack_has_arrays_as_bytes() -> None:
    msgpack = pytest.importorskip("msgpack")
    reply = Response({"data": [{"vector": row} for row in VECTORS], "model": "x"})
    for size in (1, VECTORS.size):
        parts = asyncio.run(encode_response(reply, "application/msgpack", size))
        found = msgpack.unpackb(b"".join(parts))
        assert found["model"] == "x"
        for one, row in zip(found["data"], VECTORS, strict=True):
            array = one["vector"]
            assert np.array_equal(np.frombuffer(array["data"], array["dtype"]).reshape(array["shape"]), row)


@pytest.mark.parametrize("form", ["application/x-npy", "application/vnd.apache.arrow.stream"])
def test_large_arrays_are_sent_in_parts_that_are_no_copies(form: str) -> None:
    pytest.importorskip("pyarrow")
    numbers = VECTORS.reshape(-1, 5)
    parts, turns = asyncio.run(turns_of_another(Response(numbers, numbers), form, numbers.size))
    assert b"".join(parts).count(VECTORS.tobytes()) == 1
    assert max(map(len, parts)) <= SEND_CHUNK_BYTES
    views = [np.frombuffer(part, np.uint8) for part in parts if isinstance(part, memoryview)]
    assert sum(view.nbytes for view in views) >= numbers.nbytes
    if "arrow" in form:
        assert turns > 1  # Arrow copies them, in a thread
    else:
        assert all(np.shares_memory(view, VECTORS) for view in views)


def test_a_worker_that_sends_nonsense_loses_its_connection(caplog: pytest.LogCaptureFixture) -> None:
    async def seen() -> bool:
        wire: Any = Wire()
        link = Link(lambda message, arrays: None)
        link.connection_made(wire)
        link.data_received(bytes(pack_message({})[0]) + b"no")
        return bool(wire.aborted)

    assert asyncio.run(seen())
    assert "invalid message" in caplog.text


def test_messages_come_whole_however_they_are_cut() -> None:
    sent = [({"id": at}, [np.full(at * 7 % 61, at, np.int32)]) for at in range(40)]
    data = b"".join(bytes(part) for message, arrays in sent for part in pack_message(dict(message), arrays))

    async def seen(step: int) -> list[Any]:
        told: list[Any] = []
        link = Link(lambda message, arrays: told.append((message, [array.tolist() for array in arrays])))
        for at in range(0, len(data), step):
            link.data_received(data[at : at + step])
        return told

    expected = [(message, [array.tolist() for array in arrays]) for message, arrays in sent]
    for step in (1, 7, 50, 111, 1000, len(data)):
        assert asyncio.run(seen(step)) == expected


def test_messages_of_one_turn_go_together_and_the_first_at_once() -> None:
    async def seen() -> list[int]:
        wire: Any = Wire()
        link = Link(lambda message, arrays: None)
        link.connection_made(wire)
        sizes = [len(b"".join(pack_message({"id": number}))) for number in range(4)]
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


PLAIN = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize(
    ("asked", "status", "bodies", "writes"),
    [
        (PLAIN, 200, [b"answer"], 1),
        (PLAIN * 2, 200, [b"answer"], 2),
        (PLAIN, 422, [b""], 1),
        (PLAIN, 499, [b"answer"], 1),
        (PLAIN, 200, [bytes(1 << 16)], 3),  # the word for it, and both parts as they are
        (PLAIN.replace(b"GET", b"HEAD"), 200, [b"answer"], 1),
        (PLAIN.replace(b"1.1", b"1.0"), 200, [b"answer"], 2),
        (PLAIN.replace(b"host", b"connection: close\r\nhost"), 200, [b"answer"], 2),
        (PLAIN, 200, [b"answer", b"answer"], 3),
    ],
)
def test_an_answer_is_what_uvicorn_sends_in_one_packet_where_it_can_be(
    asked: bytes, status: int, bodies: list[bytes], writes: int
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send_response(scope, send, status, "text/plain", [*bodies], b"x-said: a, b: c\r\n")

    assert_like_uvicorn(app, asked, writes)


async def error_that_closes(scope: Any, receive: Any, send: Any) -> None:
    await send_error(scope, send, RefusedError("no", "key"), "tei", close=True)


async def injected_header(scope: Any, receive: Any, send: Any) -> None:
    await send_response(scope, send, 200, "text/plain", [b"answer"], encoded({"x-said": "a\r\nset-cookie: b"}))


async def error_after_a_part(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"12")]})
    await send({"type": "http.response.body", "body": b"answer", "more_body": True})
    await send_error(scope, send, RefusedError("no", "key"), "tei")


@pytest.mark.parametrize(
    ("app", "writes", "expected"),
    [
        (error_that_closes, 2, b"connection: close\r\n"),
        (injected_header, 2, b"HTTP/1.1 500"),
        (error_after_a_part, 2, b"answer"),
    ],
)
def test_other_answers_are_left_to_uvicorn(app: Any, writes: int, expected: bytes) -> None:
    found, closed = assert_like_uvicorn(app, PLAIN, writes)
    assert closed
    assert expected in found
    assert b"set-cookie" not in found


def test_headers_are_lines_of_latin_1() -> None:
    assert encoded({"a": "é", "b": "€"}) == b"a: \xe9\r\nb: ?\r\n"
    for text in ("a\r\nset-cookie: b", "a\nb", "a\rb"):
        with pytest.raises(ValueError, match="line break"):
            encoded({"x-said": text})


def assert_like_uvicorn(app: Any, asked: bytes, writes: int) -> tuple[bytes, bool]:
    """Assert that the limited protocol sends what uvicorn sends, in a number of packets; return it."""
    uvicorn = pytest.importorskip("uvicorn")
    protocol = pytest.importorskip("flodl_hf.serving.http")
    plain = pytest.importorskip("uvicorn.protocols.http.httptools_impl").HttpToolsProtocol

    async def seen(kind: Any) -> tuple[bytes, int, bool]:
        config = uvicorn.Config(app, http=kind, log_config=None, lifespan="off")
        config.load()
        wire = Wire()
        made = kind(config=config, server_state=uvicorn.Server(config).server_state, app_state={})
        made.server_state.default_headers = [(b"date", b"today")]
        made.connection_made(wire)
        made.data_received(asked)
        while made.tasks:
            await asyncio.wait(list(made.tasks))
        made._unset_keepalive_if_required()
        return b"".join(wire.writes).removeprefix(b"large"), len(wire.writes), wire.closed

    settings = Settings(models=served(["m"]))
    expected, _, closes = asyncio.run(seen(plain))
    found, count, closed = asyncio.run(seen(partial(protocol._LimitedProtocol, settings)))
    assert (found, closed, count) == (expected, closes, writes)
    return found, closed


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


def test_lines_of_requests_are_what_a_record_becomes(monkeypatch: pytest.MonkeyPatch) -> None:
    logger, stream, said = logging.Logger("requests", logging.INFO), io.StringIO(), {"route": "/embed", "fields": {1j}}
    lines = Lines(stream)
    lines.setFormatter(Log())
    logger.addHandler(lines)
    logger.propagate = False
    for made in (True, False):
        with monkeypatch.context() as patched:
            if made:
                logger.addFilter(lambda record: True)  # whoever looks at records sees them
            else:
                patched.setattr(logger, "makeRecord", None)
            log_event(logger, "request", said)
        logger.filters.clear()
    one, other = (json.loads(line) for line in stream.getvalue().splitlines())
    assert one.keys() == other.keys() == {"at", "level", "what", "route", "fields"}
    assert {**one, "at": 0} == {**other, "at": 0}

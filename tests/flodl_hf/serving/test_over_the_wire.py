"""What comes over the wire and should not: the server answers or closes, and goes on."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest


def connected(served: tuple[str, Any]) -> socket.socket:
    host, port = served[0].removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


@pytest.fixture
def wire(served: tuple[str, Any]) -> Iterator[socket.socket]:
    with connected(served) as held:
        yield held


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: here", "content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


def until_closed(held: socket.socket) -> bytes:
    parts = []
    try:
        while part := held.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


@pytest.fixture(autouse=True)
def goes_on(http: Any) -> Iterator[None]:
    yield
    assert http.post("/models/embed/-/embed", json={"inputs": "the cat"}).status_code == 200


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b'{"inputs":' * 5_000 + b"1" + b"}" * 5_000, "JSON"),
        (b'{"inputs": "\xff\xfe"}', "JSON"),
        (b'{"inputs": "\\ud800"}', "JSON"),
        (b'{"inputs": NaN}', "JSON"),
        (b"null", "object"),
        (b'"text"', "object"),
        (b'{"inputs": {"a": 1}}', "expected a string"),
        (b'{"inputs": ' + b"9" * 5000 + b"}", ""),
    ],
    ids=[
        "none",
        "open",
        "deep",
        "deep objects",
        "no utf-8",
        "half a pair",
        "nan",
        "null",
        "string",
        "object",
        "large number",
    ],
)
def test_bodies_that_are_no_request_are_refused(wire: socket.socket, body: bytes, word: str) -> None:
    wire.sendall(post("/models/embed/-/embed", body, "connection: close"))
    answer = until_closed(wire)
    assert status(answer) in (400, 422)
    told = json.loads(answer.split(b"\r\n\r\n", 1)[1])
    assert word in told["error"]
    assert len(told["error"]) < 600


@pytest.mark.parametrize(("part", "count"), [(b"[]", 310_000), (b'{"":[]}', 110_000)], ids=["lists", "objects"])
def test_a_body_of_very_many_parts_is_refused_unread(wire: socket.socket, part: bytes, count: int) -> None:
    body = b'{"inputs": [' + b",".join([part] * count)  # read, it would be no JSON
    wire.sendall(post("/models/embed/-/embed", body, "connection: close"))
    answer = until_closed(wire)
    assert status(answer) == 413
    assert b"brackets and colons; expected at most 300000" in answer


def test_a_body_that_is_too_large_is_refused_however_it_comes(wire: socket.socket, served: tuple[str, Any]) -> None:
    chunk = b"a" * (1 << 20)
    wire.sendall(
        b"POST /embed HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    try:
        for _ in range(100):
            wire.sendall(b"%x\r\n" % len(chunk) + chunk + b"\r\n")
    except OSError:
        pass  # it had enough
    assert status(until_closed(wire)) in (0, 413)
    with connected(served) as told:
        told.sendall(
            post("/models/embed/-/embed", b"")[:-2].replace(b"content-length: 0", b"content-length: 100000000")
            + b"\r\n"
        )
        told.sendall(b"[" * 4096)
        assert status(until_closed(told)) == 413


def test_ten_thousand_headers_are_refused(wire: socket.socket) -> None:
    wire.sendall(post("/models/embed/-/embed", b"{}", *[f"x-{i}: {i}" for i in range(10_000)]))
    assert status(until_closed(wire)) in (400, 431)


LARGE_HEADERS = pytest.mark.parametrize(
    "lines", [b"x: 1\r\n" * 200_000, b"x: " + b"a" * 1_200_000], ids=["many", "one without end"]
)


@LARGE_HEADERS
def test_large_trailers_are_refused(wire: socket.socket, lines: bytes) -> None:
    head = post("/models/embed/-/embed", b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
    with contextlib.suppress(OSError):
        wire.sendall(head + b'f\r\n{"inputs": "a"}\r\n0\r\n' + lines)
    assert status(until_closed(wire)) == 400


@LARGE_HEADERS
def test_large_headers_of_a_pipelined_request_are_refused(wire: socket.socket, lines: bytes) -> None:
    slow = json.dumps({"inputs": ["the cat sat on the mat"] * 2000}).encode()
    with contextlib.suppress(OSError):
        wire.sendall(post("/models/embed/-/embed_all", slow) + b"GET /live HTTP/1.1\r\n" + lines)
    assert status(until_closed(wire)) == 400


def test_a_head_without_end_is_cut_off(wire: socket.socket) -> None:
    started = time.monotonic()
    try:
        wire.sendall(b"POST /embed HTTP/1.1\r\nx: ")
        while time.monotonic() < started + 20:
            wire.sendall(b"a" * 65536)
    except OSError:
        pass
    assert status(until_closed(wire)) in (0, 400, 431)
    assert time.monotonic() < started + 30


@pytest.mark.parametrize(
    "sent", [b"", b"POST /em", b"POST /embed HTTP/1.1\r\nhost: here\r\n"], ids=["none", "line", "head"]
)
def test_connections_that_say_nothing_are_closed(served: tuple[str, Any], sent: bytes) -> None:
    started = time.monotonic()
    with connected(served) as held:
        held.sendall(sent)
        assert until_closed(held) == b""
    assert time.monotonic() - started > 0.5


def test_a_body_that_does_not_come_is_given_up(wire: socket.socket) -> None:
    wire.sendall(post("/models/embed/-/embed", b"x" * 100)[:-60])
    answer = until_closed(wire)
    assert status(answer) == 408


def test_a_client_that_reads_nothing_loses_its_connection(served: tuple[str, Any]) -> None:
    host, port = served[0].removeprefix("http://").split(":")
    body = json.dumps({"inputs": ["the cat sat on the mat"] * 2000}).encode()

    def read_after(seconds: float) -> int:
        with socket.socket() as held:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            held.settimeout(120)
            held.connect((host, int(port)))
            held.sendall(post("/models/embed/-/embed_all", body))
            select.select([held], [], [], 120)  # the answer has begun, and is left where it is
            time.sleep(seconds)
            return len(until_closed(held))

    # All of it would be five million bytes; what was on its way is all that comes, after a second that may be a long one.
    assert any(read_after(seconds) < 4_500_000 for seconds in (1.5, 5, 20))


@pytest.mark.parametrize(
    "sent",
    [
        b"GET\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST /embed HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello!",
        b"POST /embed HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST /embed HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /%00%ff/../../etc/passwd HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n",
    ],
    ids=["line", "tls", "two lengths", "length below 0", "both lengths", "path"],
)
def test_what_is_no_http_is_refused(wire: socket.socket, sent: bytes) -> None:
    wire.sendall(sent)
    assert status(until_closed(wire)) in (0, 400, 404)


def test_a_form_of_another_page_is_refused(http: Any) -> None:
    # What a page of another origin may send without asking: no door takes it.
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        answer = http.post(
            "/embed", content=b'{"inputs": "a"}', headers={"content-type": kind, "origin": "https://other.example"}
        )
        assert answer.status_code == 415
        assert "access-control-allow-origin" not in answer.headers
    asked = http.options("/embed", headers={"origin": "https://other.example", "access-control-request-method": "POST"})
    assert asked.status_code == 405


def test_requests_one_after_another_on_one_connection(wire: socket.socket) -> None:
    one = post("/models/embed/-/embed", b'{"inputs": "a"}')
    last = post("/models/embed/-/embed", b'{"inputs": "a"}', "connection: close")
    wire.sendall(one * 4 + last)
    assert until_closed(wire).count(b"HTTP/1.1 200 OK") == 5


def test_very_many_requests_at_once_on_one_connection_are_refused(wire: socket.socket) -> None:
    wire.sendall(b"GET /live HTTP/1.1\r\nhost: here\r\n\r\n" * 1_000)
    answers = until_closed(wire)
    assert answers.count(b"HTTP/1.1 400") == 1
    assert answers.count(b"HTTP/1.1 200") < 1_000

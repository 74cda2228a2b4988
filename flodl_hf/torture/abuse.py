"""Requests that are not HTTP as it should be: heads, lengths, chunks, headers, and many on one connection.

Decides of each whether it has to be refused, or is unusual and right. `pace` has what is a matter of time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from flodl_hf.torture import pace
from flodl_hf.torture.case import Grade, Verdict, refusal, right, silent
from flodl_hf.torture.replies import graded, refused
from flodl_hf.torture.served import BODIES, Server, spoken
from flodl_hf.torture.wire import head, post

__all__ = ["DOES", "Does"]


@dataclass(frozen=True)
class Does:
    """What cases of a kind do.

    Attributes:
        ways: their names.
        act: does one and judges it; ``what`` has the door's path, the way, and a number to draw from.
    """

    ways: tuple[str, ...]
    act: Callable[[Server, Mapping[str, Any]], Verdict]


JSON = "content-type: application/json"


def _data(path: str) -> bytes:
    return json.dumps(BODIES[path]).encode()


# --- heads ------------------------------------------------------------------------------------------------------------


def _line(line: str, *more: str) -> Callable[[str, bytes], bytes]:
    """Return a request with another first line; ``{path}`` is the door's."""

    def made(path: str, data: bytes) -> bytes:
        first = line.replace("{path}", path)
        lines = [first, "host: here", JSON, f"content-length: {len(data)}", *more, "", ""]
        return "\r\n".join(lines).encode("latin-1") + data

    return made


def _headed(*more: str) -> Callable[[str, bytes], bytes]:
    return _line("POST {path} HTTP/1.1", *more)


def _without_length(*more: str) -> Callable[[str, bytes], bytes]:
    return lambda path, data: head(path, JSON, *more) + data


# name: bytes of it, and what is expected: "refused", "right", or "either"
HEADS: Mapping[str, tuple[Callable[[str, bytes], bytes], str]] = {
    "ten thousand headers": (_headed(*(f"x-{i}: {i}" for i in range(10_000))), "refused"),
    "a hundred headers": (_headed(*(f"x-{i}: {i}" for i in range(100))), "right"),
    "a long header": (_headed("x-long: " + "a" * 70_000), "refused"),
    "a long name": (_headed("x" * 70_000 + ": a"), "refused"),
    "a long path": (_line("POST {path}?" + "a" * 70_000 + " HTTP/1.1"), "refused"),
    "a megabyte of path": (_line("POST /" + "a" * 1_000_000 + " HTTP/1.1"), "refused"),
    "a long method": (_line("P" * 70_000 + " {path} HTTP/1.1"), "refused"),
    "another method": (_line("PUT {path} HTTP/1.1"), "refused"),
    "delete": (_line("DELETE {path} HTTP/1.1"), "refused"),
    "options": (_line("OPTIONS {path} HTTP/1.1"), "refused"),
    "trace": (_line("TRACE {path} HTTP/1.1"), "refused"),
    "patch": (_line("PATCH {path} HTTP/1.1"), "refused"),
    "a method of nobody": (_line("STEAL {path} HTTP/1.1"), "refused"),
    "a lower method": (_line("post {path} HTTP/1.1"), "refused"),
    "connect": (_line("CONNECT here:443 HTTP/1.1"), "refused"),
    "no version": (_line("POST {path}"), "either"),
    "version 9": (_line("POST {path} HTTP/9.9"), "refused"),
    "version 1.0": (_line("POST {path} HTTP/1.0"), "right"),
    "another protocol": (_line("POST {path} ICY/1.1"), "refused"),
    "no line": (lambda path, data: b"\r\n\r\n\r\n\r\n\x00\x00\r\n", "refused"),
    "no path": (_line("POST  HTTP/1.1"), "refused"),
    "a path that is none": (_line("POST nowhere HTTP/1.1"), "refused"),
    "a path of nobody": (_line("POST {path}x/y HTTP/1.1"), "refused"),
    "a path up": (_line("POST /../../etc/passwd HTTP/1.1"), "refused"),
    "a path up, written out": (_line("POST /models/%2e%2e%2f%2e%2e%2fetc/-/embed HTTP/1.1"), "refused"),
    "a path with nul": (_line("POST {path}%00 HTTP/1.1"), "refused"),
    "a path of half a letter": (_line("POST /models/%ed%a0%80/-/embed HTTP/1.1"), "refused"),
    "a path with escapes": (_line("POST /models/%1b%5b2J/-/embed HTTP/1.1"), "refused"),
    "a path of bytes": (lambda path, data: b"POST /\xff\xfe\x80 HTTP/1.1\r\nhost: here\r\n\r\n", "refused"),
    "a whole address": (_line("POST http://elsewhere{path} HTTP/1.1"), "either"),
    "a query": (_line("POST {path}?model=none&x=%00 HTTP/1.1"), "right"),
    "a fragment": (_line("POST {path}#here HTTP/1.1"), "either"),
    "no colon": (_headed("x-none"), "refused"),
    "an empty name": (_headed(": x"), "refused"),
    "a space before the colon": (_headed("x-name : x"), "refused"),
    "a name of bytes": (_headed("x-\xff\x80: x"), "refused"),
    "nul in a value": (_headed("x-nul: a\0b"), "refused"),
    "a bare return in a value": (_headed("x-return: a\rb"), "refused"),
    "letters of everywhere": (_headed("x-letters: \xe9\xff"), "right"),
    "folded": (_headed("x-folded: a", " b"), "either"),
    "bare line feeds": (
        lambda path, data: head(path, JSON, f"content-length: {len(data)}").replace(b"\r\n", b"\n") + data, "either"),
    "no host": (lambda path, data: _headed()(path, data).replace(b"host: here\r\n", b""), "either"),
    "two hosts": (_headed("host: elsewhere"), "either"),
    "two lengths": (_headed("content-length: 3"), "refused"),
    "two lengths alike": (lambda path, data: _headed(f"content-length: {len(data)}")(path, data), "either"),
    "a length below nothing": (_without_length("content-length: -5"), "refused"),
    "a length with a sign": (lambda path, data: head(path, JSON, f"content-length: +{len(data)}") + data, "refused"),
    "a length in hex": (lambda path, data: head(path, JSON, f"content-length: {len(data):#x}") + data, "refused"),
    "a length in words": (_without_length("content-length: some"), "refused"),
    "a length with a comma": (lambda path, data: head(path, JSON, f"content-length: {len(data)}, {len(data)}") + data,
                              "refused"),
    "a length beyond all": (_without_length("content-length: " + "9" * 40), "refused"),
    "an exabyte": (_without_length(f"content-length: {10**18}"), "refused"),
    "length and chunks": (_headed("transfer-encoding: chunked"), "refused"),
    "a coding of nobody": (_without_length("transfer-encoding: steal"), "refused"),
    "chunks twice": (_without_length("transfer-encoding: chunked, chunked"), "refused"),
    "chunks, then another coding": (_without_length("transfer-encoding: chunked, identity"), "refused"),
    "an upgrade": (_headed("connection: upgrade", "upgrade: websocket", "sec-websocket-version: 13"), "right"),
    "an upgrade to http/2": (_headed("connection: upgrade, http2-settings", "upgrade: h2c", "http2-settings: AAMA"),
                             "right"),
    "waiting to go on": (_headed("expect: 100-continue"), "right"),
    "another expectation": (_headed("expect: wonders"), "either"),
    "packed": (_headed("content-encoding: gzip"), "either"),
    "http/2": (lambda path, data: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", "refused"),
    "tls": (lambda path, data: bytes.fromhex("1603010200010001fc0303") + bytes(range(256)) * 2, "refused"),
    "bytes": (lambda path, data: bytes(range(256)) * 40, "refused"),
    "zeros": (lambda path, data: bytes(100_000), "refused"),
    "an answer": (lambda path, data: b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", "refused"),
}  # fmt: skip


def _heads(server: Server, what: Mapping[str, Any]) -> Verdict:
    path = what["path"]
    make, expected = HEADS[what["way"]]
    with server.wire() as wire:
        wire.send(make(path, _data(path)))
        answer = wire.answer()
    if expected == "refused":
        return refused(answer, closing=True, plain=True)
    return graded(server, path, answer, closing=expected == "either", plain=expected == "either")


# --- lengths and chunks -----------------------------------------------------------------------------------------------


def _chunk(part: bytes, more: str = "") -> bytes:
    return f"{len(part):x}{more}\r\n".encode() + part + b"\r\n"


def _pieces(data: bytes, size: int, more: str = "") -> bytes:
    return b"".join(_chunk(data[i : i + size], more) for i in range(0, len(data), size))


CHUNKS: Mapping[str, tuple[Callable[[bytes], bytes], str]] = {
    "one": (lambda data: _chunk(data) + b"0\r\n\r\n", "right"),
    "a byte each": (lambda data: _pieces(data, 1) + b"0\r\n\r\n", "right"),
    "sizes in capitals": (lambda data: f"{len(data):X}\r\n".encode() + data + b"\r\n0\r\n\r\n", "right"),
    "zeros before a size": (lambda data: f"{len(data):012x}\r\n".encode() + data + b"\r\n0\r\n\r\n", "right"),
    "extensions": (lambda data: _pieces(data, 20, ";a=b") + b"0;c\r\n\r\n", "right"),
    "trailers": (lambda data: _chunk(data) + b"0\r\nx-trailer: 1\r\n\r\n", "right"),
    "a trailer that is a length": (lambda data: _chunk(data) + b"0\r\ncontent-length: 3\r\n\r\n", "either"),
    "a long extension": (lambda data: _pieces(data, 20, ";" + "a" * 100_000) + b"0\r\n\r\n", "either"),
    "many trailers": (lambda data: _chunk(data) + b"0\r\n" + b"x: 1\r\n" * 20_000 + b"\r\n", "either"),
    "no size": (lambda data: b"\r\n" + data + b"\r\n0\r\n\r\n", "refused"),
    "words for a size": (lambda data: b"some\r\n" + data + b"\r\n0\r\n\r\n", "refused"),
    "a size below nothing": (lambda data: b"-5\r\n" + data + b"\r\n0\r\n\r\n", "refused"),
    "a size with a sign": (lambda data: f"+{len(data):x}\r\n".encode() + data + b"\r\n0\r\n\r\n", "refused"),
    "a size with 0x": (lambda data: f"0x{len(data):x}\r\n".encode() + data + b"\r\n0\r\n\r\n", "refused"),
    "a size beyond all": (lambda data: b"f" * 30 + b"\r\n" + data, "refused"),
    "a size of an exabyte": (lambda data: b"de0b6b3a7640000\r\n" + data, "refused"),
    "a size too small": (lambda data: f"{len(data) - 5:x}\r\n".encode() + data + b"\r\n0\r\n\r\n", "refused"),
    "a size too large": (lambda data: f"{len(data) + 500:x}\r\n".encode() + data + b"\r\n0\r\n\r\n", "refused"),
    "an end between": (lambda data: _chunk(data[:9]) + b"0\r\n\r\n" + _chunk(data[9:]) + b"0\r\n\r\n", "refused"),
    "nothing but an end": (lambda data: b"0\r\n\r\n", "refused"),
    "no end": (_chunk, "refused"),
    "two ends": (lambda data: _chunk(data) + b"0\r\n\r\n0\r\n\r\n", "either"),
    "bytes": (lambda data: bytes(range(256)) * 20, "refused"),
    "no chunks": (lambda data: data, "refused"),
}  # fmt: skip


def _chunks(server: Server, what: Mapping[str, Any]) -> Verdict:
    path = what["path"]
    make, expected = CHUNKS[what["way"]]
    with server.wire() as wire:
        wire.send(head(path, JSON, "transfer-encoding: chunked") + make(_data(path)))
        answer = wire.answer()
    if expected == "refused":
        return refused(answer, closing=True, plain=True)
    return graded(server, path, answer, closing=expected == "either", plain=expected == "either")


LENGTHS = (
    "too long, then silence",
    "too long, then no more",
    "too long, then away",
    "too short",
    "none",
    "nothing",
    "one",
)


def _lengths(server: Server, what: Mapping[str, Any]) -> Verdict:
    path, way = what["path"], what["way"]
    data = _data(path)
    with server.wire() as wire:
        if way.startswith("too long"):
            wire.send(head(path, JSON, f"content-length: {len(data) + 1 + what['draw'] % 5_000}") + data)
            if way.endswith("no more"):
                wire.half_close()
            if way.endswith("away"):
                return refusal("away")
            return refused(wire.answer(), closing=True)
        if way == "too short":
            cut = 1 + what["draw"] % (len(data) - 1)
            wire.send(head(path, JSON, f"content-length: {cut}") + data)
            first = refused(wire.answer(), plain=True)
            return first if not first.good or wire.closed() else refusal("refused, and the rest waited for")
        if way == "none":
            wire.send(head(path, JSON) + data)
        elif way == "nothing":
            wire.send(head(path, JSON, "content-length: 0"))
        else:
            wire.send(post(path, b"{"))
        return refused(wire.answer(), plain=True)


# --- headers that mean something --------------------------------------------------------------------------------------

OWN: Mapping[str, str] = {
    **{f"x-timeout-s: {value}": "refused" for value in (
        "-1", "0", "nan", "inf", "-inf", "1e400", "soon", "", "0x10", "1,5", "\xff", "1 2", "x" * 5_000)},
    **{f"x-timeout-s: {value}": "right" for value in ("30", "1e300", " 20 ", "1_0")},
    "x-timeout-s: 1e-9": "late",
    **{f"x-priority: {value}": "refused" for value in ("9", "", "highest", "high, low", "\xff", "h" * 9_000)},
    **{f"x-priority: {value}": "right" for value in ("HIGH", "low", " normal ")},
    **{f"accept: {value}": "right" for value in ("*/*", "application/json", "text/html, */*;q=0.1", "application/*")},
    **{f"accept: {value}": "either" for value in (
        "", "text/html", ";;;", "application/json;q=0", "application/json;q=nan", "a" * 9_000, "\xff", ", , ,",
        "application/x-npy", "application/msgpack")},
    **{f"content-type: {value}": "either" for value in (
        "", "text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", "x" * 9_000, "\xff",
        "application/json; charset=utf-16", "application/vnd.x+json")},
    **{f"{name}: {value}": "right" for name in ("authorization", "x-api-key", "api-key")
       for value in ("", "Bearer", "Bearer x", "\xff", "Basic eDp5", "x" * 9_000)},
    **{f"{name}: {value}": "right" for name, value in (
        ("x-forwarded-for", "\x7f, 1.2.3.4"), ("forwarded", "for=_x"), ("range", "bytes=0-1"),
        ("cookie", "a=" + "b" * 9_000), ("if-none-match", "*"), ("origin", "null"), ("traceparent", "00-zz-zz-01"),
        ("accept-encoding", "gzip, zz;q=9"))},
}  # fmt: skip


def _own_headers(server: Server, what: Mapping[str, Any]) -> Verdict:
    path, line = what["path"], what["way"]
    expected, data = OWN[line], _data(path)
    kept = [] if line.startswith("content-type:") else [JSON]
    with server.wire() as wire:
        wire.send(head(path, *kept, f"content-length: {len(data)}", line) + data)
        answer = wire.answer()
    if expected == "late":
        return refused(answer, also=(504,))
    if expected == "refused":
        return refused(answer, key=line.partition(":")[0])
    if expected == "either" and answer is not None and answer.status == 200 and b"json" not in _kind(answer):
        return refusal("in another form, as asked")
    return graded(server, path, answer)


def _kind(answer: Any) -> bytes:
    return answer.headers.get("content-type", "").encode()


# --- many on one connection -------------------------------------------------------------------------------------------


def _pipelined(server: Server, what: Mapping[str, Any]) -> Verdict:
    """Send several requests at once; answers come in order, each its own."""
    random = Random(what["draw"])
    count = {"some": 5, "many": 40, "with wrong ones": 12, "wrong ones": 12, "then away": 20}[what["way"]]
    paths = [random.choice(tuple(BODIES)) for _ in range(count)]
    wrong = [what["way"] == "wrong ones" or (what["way"] == "with wrong ones" and random.random() < 0.5) for _ in paths]
    with server.wire(60.0) as wire:
        wire.send(b"".join(post(path, b"{" if bad else _data(path)) for path, bad in zip(paths, wrong, strict=True)))
        if what["way"] == "then away":
            wire.reset()
            return refusal("away")
        for place, (path, bad) in enumerate(zip(paths, wrong, strict=True)):
            answer = wire.answer()
            if bad:
                verdict = refused(answer)
                if not verdict.good:
                    return verdict
            elif answer is None or answer.status != 200:
                return Verdict(Grade.UNNAMED, f"request {place} of {count} gets {answer}")
            elif spoken(answer) != server.right[path]:
                return silent(f"request {place} of {count} gets another's answer, or another")
    return right()


DOES: Mapping[str, Does] = {
    "heads": Does(tuple(HEADS), _heads),
    "lengths": Does(LENGTHS, _lengths),
    "chunks": Does(tuple(CHUNKS), _chunks),
    "own headers": Does(tuple(OWN), _own_headers),
    "pipelined": Does(("some", "many", "with wrong ones", "wrong ones", "then away"), _pipelined),
    **{name: Does(ways, act) for name, (ways, act) in pace.DOES.items()},
}
"""By the kind of a case."""

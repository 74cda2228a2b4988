"""Responses: results and errors, their encoding, and how they are sent.

Results are JSON, and by the ``Accept`` header ``.npy`` and Arrow for arrays, or MessagePack. Large JSON is encoded in
steps, between which the event loop serves other requests; encoding millions of numbers at once would block it for
seconds. Arrays of binary formats are sent without a copy, except in MessagePack.

Errors have the form of each API convention. text-embeddings-inference uses 413 for exceeded limits and 424 for a model
without the required head; OpenAI and Cohere use 400. An unknown field is 422 everywhere.
"""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from http import HTTPStatus
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np

from flodl.errors import FlodlError
from flodl_hf.workers.messages import as_json

CHUNK_NUMBERS = 16_384
"""Maximum numbers in one step of encoding: half a millisecond in which the event loop is blocked."""
# Bytes of one write; smaller pieces are joined, because each would be a packet.
SEND_CHUNK_BYTES = 1 << 18
LARGE = 1 << 16
"""Bodies of at least this size are not copied behind their head."""
CYCLE = "flodl_hf.cycle"
"""Key of an ASGI scope with uvicorn's object of the request."""

Part = bytes | memoryview
"""Part of a response; a view has single bytes."""
Style = Literal["tei", "openai", "cohere"]
Scope = dict[str, Any]
Send = Callable[[dict[str, Any]], Awaitable[None]]

KINDS: dict[str, tuple[int, int, str]] = {
    "body": (400, 400, "Validation"),
    "field": (422, 400, "Validation"),
    "unknown": (422, 422, "Validation"),
    "long": (413, 400, "Validation"),
    "limit": (413, 400, "Validation"),
    "empty": (400, 400, "Empty"),
    "tokenizer": (422, 400, "Tokenizer"),
    "refused": (422, 400, "Validation"),
    "path": (404, 404, "Validation"),
    "model": (404, 404, "Validation"),
    "head": (424, 400, "Backend"),
    "accept": (406, 406, "Validation"),
    "media": (415, 415, "Validation"),
    "size": (413, 413, "Validation"),
    "slow": (408, 408, "Validation"),
    "key": (401, 401, "Validation"),
    "overloaded": (429, 429, "Overloaded"),
    "deadline": (504, 504, "Overloaded"),
    "given_up": (499, 499, "Overloaded"),
    "ended": (503, 503, "Unhealthy"),
    "internal": (424, 500, "Backend"),
}
"""Status of TEI's and our own routes, status of other routes, and TEI's error type, of each kind of error."""
_OPENAI_TYPES = {
    "key": "authentication_error", "overloaded": "rate_limit_error", "deadline": "timeout_error",
    "given_up": "timeout_error", "ended": "service_unavailable_error", "internal": "server_error",
}  # fmt: skip
_OPENAI_CODES = {"model": "model_not_found", "key": "invalid_api_key", "overloaded": "rate_limit_exceeded"}


class RefusedError(FlodlError):
    """A request that is refused.

    Attributes:
        kind: the reason, a key of the table above.
        param: the invalid field, or None.
        after_s: time to retry in seconds, or None.
    """

    kind: str
    param: str | None
    after_s: float | None

    def __init__(self, message: str, kind: str = "refused", **details: Any) -> None:
        super().__init__(message, **{"kind": kind, "param": None, "after_s": None, **details})


@dataclass(frozen=True)
class Response:
    """Result of a route.

    Attributes:
        data: JSON types; arrays in it are encoded as lists.
        vectors: the array of binary responses, or None.
    """

    data: Any
    vectors: np.ndarray | None = None


# ---- encoding ------------------------------------------------------------------------------------------

_JSON, _MSGPACK, _ARROW = "application/json", "application/msgpack", "application/vnd.apache.arrow.stream"
_FORMS = (_JSON, "application/x-npy", "application/npy", _ARROW, _MSGPACK, "application/x-msgpack")


@lru_cache(maxsize=256)
def response_format(header: str) -> str:
    """Return the media type for an ``Accept`` header.

    Raises:
        RefusedError: no listed type is supported.
    """
    types = [part.partition(";")[0].strip().lower() for part in header.split(",")[:32]]
    # Named types precede wildcards; JSON is the default.
    for form in types:
        if form in _FORMS and (form != _ARROW or find_spec("pyarrow") is not None):
            return form
    if any(form in ("*/*", "application/*", "") or form.startswith("text/") for form in types):
        return _JSON
    raise RefusedError(f"accept is {header[:80]!r}; expected one of {', '.join(_FORMS)}", "accept")


async def encode_response(response: Response, form: str, size: int) -> list[Part]:
    """Return an encoded response in parts; large ones let the event loop run in between.

    Args:
        response: the response.
        form: a media type of `response_format`.
        size: approximate number of numbers and words.

    Raises:
        RefusedError: the response has no such form.
    """
    large, vectors = size > CHUNK_NUMBERS, response.vectors
    if form == _JSON:
        return await _json_parts(response.data) if large else [as_json(response.data)]
    if "msgpack" in form:
        import msgpack

        packed: Any = msgpack.packb(response.data, default=_plain)
        parts = _cut(packed)
    elif vectors is None:
        message = "this response has no array. Request application/json or application/msgpack."
        raise RefusedError(message, "accept")
    elif form == _ARROW:
        # Usually in a thread, because Arrow releases the interpreter lock and takes time to load.
        direct = not large and "pyarrow" in sys.modules
        parts = _cut(_arrow(vectors) if direct else await asyncio.to_thread(_arrow, vectors))
    else:
        array = np.ascontiguousarray(vectors)
        parts = [_npy_head(array.dtype.str, array.shape), *_cut(array.reshape(-1).view(np.uint8).data)]
    return parts if large or len(parts) == 1 else [b"".join(parts)]


def _cut(whole: Part) -> list[Part]:
    """Return views of at most SEND_CHUNK_BYTES."""
    view = memoryview(whole)
    return [view[at : at + SEND_CHUNK_BYTES] for at in range(0, len(view), SEND_CHUNK_BYTES)]


@lru_cache(maxsize=256)
def _npy_head(kind: str, shape: tuple[int, ...]) -> bytes:
    """Return the header of a ``.npy`` file; faster than `numpy.save`."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": shape})
    return file.getvalue()


def _arrow(vectors: np.ndarray) -> memoryview:
    """Return vectors as an Arrow stream with one column, ``vector``, of fixed-size lists."""
    import pyarrow as pa

    numbers = pa.array(np.ascontiguousarray(vectors).reshape(-1))
    column = pa.FixedSizeListArray.from_arrays(numbers, vectors.shape[1])
    batch = pa.record_batch([column], names=["vector"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())


def _plain(value: Any) -> Any:
    """Return an array as MessagePack types."""
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "shape": list(value.shape), "data": np.ascontiguousarray(value).tobytes()}
    raise TypeError(f"{type(value).__name__} has no MessagePack form")


async def _json_parts(data: Any) -> list[Part]:
    """Return large JSON in parts; other tasks run between the steps."""
    parts, held, length = list[Part](), list[bytes](), 0
    for piece in json_pieces(data):
        held.append(piece)
        length += len(piece)
        if length >= SEND_CHUNK_BYTES:
            parts.append(b"".join(held))
            held, length = [], 0
        if len(piece) >= CHUNK_NUMBERS:
            await asyncio.sleep(0)
    return [*parts, b"".join(held)]


def json_pieces(value: Any) -> Iterator[bytes]:
    """Yield a value as JSON in pieces; together they equal the result of `as_json`.

    Args:
        value: JSON types and arrays.
    """
    if _remaining_room(value, CHUNK_NUMBERS) >= 0 or not isinstance(value, (np.ndarray, list, tuple, dict)):
        yield as_json(value)
        return
    if isinstance(value, dict):
        for at, (name, part) in enumerate(value.items()):
            yield (b"," if at else b"{") + as_json({name: None})[1:-5]
            yield from json_pieces(part)
        yield b"}"
        return
    # Members are encoded together up to CHUNK_NUMBERS; larger ones in pieces.
    held, room, before = list[Any](), CHUNK_NUMBERS, b"["
    for part in value:
        left = _remaining_room(part, room)
        if left < 0 and held:
            yield before + as_json(held)[1:-1]
            held, before = [], b","
            left = _remaining_room(part, CHUNK_NUMBERS)
        if left < 0:
            yield before
            yield from json_pieces(part)
            room, before = CHUNK_NUMBERS, b","
        else:
            held.append(part)
            room = left
    yield (before + as_json(held)[1:-1] if held else b"") + b"]"


def _remaining_room(value: Any, room: int) -> int:
    """Return ``room`` minus the size of a value; negative as soon as the value is known to be larger."""
    if isinstance(value, np.ndarray):
        return room - value.size
    if isinstance(value, str):
        return room - 1 - len(value) // 8
    if isinstance(value, (list, tuple, dict)):
        room -= 1
        for part in value.values() if isinstance(value, dict) else value:
            room = _remaining_room(part, room)
            if room < 0:
                break
        return room
    return room - 1


# ---- sending -------------------------------------------------------------------------------------------

_HEAD = b"content-type: %b\r\ncontent-length: %d\r\nx-content-type-options: nosniff\r\ncache-control: no-store\r\n%b"


async def send_response(
    scope: Scope, send: Send, status: int, kind: str, parts: list[Part], headers: bytes = b""
) -> None:
    """Send a response, releasing each part after it was sent; ``parts`` is empty afterwards.

    Args:
        scope: ASGI scope.
        send: ASGI function.
        status: HTTP status.
        kind: media type.
        parts: parts of the body.
        headers: further headers; each ends with a line break.
    """
    size = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
    head = _HEAD % (kind.encode(), size, headers)
    if len(parts) == 1 and scope["method"] != "HEAD" and _write(scope, status, head, parts[0]):
        return
    listed = [tuple(line.split(b": ", 1)) for line in head.splitlines()]
    await send({"type": "http.response.start", "status": status, "headers": listed})
    parts.reverse()
    while parts:
        await send({"type": "http.response.body", "body": bytes(parts.pop()), "more_body": bool(parts)})


def _write(scope: Scope, status: int, head: bytes, body: Part) -> bool:
    """Write a response in one packet; return False if it has to be sent by ASGI messages.

    uvicorn writes the head before the body and checks each header separately, which takes a tenth of the time of a
    small request.
    """
    cycle = scope.get(CYCLE)
    if cycle is None or cycle.response_started or cycle.disconnected:
        return False
    if not cycle.keep_alive or cycle.flow.write_paused:
        return False
    defaults = b"".join([b"%b: %b\r\n" % header for header in cycle.default_headers])
    head = b"%b%b%b\r\n" % (_status_line(status), defaults, head)
    if len(body) < LARGE:
        cycle.transport.write(head + body)
    else:
        cycle.transport.writelines((head, body))
    cycle.response_started = cycle.response_complete = True
    cycle.waiting_for_100_continue = False
    cycle.message_event.set()
    cycle.on_response()
    return True


@cache
def _status_line(status: int) -> bytes:
    # The unofficial status 499 has no phrase.
    phrase = next((known.phrase for known in HTTPStatus if known == status), "")
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()


async def send_error(scope: Scope, send: Send, fault: RefusedError, style: Style, *, close: bool = False) -> int:
    """Send an error response and return its status."""
    status, body, headers = error_response(fault, style)
    if close:
        scope.pop(CYCLE, None)  # uvicorn closes the connection
        headers["connection"] = "close"
    await send_response(scope, send, status, "application/json", [as_json(body)], encoded(headers))
    return status


def error_response(fault: RefusedError, style: Style) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Return status, body and headers of an error."""
    at_tei, elsewhere, word = KINDS[fault.kind]
    headers = {"x-flodl-fault": fault.kind}
    if fault.after_s is not None:
        headers["retry-after"] = str(int(fault.after_s))
    if fault.kind == "key":
        headers["www-authenticate"] = "Bearer"
    if style == "tei":
        return at_tei, {"error": fault.message, "error_type": word}, headers
    if style == "cohere":
        return elsewhere, {"message": fault.message}, headers
    kind, code = _OPENAI_TYPES.get(fault.kind, "invalid_request_error"), _OPENAI_CODES.get(fault.kind)
    return elsewhere, {"error": {"message": fault.message, "type": kind, "param": fault.param, "code": code}}, headers


def encoded(headers: Mapping[str, str]) -> bytes:
    """Return headers as they are sent; characters outside Latin-1 are replaced.

    Raises:
        ValueError: a header contains a line break, which would end it.
    """
    lines = [f"{name}: {value}" for name, value in headers.items()]
    if wrong := [line for line in lines if "\r" in line or "\n" in line]:
        raise ValueError(f"response headers: found a line break in {wrong[0][:80]!r}, expected one line")
    return "".join([f"{line}\r\n" for line in lines]).encode("latin-1", "replace")

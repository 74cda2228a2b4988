"""Encoding of responses: JSON, and by the ``Accept`` header ``.npy`` and Arrow for arrays, or MessagePack.

Large JSON is encoded in steps, between which the event loop serves other requests; encoding millions of numbers at once
would block it for seconds. Arrays of binary formats are sent without a copy, except in MessagePack.
"""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Awaitable, Callable, Iterator
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from flodl_hf.serving.http_errors import RefusedError
from flodl_hf.serving.routes.route import Response
from flodl_hf.workers.messages import as_json

JSON, MSGPACK = "application/json", "application/msgpack"
CHUNK_NUMBERS = 16_384
"""Maximum numbers in one step of encoding: half a millisecond in which the event loop is blocked."""
# Bytes of one write; smaller pieces are joined, because each would be a packet.
SEND_CHUNK_BYTES = 1 << 18


Part = bytes | memoryview
"""Part of a response; a view has single bytes."""


def _cut(whole: Part) -> list[Part]:
    """Return views of at most SEND_CHUNK_BYTES."""
    view = memoryview(whole)
    return [view[at : at + SEND_CHUNK_BYTES] for at in range(0, len(view), SEND_CHUNK_BYTES)]


async def _json(response: Response, large: bool) -> list[Part]:
    if not large:
        return [as_json(response.data)]
    parts, held, length = list[Part](), list[bytes](), 0
    for piece in json_pieces(response.data):
        held.append(piece)
        length += len(piece)
        if length >= SEND_CHUNK_BYTES:
            parts.append(b"".join(held))
            held, length = [], 0
        if len(piece) >= CHUNK_NUMBERS:
            await asyncio.sleep(0)
    return [*parts, b"".join(held)]


async def _npy(response: Response, large: bool) -> list[Part]:
    array = np.ascontiguousarray(_array(response))
    return [_npy_head(array.dtype.str, array.shape), *_cut(array.reshape(-1).view(np.uint8).data)]


@lru_cache(maxsize=256)
def _npy_head(kind: str, shape: tuple[int, ...]) -> bytes:
    """Return the header of a ``.npy`` file; faster than `numpy.save`."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": shape})
    return file.getvalue()


async def _arrow(response: Response, large: bool) -> list[Part]:
    vectors = _array(response)
    if not large and "pyarrow" in sys.modules:
        return _cut(_stream(vectors))
    # In a thread, because Arrow releases the interpreter lock and takes time to load.
    return _cut(await asyncio.to_thread(_stream, vectors))


def _stream(vectors: np.ndarray) -> memoryview:
    """Return vectors as an Arrow stream with one column, ``vector``, of fixed-size lists."""
    import pyarrow as pa

    numbers = pa.array(np.ascontiguousarray(vectors).reshape(-1))
    column = pa.FixedSizeListArray.from_arrays(numbers, vectors.shape[1])
    batch = pa.record_batch([column], names=["vector"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())


def _array(response: Response) -> np.ndarray:
    if response.vectors is None:
        raise RefusedError("this response has no array. Request application/json or application/msgpack.", "accept")
    return response.vectors


async def _msgpack(response: Response, large: bool) -> list[Part]:
    import msgpack

    return _cut(msgpack.Packer(default=_plain).pack(response.data))


def _plain(value: Any) -> Any:
    """Return an array as MessagePack types."""
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "shape": list(value.shape), "data": np.ascontiguousarray(value).tobytes()}
    raise TypeError(f"{type(value).__name__} has no MessagePack form")


_FORMS: dict[str, Callable[[Response, bool], Awaitable[list[Part]]]] = {
    JSON: _json,
    "application/x-npy": _npy,
    "application/npy": _npy,
    "application/vnd.apache.arrow.stream": _arrow,
    MSGPACK: _msgpack,
    "application/x-msgpack": _msgpack,
}
_ANY = ("*/*", "application/*", "")


def response_format(header: str) -> str:
    """Return the media type for an ``Accept`` header.

    Raises:
        RefusedError: no listed type is supported.
    """
    # Most clients send one of few values; long values are not cached.
    return _accepted(header) if len(header) <= 100 else _accepted.__wrapped__(header)


@lru_cache(maxsize=256)
def _accepted(header: str) -> str:
    types = [part.partition(";")[0].strip().lower() for part in header.split(",")[:32]]
    # Named types precede wildcards; JSON is the default.
    for form in types:
        if form in _FORMS and ("arrow" not in form or find_spec("pyarrow") is not None):
            return form
    if not types or any(form in _ANY for form in types) or any(form.startswith("text/") for form in types):
        return JSON
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
    if size > CHUNK_NUMBERS:
        return await _FORMS[form](response, True)
    parts = await _FORMS[form](response, False)
    return parts if len(parts) == 1 else [b"".join(parts)]


# ---- JSON in steps ---------------------------------------------------------------------------------------


def json_pieces(value: Any) -> Iterator[bytes]:
    """Yield a value as JSON in pieces; together they equal the result of `as_json`.

    Args:
        value: JSON types and arrays.
    """
    if _remaining_room(value, CHUNK_NUMBERS) >= 0 or not isinstance(value, (np.ndarray, list, tuple, dict)):
        yield as_json(value)
    elif isinstance(value, dict):
        for at, (name, part) in enumerate(value.items()):
            yield (b"," if at else b"{") + as_json({name: None})[1:-5]
            yield from json_pieces(part)
        yield b"}"
    else:
        before = b"["
        for part, whole in _chunks_of(value):
            yield before
            if whole:
                yield as_json(part)[1:-1]
            else:
                yield from json_pieces(part)
            before = b","
        yield b"]"


def _chunks_of(value: Any) -> Iterator[tuple[Any, bool]]:
    """Yield chunks of an array or list with at most CHUNK_NUMBERS numbers, or one larger member with False."""
    if isinstance(value, np.ndarray):
        step = CHUNK_NUMBERS // max(1, value.size // len(value))
        if step:
            yield from ((value[at : at + step], True) for at in range(0, len(value), step))
        else:
            yield from ((row, False) for row in value)
        return
    held: list[Any] = []
    left = CHUNK_NUMBERS
    for part in value:
        left = _remaining_room(part, left)
        if left < 0:
            if held:
                yield held, True
                held = []
            left = _remaining_room(part, CHUNK_NUMBERS)
            if left < 0:
                yield part, False
                left = CHUNK_NUMBERS
                continue
        held.append(part)
    if held:
        yield held, True


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

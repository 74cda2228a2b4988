"""Encoding of responses: JSON, and by the ``Accept`` header ``.npy`` and Arrow for arrays, or MessagePack.

Large responses are encoded in steps, between which the event loop serves other requests; encoding millions of numbers
at once would block it for seconds. Arrays are sent without a copy.
"""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Awaitable, Callable, Iterable
from functools import lru_cache
from importlib.util import find_spec

import numpy as np

from flodl_hf.serving.http_errors import RefusedError
from flodl_hf.serving.routes.route import Response
from flodl_hf.serving.serialization import CHUNK_NUMBERS, json_pieces, msgpack_pieces
from flodl_hf.workers.messages import as_json

JSON, MSGPACK = "application/json", "application/msgpack"
# Bytes of one write; smaller pieces are joined, because each would be a packet.
SEND_CHUNK_BYTES = 1 << 18


Part = bytes | memoryview
"""Part of a response; a view has single bytes."""


def _cut(whole: Part) -> list[Part]:
    """Return views of at most SEND_CHUNK_BYTES."""
    view = memoryview(whole)
    return [view[at : at + SEND_CHUNK_BYTES] for at in range(0, len(view), SEND_CHUNK_BYTES)]


async def _json(response: Response, large: bool) -> list[Part]:
    return await _join_pieces(json_pieces(response.data)) if large else [as_json(response.data)]


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
    return await _join_pieces(msgpack_pieces(response.data))


async def _join_pieces(pieces: Iterable[Part]) -> list[Part]:
    """Join pieces to parts of SEND_CHUNK_BYTES, letting the event loop run in between."""
    parts, held, length = list[Part](), list[Part](), 0
    for piece in pieces:
        if isinstance(piece, memoryview):
            parts += (b"".join(held), *_cut(piece))
            held, length = [], 0
            continue
        held.append(piece)
        length += len(piece)
        if length >= SEND_CHUNK_BYTES:
            parts.append(b"".join(held))
            held, length = [], 0
        if len(piece) >= CHUNK_NUMBERS:
            await asyncio.sleep(0)
    parts.append(b"".join(held))
    return parts


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

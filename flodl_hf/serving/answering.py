"""Answers as bytes: JSON, or what the client says it takes: an array as ``.npy`` or Arrow, anything as MessagePack.

A large answer is written in pieces, between which others are served: a library that writes one as a whole keeps the
interpreter from all else, for seconds where it has millions of numbers. Numbers that leave as they lie in memory are
not copied before they are sent.
"""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Awaitable, Callable, Iterable
from functools import lru_cache

import numpy as np

from flodl_hf.serving.doors.door import Reply
from flodl_hf.serving.faults import RefusedError
from flodl_hf.serving.frames import PIECE, as_json, json_pieces
from flodl_hf.serving.packing import msgpack_pieces

__all__ = ["Part", "accepted", "written_in_pieces"]

JSON, MSGPACK = "application/json", "application/msgpack"
# So much of an answer is sent at once: pieces of one number each would be a packet each.
SENT = 1 << 18


Part = bytes | memoryview
"""A part of an answer; a view is of single bytes."""


def _cut(whole: Part) -> list[Part]:
    """Return views of all of it, each as large as what is sent at once."""
    view = memoryview(whole)
    return [view[at : at + SENT] for at in range(0, len(view), SENT)]


async def _json(reply: Reply, large: bool) -> list[Part]:
    if reply.text is not None:
        return _cut(reply.text)
    return await _gathered(json_pieces(reply.data)) if large else [as_json(reply.data)]


async def _npy(reply: Reply, large: bool) -> list[Part]:
    array = np.ascontiguousarray(_array(reply))
    return [_npy_head(array.dtype.str, array.shape), *_cut(array.reshape(-1).view(np.uint8).data)]


@lru_cache(maxsize=256)
def _npy_head(kind: str, shape: tuple[int, ...]) -> bytes:
    """Return what stands before the numbers in a ``.npy`` file; `numpy.save` takes longer than all else does."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": shape})
    return file.getvalue()


async def _arrow(reply: Reply, large: bool) -> list[Part]:
    vectors = _array(reply)
    if not large and "pyarrow" in sys.modules:
        return _cut(_stream(vectors))
    # In a thread: Arrow lets go of the interpreter while it copies, and takes a while to load.
    return _cut(await asyncio.to_thread(_stream, vectors))


def _stream(vectors: np.ndarray) -> memoryview:
    """Return vectors as an Arrow stream: one column, ``vector``, of lists of one length."""
    import pyarrow as pa

    numbers = pa.array(np.ascontiguousarray(vectors).reshape(-1))
    column = pa.FixedSizeListArray.from_arrays(numbers, vectors.shape[1])
    batch = pa.record_batch([column], names=["vector"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())


def _array(reply: Reply) -> np.ndarray:
    if reply.vectors is None:
        raise RefusedError("this answer is no array; ask for application/json or application/msgpack", "accept")
    return reply.vectors


async def _msgpack(reply: Reply, large: bool) -> list[Part]:
    if reply.text is not None:
        return _cut(reply.text)
    return await _gathered(msgpack_pieces(reply.data))


async def _gathered(pieces: Iterable[Part]) -> list[Part]:
    """Return pieces put together to what is sent at once; others have their turn while that is done."""
    parts, held, length = list[Part](), list[Part](), 0
    for piece in pieces:
        if isinstance(piece, memoryview):
            parts += (b"".join(held), *_cut(piece))
            held, length = [], 0
            continue
        held.append(piece)
        length += len(piece)
        if length >= SENT:
            parts.append(b"".join(held))
            held, length = [], 0
        if len(piece) >= PIECE:
            await asyncio.sleep(0)
    parts.append(b"".join(held))
    return parts


_FORMS: dict[str, Callable[[Reply, bool], Awaitable[list[Part]]]] = {
    JSON: _json,
    "application/x-npy": _npy,
    "application/npy": _npy,
    "application/vnd.apache.arrow.stream": _arrow,
    MSGPACK: _msgpack,
    "application/x-msgpack": _msgpack,
}
_ANY = ("*/*", "application/*", "")


def accepted(header: str) -> str:
    """Return the form that a client takes, by its ``Accept``.

    Raises:
        RefusedError: it takes none that there is.
    """
    # Clients send the same few; long ones are not kept.
    return _accepted(header) if len(header) <= 100 else _accepted.__wrapped__(header)


@lru_cache(maxsize=256)
def _accepted(header: str) -> str:
    asked = [part.partition(";")[0].strip().lower() for part in header.split(",")[:32]]
    # What is named comes before what is meant by a star; JSON where nothing is.
    for form in asked:
        if form in _FORMS and _there(form):
            return form
    if not asked or any(form in _ANY for form in asked) or any(form.startswith("text/") for form in asked):
        return JSON
    raise RefusedError(f"accept is {header[:80]!r}; expected one of {', '.join(_FORMS)}", "accept")


def _there(form: str) -> bool:
    """Return whether the library that a form needs is installed."""
    from importlib.util import find_spec

    library = "msgpack" if form.endswith("msgpack") else "pyarrow" if "arrow" in form else None
    return library is None or find_spec(library) is not None


async def written_in_pieces(reply: Reply, form: str, size: int) -> list[Part]:
    """Return an answer in a form that `accepted` gave, in parts; a large one gives way to others while it is written.

    Args:
        reply: the answer.
        form: what to write.
        size: about how many numbers and words it has.

    Raises:
        RefusedError: it has no such form.
    """
    if size > PIECE:
        return await _FORMS[form](reply, True)
    parts = await _FORMS[form](reply, False)
    return parts if len(parts) == 1 else [b"".join(parts)]

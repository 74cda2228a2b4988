"""Answers as bytes: JSON, or what the client says it takes: an array as ``.npy`` or Arrow, anything as MessagePack.

A large answer is written in pieces, between which others are served: a library that writes one as a whole keeps the
interpreter from all else, for seconds where it has millions of numbers.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from flodl_hf.serving.doors.door import Reply
from flodl_hf.serving.faults import RefusedError
from flodl_hf.serving.frames import PIECE, as_json, from_json, json_pieces

__all__ = ["accepted", "written", "written_in_pieces"]

JSON = "application/json"
# So much of an answer is sent at once: pieces of one number each would be a packet each.
SENT = 1 << 18


def _json(reply: Reply) -> bytes:
    return as_json(reply.data) if reply.text is None else reply.text


def _npy(reply: Reply) -> bytes:
    if reply.vectors is None:
        raise RefusedError("this answer is no array; ask for application/json or application/msgpack", "accept")
    array = np.ascontiguousarray(reply.vectors)
    return b"".join((_npy_head(array.dtype.str, array.shape), array.data))


@lru_cache(maxsize=256)
def _npy_head(kind: str, shape: tuple[int, ...]) -> bytes:
    """Return what stands before the numbers in a ``.npy`` file; `numpy.save` takes longer than all else does."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": shape})
    return file.getvalue()


def _arrow(reply: Reply) -> bytes:
    """Return vectors as an Arrow stream: one column, ``vector``, of lists of one length."""
    if reply.vectors is None:
        raise RefusedError("this answer is no array; ask for application/json or application/msgpack", "accept")
    import pyarrow as pa

    numbers = pa.array(np.ascontiguousarray(reply.vectors).reshape(-1))
    column = pa.FixedSizeListArray.from_arrays(numbers, reply.vectors.shape[1])
    batch = pa.record_batch([column], names=["vector"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def _msgpack(reply: Reply) -> bytes:
    import msgpack

    data = reply.data if reply.text is None else from_json(reply.text)
    packed: Any = msgpack.packb(data, default=_plain)
    return packed


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "shape": list(value.shape), "data": np.ascontiguousarray(value).tobytes()}
    raise TypeError(f"{type(value).__name__} has no form in MessagePack")


_FORMS: dict[str, Callable[[Reply], bytes]] = {
    JSON: _json,
    "application/x-npy": _npy,
    "application/npy": _npy,
    "application/vnd.apache.arrow.stream": _arrow,
    "application/msgpack": _msgpack,
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


def written(reply: Reply, form: str) -> bytes:
    """Return an answer in a form that `accepted` gave.

    Raises:
        RefusedError: it has no such form.
    """
    return _FORMS[form](reply)


async def written_in_pieces(reply: Reply, form: str, size: int) -> list[bytes]:
    """Return an answer in a form that `accepted` gave, in parts; a large one gives way to others while it is written.

    Args:
        reply: the answer.
        form: what to write.
        size: about how many numbers and words it has.

    Raises:
        RefusedError: it has no such form.
    """
    if size <= PIECE or form != JSON or reply.text is not None:
        return [written(reply, form)]
    parts, held, length = list[bytes](), list[bytes](), 0
    for piece in json_pieces(reply.data):
        held.append(piece)
        length += len(piece)
        if length >= SENT:
            parts.append(b"".join(held))
            held, length = [], 0
        if len(piece) >= PIECE:
            await asyncio.sleep(0)
    parts.append(b"".join(held))
    return parts

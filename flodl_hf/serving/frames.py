"""Messages between the doors and a worker: JSON with arrays beside it, each with its length before it.

Decides how a message lies in a stream. Nothing in it can run: JSON types, and numbers as bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from struct import Struct
from typing import Any

import numpy as np

__all__ = [
    "HEAD",
    "PIECE",
    "as_json",
    "from_json",
    "json_pieces",
    "packed",
    "parts_of",
    "room_behind",
    "unpacked",
]

HEAD = Struct("<QI")
"""Bytes of the whole message behind this, and of its JSON."""

PIECE = 16_384
"""Most numbers that are written as JSON at once: half a millisecond in which a loop does nothing else."""

_KINDS = ("float32", "float16", "int64", "int32", "uint8")
_NAMES = {np.dtype(kind): kind for kind in _KINDS}  # numpy puts a dtype's name together anew each time

as_json: Callable[[Any], bytes]
"""A value as JSON in UTF-8; numbers that are not finite as null."""
from_json: Callable[[bytes | bytearray], Any]
"""The value of JSON; raises ValueError for what is none, or nested too deeply."""

try:
    import orjson
except ImportError:

    def _finite(value: Any) -> Any:
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        if isinstance(value, dict):
            return {name: _finite(part) for name, part in value.items()}
        if isinstance(value, np.ndarray):
            return _finite(value.tolist())
        return [_finite(part) for part in value] if isinstance(value, (list, tuple)) else value

    def _dumped(value: Any) -> bytes:
        return json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()

    def _refused(name: str) -> Any:
        raise ValueError(f"{name} is no JSON")

    def _loaded(data: bytes | bytearray) -> Any:
        try:
            found = json.loads(data.decode("utf-8"), parse_constant=_refused)
            if b"\\ud" in data.lower():
                json.dumps(found, ensure_ascii=False).encode()  # half a pair is no text
            return found
        except RecursionError:
            raise ValueError("nested too deeply") from None

    as_json, from_json = _dumped, _loaded
else:

    def _dumped(value: Any) -> bytes:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)

    as_json, from_json = _dumped, orjson.loads


def json_pieces(value: Any) -> Iterator[bytes]:
    """Yield a value as JSON piece by piece; together they are what `as_json` gives.

    Args:
        value: JSON types and arrays.
    """
    if room_behind(value, PIECE) >= 0 or not isinstance(value, (np.ndarray, list, tuple, dict)):
        yield as_json(value)
    elif isinstance(value, dict):
        for at, (name, part) in enumerate(value.items()):
            yield (b"," if at else b"{") + as_json({name: None})[1:-5]
            yield from json_pieces(part)
        yield b"}"
    else:
        before = b"["
        for part, whole in parts_of(value):
            yield before
            if whole:
                yield as_json(part)[1:-1]
            else:
                yield from json_pieces(part)
            before = b","
        yield b"]"


def parts_of(value: Any) -> Iterator[tuple[Any, bool]]:
    """Yield members of an array or a list: as many as fit together, or one that does not fit."""
    if isinstance(value, np.ndarray):
        step = PIECE // max(1, value.size // len(value))
        if step:
            yield from ((value[at : at + step], True) for at in range(0, len(value), step))
        else:
            yield from ((row, False) for row in value)
        return
    held: list[Any] = []
    left = PIECE
    for part in value:
        left = room_behind(part, left)
        if left < 0:
            if held:
                yield held, True
                held = []
            left = room_behind(part, PIECE)
            if left < 0:
                yield part, False
                left = PIECE
                continue
        held.append(part)
    if held:
        yield held, True


def room_behind(value: Any, room: int) -> int:
    """Return how many numbers have room behind a value; below 0, as soon as that is known, where it has none itself."""
    if isinstance(value, np.ndarray):
        return room - value.size
    if isinstance(value, str):
        return room - 1 - len(value) // 8
    if isinstance(value, (list, tuple, dict)):
        room -= 1
        for part in value.values() if isinstance(value, dict) else value:
            room = room_behind(part, room)
            if room < 0:
                break
        return room
    return room - 1


def packed(message: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> list[bytes | memoryview]:
    """Return a message as parts to be written one after another.

    Args:
        message: JSON types.
        arrays: what stands beside it.
    """
    held = [np.ascontiguousarray(array) for array in arrays]
    if held:
        message = {**message, "arrays": [[_NAMES.get(array.dtype) or array.dtype.name, array.shape] for array in held]}
    text = as_json(message)
    bodies = [array.data.cast("B") for array in held if array.size]
    return [HEAD.pack(len(text) + sum(len(body) for body in bodies), len(text)), text, *bodies]


def unpacked(text_size: int, body: bytes | bytearray | memoryview) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Return the message and its arrays, which share the memory of ``body``.

    Args:
        text_size: the second number of the head.
        body: what stands behind the head.

    Raises:
        ValueError: it is no such message.
    """
    message = from_json(bytes(memoryview(body)[:text_size]))
    arrays, at = [], text_size
    for kind, shape in message.pop("arrays", ()):
        if kind not in _KINDS:
            raise ValueError(f"an array of {kind}")
        count = math.prod(shape)
        arrays.append(np.frombuffer(body, kind, count, at).reshape(shape))
        at += arrays[-1].nbytes
    return message, arrays

"""Serialization: JSON and MessagePack in bounded steps, and messages between processes.

A message is a header with lengths, JSON, and the bytes of arrays; it contains no executable content.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from struct import Struct
from typing import Any

import numpy as np

__all__ = [
    "CHUNK_NUMBERS",
    "HEAD",
    "as_json",
    "as_msgpack",
    "chunks_of",
    "from_json",
    "json_pieces",
    "msgpack_pieces",
    "pack_message",
    "remaining_room",
    "unpack_message",
]

HEAD = Struct("<QI")
"""Header of a message: bytes after the header, and bytes of the JSON."""

CHUNK_NUMBERS = 16_384
"""Maximum numbers in one step of encoding: half a millisecond in which the event loop is blocked."""

_KINDS = ("float32", "float16", "int64", "int32", "uint8")
_NAMES = {np.dtype(kind): kind for kind in _KINDS}  # numpy builds a dtype's name on each access

as_json: Callable[[Any], bytes]
"""Return a value as JSON in UTF-8; numbers that are not finite become null."""
from_json: Callable[[bytes | bytearray], Any]
"""Return the value of JSON; raises ValueError for invalid or too deeply nested JSON."""

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
        raise ValueError(f"{name} is not JSON")

    def _loaded(data: bytes | bytearray) -> Any:
        try:
            found = json.loads(data.decode("utf-8"), parse_constant=_refused)
            if b"\\ud" in data.lower():
                json.dumps(found, ensure_ascii=False).encode()  # refuses lone surrogates
            return found
        except RecursionError:
            raise ValueError("nested too deeply") from None

    as_json, from_json = _dumped, _loaded
else:

    def _dumped(value: Any) -> bytes:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)

    as_json, from_json = _dumped, orjson.loads


def json_pieces(value: Any) -> Iterator[bytes]:
    """Yield a value as JSON in pieces; together they equal the result of `as_json`.

    Args:
        value: JSON types and arrays.
    """
    if remaining_room(value, CHUNK_NUMBERS) >= 0 or not isinstance(value, (np.ndarray, list, tuple, dict)):
        yield as_json(value)
    elif isinstance(value, dict):
        for at, (name, part) in enumerate(value.items()):
            yield (b"," if at else b"{") + as_json({name: None})[1:-5]
            yield from json_pieces(part)
        yield b"}"
    else:
        before = b"["
        for part, whole in chunks_of(value):
            yield before
            if whole:
                yield as_json(part)[1:-1]
            else:
                yield from json_pieces(part)
            before = b","
        yield b"]"


def chunks_of(value: Any) -> Iterator[tuple[Any, bool]]:
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
        left = remaining_room(part, left)
        if left < 0:
            if held:
                yield held, True
                held = []
            left = remaining_room(part, CHUNK_NUMBERS)
            if left < 0:
                yield part, False
                left = CHUNK_NUMBERS
                continue
        held.append(part)
    if held:
        yield held, True


def remaining_room(value: Any, room: int) -> int:
    """Return ``room`` minus the size of a value; negative as soon as the value is known to be larger."""
    if isinstance(value, np.ndarray):
        return room - value.size
    if isinstance(value, str):
        return room - 1 - len(value) // 8
    if isinstance(value, (list, tuple, dict)):
        room -= 1
        for part in value.values() if isinstance(value, dict) else value:
            room = remaining_room(part, room)
            if room < 0:
                break
        return room
    return room - 1


def pack_message(message: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> list[bytes | memoryview]:
    """Return the parts of a message, to be written one after another.

    Args:
        message: JSON types.
        arrays: arrays of the message.
    """
    contiguous = [np.ascontiguousarray(array) for array in arrays]
    if contiguous:
        message = {
            **message,
            "arrays": [[_NAMES.get(array.dtype) or array.dtype.name, array.shape] for array in contiguous],
        }
    text = as_json(message)
    bodies = [array.data.cast("B") for array in contiguous if array.size]
    return [HEAD.pack(len(text) + sum(len(body) for body in bodies), len(text)), text, *bodies]


def unpack_message(text_size: int, body: bytes | bytearray | memoryview) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Return a message and its arrays, which share the memory of ``body``.

    Args:
        text_size: bytes of the JSON, from the header.
        body: the bytes after the header.

    Raises:
        ValueError: the message is invalid.
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


# ---- MessagePack ----------------------------------------------------------------------------------------

# Bytes from which MessagePack has only one form of a length: this byte and four bytes of length.
_LONG, _LONG_FORM = 1 << 16, b"\xc6"


def as_msgpack(value: Any) -> bytes:
    """Return a JSON value as MessagePack; numbers that are not finite become nil, as in JSON."""
    import msgpack

    pack_message: Any = msgpack.packb(from_json(as_json(value)))
    return pack_message


def msgpack_pieces(value: Any) -> Iterator[bytes | memoryview]:
    """Yield a value as MessagePack in pieces; large arrays are views of their memory.

    An array is a map with ``dtype``, ``shape`` and ``data``. Small values are encoded by the library.

    Args:
        value: JSON types and arrays.
    """
    import msgpack

    return _packed_pieces(value, msgpack.Packer(default=_plain))


def _packed_pieces(value: Any, packer: Any) -> Iterator[bytes | memoryview]:
    if isinstance(value, np.ndarray) and value.nbytes >= _LONG:
        yield packer.pack_map_header(3)
        for name, part in (("dtype", value.dtype.str), ("shape", list(value.shape))):
            yield packer.pack(name) + packer.pack(part)
        yield packer.pack("data") + _LONG_FORM + value.nbytes.to_bytes(4, "big")
        yield np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    elif isinstance(value, (list, tuple, dict)) and remaining_room(value, CHUNK_NUMBERS) < 0:
        if isinstance(value, dict):
            yield packer.pack_map_header(len(value))
            for name, part in value.items():
                yield packer.pack(name)
                yield from _packed_pieces(part, packer)
            return
        yield packer.pack_array_header(len(value))
        for part, whole in chunks_of(value):
            if whole:
                yield b"".join(map(packer.pack, part))
            else:
                yield from _packed_pieces(part, packer)
    else:
        yield packer.pack(value)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "shape": list(value.shape), "data": np.ascontiguousarray(value).tobytes()}
    raise TypeError(f"{type(value).__name__} has no MessagePack form")

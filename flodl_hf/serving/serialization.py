"""JSON and MessagePack in bounded steps, between which an event loop can run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from flodl_hf.workers.messages import as_json

CHUNK_NUMBERS = 16_384
"""Maximum numbers in one step of encoding: half a millisecond in which the event loop is blocked."""


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


# ---- MessagePack ----------------------------------------------------------------------------------------

# Bytes from which MessagePack has only one form of a length: this byte and four bytes of length.
_LONG, _LONG_FORM = 1 << 16, b"\xc6"


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

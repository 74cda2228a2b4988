"""Answers as MessagePack: what JSON has as it is there, arrays as a map of their dtype, shape and bytes.

Decides how an answer lies in MessagePack. The library writes small values; large ones are its headers and their members
one after another, for others to have their turn between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from flodl_hf.serving.frames import PIECE, as_json, from_json, parts_of, room_behind

__all__ = ["as_msgpack", "msgpack_pieces"]

# From so many bytes on MessagePack has one form of a length, four bytes behind this one.
_LONG, _LONG_FORM = 1 << 16, b"\xc6"


def as_msgpack(value: Any) -> bytes:
    """Return what JSON says of a value, as MessagePack: numbers that are not finite are nothing there, too."""
    import msgpack

    packed: Any = msgpack.packb(from_json(as_json(value)))
    return packed


def msgpack_pieces(value: Any) -> Iterator[bytes | memoryview]:
    """Yield a value as MessagePack piece by piece; arrays that are large as views of their memory.

    Args:
        value: JSON types and arrays.
    """
    import msgpack

    return _pieces(value, msgpack.Packer(default=_plain))


def _pieces(value: Any, packer: Any) -> Iterator[bytes | memoryview]:
    if isinstance(value, np.ndarray) and value.nbytes >= _LONG:
        yield packer.pack_map_header(3)
        for name, said in (("dtype", value.dtype.str), ("shape", list(value.shape))):
            yield packer.pack(name) + packer.pack(said)
        yield packer.pack("data") + _LONG_FORM + value.nbytes.to_bytes(4, "big")
        yield np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    elif isinstance(value, (list, tuple, dict)) and room_behind(value, PIECE) < 0:
        if isinstance(value, dict):
            yield packer.pack_map_header(len(value))
            for name, part in value.items():
                yield packer.pack(name)
                yield from _pieces(part, packer)
            return
        yield packer.pack_array_header(len(value))
        for part, whole in parts_of(value):
            if whole:
                yield b"".join(map(packer.pack, part))
            else:
                yield from _pieces(part, packer)
    else:
        yield packer.pack(value)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "shape": list(value.shape), "data": np.ascontiguousarray(value).tobytes()}
    raise TypeError(f"{type(value).__name__} has no form in MessagePack")

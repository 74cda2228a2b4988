"""Messages between the doors and a worker: JSON with arrays beside it, each with its length before it.

Decides how a message lies in a stream. Nothing in it can run: JSON types, and numbers as bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any

import numpy as np

__all__ = ["HEAD", "as_json", "from_json", "packed", "unpacked"]

HEAD = Struct("<QI")
"""Bytes of the whole message behind this, and of its JSON."""

_KINDS = ("float32", "float16", "int64", "int32")
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


def unpacked(text_size: int, body: bytes | bytearray) -> tuple[dict[str, Any], list[np.ndarray]]:
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

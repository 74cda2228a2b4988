"""Wire format of messages between processes: a header with lengths, JSON, and the bytes of arrays.

Nothing in a message is executed. Arrays begin at multiples of ALIGN bytes.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from struct import Struct
from threading import Lock
from typing import Any

import numpy as np

HEAD = Struct("<QQ")
"""Header of a message: bytes after the header, and bytes of the JSON."""
ALIGN = 16

Message = tuple[dict[str, Any], list[np.ndarray]]
"""JSON types, and arrays in addition to them."""

# Messages of at least this size are written part by part, without a copy.
LARGE = 1 << 20
_KINDS = ("float32", "float16", "int64", "int32", "uint8")
_NAMES = {np.dtype(kind): kind for kind in _KINDS}  # numpy builds a dtype's name on each access

try:
    import orjson
except ImportError:
    # Without the extra "serve" messages contain plain values only.
    def as_json(value: Any) -> bytes:
        """Return a value as JSON."""
        return json.dumps(value, separators=(",", ":")).encode()

    from_json: Callable[[bytes | bytearray], Any] = json.loads
else:

    def as_json(value: Any) -> bytes:
        """Return a value as JSON in UTF-8; numbers that are not finite become null."""
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)

    from_json = orjson.loads
    """Return the value of JSON; raises ValueError for invalid or too deeply nested JSON."""


def pack_message(message: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> list[bytes | memoryview]:
    """Return the parts of a message, to be written one after another.

    Args:
        message: JSON types.
        arrays: arrays of the message.
    """
    if not arrays:
        text = as_json(message)
        return [HEAD.pack(len(text), len(text)), text]
    contiguous = [np.ascontiguousarray(array) for array in arrays]
    shapes = [[_NAMES.get(array.dtype) or array.dtype.name, array.shape] for array in contiguous]
    text = as_json({**message, "arrays": shapes})
    parts: list[bytes | memoryview] = [text]
    size = len(text)
    for array in contiguous:
        if array.size:
            gap = -size % ALIGN
            parts += (bytes(gap), array.data.cast("B"))
            size += gap + array.nbytes
    return [HEAD.pack(size, len(text)), *parts]


def unpack_message(text_size: int, body: bytes | bytearray | memoryview) -> Message:
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
        at += -at % ALIGN if count else 0
        arrays.append(np.frombuffer(body, kind, count, at).reshape(shape))
        at += arrays[-1].nbytes
    return message, arrays


class Stream:
    """Blocking connection for messages; writing is thread-safe.

    Args:
        connection: a connected socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._file = connection.makefile("rb")
        self._lock = Lock()

    def write(self, message: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        """Send a message.

        Raises:
            OSError: the connection has ended.
        """
        self.send(pack_message(message, arrays))

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send the parts of one or several packed messages.

        Raises:
            OSError: the connection has ended.
        """
        with self._lock:
            for part in parts if sum(map(len, parts)) > LARGE else (b"".join(parts),):
                self.socket.sendall(part)

    def read(self) -> Message | None:
        """Return the next message; None at the end of the connection.

        Raises:
            ValueError: the message is invalid.
        """
        try:
            head = self._file.read(HEAD.size)
            if len(head) < HEAD.size:
                return None
            size, text = HEAD.unpack(head)
            body = bytearray(size)
            if self._file.readinto(body) < size:
                return None
        except OSError:
            return None
        return unpack_message(text, body)

    def shut(self) -> None:
        """End the connection for both sides; a reading thread returns."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Release the socket; no thread may use it any more."""
        self._file.close()
        self.socket.close()

"""Messages between processes: wire format, blocking connections, connections of asyncio, and open sockets.

A message is a header with lengths, JSON, and the bytes of arrays, which begin at multiples of ALIGN bytes. Nothing in a
message is executed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from struct import Struct
from threading import Lock
from typing import Any

import numpy as np

LOG = logging.getLogger("flodl_hf.serving")
HEAD = Struct("<QQ")
"""Header of a message: bytes after the header, and bytes of the JSON."""
ALIGN = 16

Message = tuple[dict[str, Any], list[np.ndarray]]
"""JSON types, and arrays in addition to them."""
OnMessage = Callable[[dict[str, Any], list[Any]], None]
"""Called with each message and its arrays."""

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


# ---- asyncio -------------------------------------------------------------------------------------------


class Link(asyncio.Protocol):
    """Connection to another process, usually a worker.

    Messages are handled by the callback that reads them, without a task in between, so a result reaches its request in
    the next iteration of the event loop.

    Args:
        on_message: called with each message.
    """

    def __init__(self, on_message: OnMessage) -> None:
        self.on_message = on_message
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the connection has ended."""
        self._transport: Any = None
        self._head = b""  # of an unfinished header
        # Unfinished body, its received bytes, and the bytes of its JSON. It is assembled as its parts arrive;
        # assembling a large one at the end would block the event loop.
        self._body: memoryview | None = None
        self._size = self._text = 0
        self.room: asyncio.Future[None] | None = None
        """Done when the other process has read enough; None if it reads fast enough."""
        self._turn: asyncio.Handle | None = None
        self._waiting: list[Any] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """Mark the connection as closed."""
        self.resume_writing()
        if not self.closed.done():
            self.closed.set_result(None)

    def data_received(self, data: bytes) -> None:
        """Handle complete messages and buffer the rest."""
        if self._body is not None:
            room = len(self._body) - self._size
            self._body[self._size : self._size + len(data)] = data[:room]
            self._size += len(data)
            if self._size < len(self._body):
                return
            body, self._body, data = self._body, None, data[room:]
            if not self._deliver(self._text, body):
                return
        data, at = self._head + data, 0
        while len(data) - at >= HEAD.size:
            size, self._text = HEAD.unpack_from(data, at)
            body = memoryview(data)[at + HEAD.size : at + HEAD.size + size]
            if len(body) < size:
                self._head, self._size, self._body = b"", len(body), np.empty(size, np.uint8).data
                self._body[: self._size] = body
                return
            if not self._deliver(self._text, body):
                return
            at += HEAD.size + size
        self._head = data[at:]

    def _deliver(self, text: int, body: memoryview) -> bool:
        """Handle one message; return False if it is invalid."""
        try:
            self.on_message(*unpack_message(text, body))
        except Exception:
            LOG.exception("invalid message of another process; its connection is closed")
            self._transport.abort()
            return False
        return True

    def pause_writing(self) -> None:
        """Make senders wait because the other process does not read fast enough."""
        self.room = self.room or asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        """Let senders continue."""
        if self.room is not None:
            self.room.set_result(None)
            self.room = None

    def send(self, message: dict[str, Any], arrays: Sequence[Any] = ()) -> None:
        """Send a message.

        Raises:
            OSError: the connection has ended.
        """
        if self._transport.is_closing():
            raise OSError("the connection has ended")
        parts = pack_message(message, arrays)
        if self._turn is None:
            # The first message of an iteration of the loop is sent immediately, the others together at its end.
            self._turn = asyncio.get_running_loop().call_soon(self._flush)
            self._transport.write(b"".join(parts))
        else:
            self._waiting += parts

    def _flush(self) -> None:
        self._turn = None
        if self._waiting:
            parts, self._waiting = self._waiting, []
            self._transport.write(b"".join(parts))

    def close(self) -> None:
        """Send buffered messages and close the connection."""
        self._flush()
        self._transport.close()


async def connect_link(connection: socket.socket, on_message: OnMessage) -> Link:
    """Return the link of a connected socket.

    Args:
        connection: a socket connected with another process.
        on_message: called with each message.
    """
    _, link = await asyncio.get_running_loop().create_connection(lambda: Link(on_message), sock=connection)
    return link


# ---- open sockets ---------------------------------------------------------------------------------------

NUMBER_BYTES = 8


def send_socket(channel: socket.socket, number: int, sent: socket.socket) -> None:
    """Send an open socket to another process, with a number that identifies it.

    Args:
        channel: connection to the process.
        number: the number.
        sent: the socket; it stays open in this process.

    Raises:
        OSError: the process has ended, or its buffer is full.
    """
    socket.send_fds(channel, [number.to_bytes(NUMBER_BYTES, "little")], [sent.fileno()])


def receive_socket(channel: socket.socket) -> tuple[int, socket.socket | None] | None:
    """Return the next received socket with its number; None at the end of the connection.

    The socket is None if this process has reached its limit of open files.

    Raises:
        BlockingIOError: there is none yet, and the connection does not block.
    """
    data, descriptors, _, _ = socket.recv_fds(channel, NUMBER_BYTES, 1)
    if not data:
        return None
    return int.from_bytes(data, "little"), socket.socket(fileno=descriptors[0]) if descriptors else None

"""Connections of a program with asyncio to other processes, and open sockets sent over them.

Messages are handled by the callback that reads them, without a task in between, so a result reaches its request in the
next iteration of the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flodl_hf.workers.messages import HEAD, pack_message, unpack_message

LOG = logging.getLogger("flodl_hf.serving")
# Messages of at least this size are assembled as their parts arrive; assembling them at the end would block the event
# loop.
LARGE = 1 << 20

OnMessage = Callable[[dict[str, Any], list[Any]], None]
"""Called with each message and its arrays."""


class Link(asyncio.Protocol):
    """Connection to another process, usually a worker.

    Args:
        on_message: called with each message.
    """

    def __init__(self, on_message: OnMessage) -> None:
        self.on_message = on_message
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the connection has ended."""
        self._transport: Any = None
        self._held: list[bytes] = []
        self._size, self._wanted = 0, HEAD.size
        self._large: memoryview | None = None
        self._room: asyncio.Future[None] | None = None
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
        if self._large is not None:
            room = len(self._large) - self._size
            self._large[self._size : self._size + len(data)] = data[:room]
            self._size += len(data)
            if self._size < len(self._large):
                return
            whole, self._large, data = self._large, None, data[room:]
            if not self._deliver(HEAD.unpack_from(whole)[1], whole[HEAD.size :]):
                return
        elif self._held:
            self._held.append(data)
            self._size += len(data)
            if self._size < self._wanted:
                return
            data = b"".join(self._held)
            self._held.clear()
        at, end = 0, len(data)
        self._wanted = HEAD.size
        while end - at >= HEAD.size:
            size, text = HEAD.unpack_from(data, at)
            last = at + HEAD.size + size
            if last > end:
                self._wanted = last - at
                break
            if not self._deliver(text, memoryview(data)[at + HEAD.size : last]):
                return
            at = last
        if at == end:
            return
        self._size = end - at
        if self._wanted < LARGE:
            self._held.append(data[at:])
        else:
            self._large = np.empty(self._wanted, np.uint8).data
            self._large[: self._size] = data[at:]

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
        self._room = self._room or asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        """Let senders continue."""
        if self._room is not None:
            self._room.set_result(None)
            self._room = None

    @property
    def full(self) -> bool:
        """Whether senders should wait until the other process has read more."""
        return self._room is not None

    async def room(self) -> None:
        """Wait until the other process has read enough."""
        while self._room is not None:
            await asyncio.shield(self._room)

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

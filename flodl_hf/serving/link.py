"""A socket to another process of ours in an event loop: messages out, and messages in as soon as they are whole.

A message is handed on by the callback that reads it, without a task between: an answer is with who asked one turn of
the loop after it came.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flodl_hf.serving.frames import HEAD, packed, unpacked

__all__ = ["Heard", "Link", "linked"]

LOG = logging.getLogger("flodl_hf.serving")
# A message of so many bytes is put together as its parts come: all of it at once would take the loop's time.
LARGE = 1 << 20

Heard = Callable[[dict[str, Any], list[Any]], None]
"""Who is told of each message: what it says, and its arrays."""


class Link(asyncio.Protocol):
    """One connection to another process, mostly a worker.

    Args:
        heard: called with each message.
    """

    def __init__(self, heard: Heard) -> None:
        self.heard = heard
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when nothing comes any more."""
        self._transport: Any = None
        self._held: list[bytes] = []
        self._size, self._wanted = 0, HEAD.size
        self._large: memoryview | None = None
        self._room: asyncio.Future[None] | None = None
        self._turn: asyncio.Handle | None = None
        self._waiting: list[Any] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way out."""
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """Say that nothing comes any more."""
        self.resume_writing()
        if not self.closed.done():
            self.closed.set_result(None)

    def data_received(self, data: bytes) -> None:
        """Hand on what is whole, and keep the rest."""
        if self._large is not None:
            room = len(self._large) - self._size
            self._large[self._size : self._size + len(data)] = data[:room]
            self._size += len(data)
            if self._size < len(self._large):
                return
            whole, self._large, data = self._large, None, data[room:]
            if not self._told(HEAD.unpack_from(whole)[1], whole[HEAD.size :]):
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
            if not self._told(text, memoryview(data)[at + HEAD.size : last]):
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

    def _told(self, text: int, body: memoryview) -> bool:
        """Hand a message on; return whether it was understood."""
        try:
            self.heard(*unpacked(text, body))
        except Exception:
            LOG.exception("a message of another process is not understood; its connection ends")
            self._transport.abort()
            return False
        return True

    def pause_writing(self) -> None:
        """Let those wait that send more: the worker does not read as fast."""
        self._room = self._room or asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        """Let them go on."""
        if self._room is not None:
            self._room.set_result(None)
            self._room = None

    @property
    def full(self) -> bool:
        """Whether who sends should wait for `room`."""
        return self._room is not None

    async def room(self) -> None:
        """Return when the worker has read enough."""
        while self._room is not None:
            await asyncio.shield(self._room)

    def send(self, message: dict[str, Any], arrays: Sequence[Any] = ()) -> None:
        """Send a message.

        Raises:
            OSError: the connection has ended.
        """
        if self._transport.is_closing():
            raise OSError("the connection has ended")
        parts = packed(message, arrays)
        if self._turn is None:
            # The first of this turn of the loop goes at once; others of the turn go together.
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
        """Send what is left, and end."""
        self._flush()
        self._transport.close()


async def linked(held: socket.socket, heard: Heard) -> Link:
    """Return the connection of a socket.

    Args:
        held: connected with a worker.
        heard: called with each message.
    """
    _, link = await asyncio.get_running_loop().create_connection(lambda: Link(heard), sock=held)
    return link

"""Connections that keep others from being served are closed: heads that do not come or do not end, answers not read.

What uvicorn does of HTTP stays its own; here are the limits that it has no options for, and that an answer's head and
its body are sent together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from flodl_hf.serving.settings import Settings

__all__ = ["LARGE", "MAX_HEAD", "MAX_HEADERS", "MAX_WAITING", "Whole", "guarded"]

MAX_HEAD = 64 << 10
"""Most bytes of a request's line and headers."""
MAX_HEADERS = 128
"""Most headers of a request."""
MAX_WAITING = 128
"""Most requests of a connection that wait for the answer to one before them."""

LARGE = 1 << 16
"""From so many bytes a body is not copied behind its head."""


def guarded(kind: type[Any], settings: Settings, closed: Callable[[], None] | None = None) -> type[Any]:
    """Return a protocol of uvicorn with limits.

    Args:
        kind: uvicorn's.
        settings: the limits.
        closed: called whenever a connection has ended.
    """

    class Guarded(kind):
        def connection_made(self, transport: Any) -> None:
            self._late: asyncio.TimerHandle | None = None
            self._unread: asyncio.TimerHandle | None = None
            self._head_size = self._headers = 0
            super().connection_made(transport)
            self._expect()

        def connection_lost(self, exc: Exception | None) -> None:
            self._heard()
            self.resume_writing()
            super().connection_lost(exc)
            if closed is not None:
                closed()

        def data_received(self, data: bytes) -> None:
            before = self.cycle
            super().data_received(data)
            if self.cycle is not before or (self.cycle is not None and not self.cycle.response_complete):
                # There is a head; what comes is its body, whose time the endpoint watches.
                self._heard()
                return
            self._head_size += len(data)
            if self._head_size > MAX_HEAD:
                self.transport.abort()
            else:
                self._expect()

        def on_message_begin(self) -> None:
            self._head_size = self._headers = 0
            if len(getattr(self, "pipeline", ())) >= MAX_WAITING:
                raise ValueError("too many requests at once")  # answered with 400, and the connection ends
            super().on_message_begin()

        def on_header(self, name: bytes, value: bytes) -> None:
            self._headers += 1
            self._head_size += len(name) + len(value)
            if self._headers > MAX_HEADERS or self._head_size > MAX_HEAD:
                raise ValueError("too many headers")  # the parser ends with it, which is answered with 400
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            before = self.cycle
            super().on_headers_complete()
            if self.cycle is not before:
                self.cycle.transport = Whole(self.transport)

        def pause_writing(self) -> None:
            super().pause_writing()
            if self._unread is None:
                self._unread = self.loop.call_later(settings.write_s, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._unread is not None:
                self._unread.cancel()
                self._unread = None

        def _expect(self) -> None:
            if self._late is None:
                self._late = self.loop.call_later(settings.header_s, self.transport.close)

        def _heard(self) -> None:
            self._head_size = 0
            if self._late is not None:
                self._late.cancel()
                self._late = None

    return Guarded


class Whole:
    """The way out for one answer: its head waits for what comes behind it, so that a small answer is one packet.

    Args:
        transport: of the connection.
    """

    __slots__ = ("_head", "_sent", "_transport")

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._head, self._sent = b"", False

    def write(self, data: bytes) -> None:
        """Send some bytes, or keep them if they are the head."""
        if self._sent:
            self._transport.write(data)
        elif self._head:
            self._sent = True
            if len(data) < LARGE:
                self._transport.write(self._head + data)
            else:
                self._transport.writelines((self._head, data))
        elif data.startswith(b"HTTP/1.1 100"):
            self._transport.write(data)
        else:
            self._head = data

    def close(self) -> None:
        """Send what was kept, and end the connection."""
        if self._head and not self._sent:
            self._sent = True
            self._transport.write(self._head)
        self._transport.close()

    def is_closing(self) -> bool:
        """Return whether the connection ends."""
        return bool(self._transport.is_closing())

"""Limits of connections: slow or endless request headers, and clients that do not read responses.

uvicorn parses HTTP. This module adds limits that uvicorn has no options for, and sends the head and body of a response
in one packet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from http import HTTPStatus
from typing import Any

from flodl_hf.serving.settings import Settings

MAX_HEAD = 64 << 10
"""Maximum bytes of a request's line and headers."""
MAX_HEADERS = 128
"""Maximum number of headers."""
MAX_WAITING = 128
"""Maximum number of pipelined requests of a connection."""

LARGE = 1 << 16
"""Bodies of at least this size are not copied behind their head."""

# Bytes allowed in headers and at line ends; and headers that determine the transfer.
_USUAL = bytes(byte for byte in range(256) if byte in b"\t\r\n" or not (byte < 32 or byte == 127))
_SENDING = (b"\nconnection:", b"\ntransfer-encoding:")


def limited_protocol(kind: type[Any], settings: Settings, closed: Callable[[], None] | None = None) -> type[Any]:
    """Return a protocol class of uvicorn with limits.

    Args:
        kind: uvicorn's class.
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
            self._head_received()
            self.resume_writing()
            super().connection_lost(exc)
            if closed is not None:
                closed()

        def data_received(self, data: bytes) -> None:
            before = self.cycle
            super().data_received(data)
            if self.cycle is not before or (self.cycle is not None and not self.cycle.response_complete):
                # The head is complete; the endpoint limits the time of the body.
                self._head_received()
                return
            self._head_size += len(data)
            if self._head_size > MAX_HEAD:
                self.transport.abort()
            else:
                self._expect()

        def on_message_begin(self) -> None:
            self._head_size = self._headers = 0
            if len(getattr(self, "pipeline", ())) >= MAX_WAITING:
                raise ValueError("too many requests")  # answered with 400, and the connection is closed
            super().on_message_begin()

        def on_header(self, name: bytes, value: bytes) -> None:
            self._headers += 1
            self._head_size += len(name) + len(value)
            if self._headers > MAX_HEADERS or self._head_size > MAX_HEAD:
                raise ValueError("too many headers")  # the parser fails, which is answered with 400
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            before = self.cycle
            super().on_headers_complete()
            if self.cycle is not before:
                SingleWrite(self.cycle)

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

        def _head_received(self) -> None:
            self._head_size = 0
            if self._late is not None:
                self._late.cancel()
                self._late = None

    return Guarded


class SingleWrite:
    """Sends the head and body of a small response in one packet.

    uvicorn writes the head before the body and checks each header separately, which takes a tenth of the time of a
    small request. Other responses are left to uvicorn.

    Args:
        cycle: request cycle of uvicorn's parser; its ``send`` is replaced.
    """

    __slots__ = ("_cycle", "_send", "_start")

    def __init__(self, cycle: Any) -> None:
        self._cycle, self._send = cycle, cycle.send
        self._start: dict[str, Any] | None = None
        cycle.send = self.send

    async def send(self, message: dict[str, Any]) -> None:
        """Handle an ASGI message."""
        cycle = self._cycle
        if message["type"] == "http.response.start" and not cycle.response_started:
            self._start = message
            return
        start, self._start = self._start, None
        if start is not None:
            body = message.get("body", b"")
            if not message.get("more_body") and (head := self._plain(start, len(body))) is not None:
                if len(body) < LARGE:
                    cycle.transport.write(head + body)
                else:
                    cycle.transport.writelines((head, body))
                cycle.response_started = cycle.response_complete = True
                cycle.waiting_for_100_continue = False
                cycle.message_event.set()
                cycle.on_response()
                return
            await self._send(start)
        await self._send(message)

    def _plain(self, start: dict[str, Any], size: int) -> bytes | None:
        """Return the encoded head of a plain response; None for others."""
        cycle, status, headers = self._cycle, start["status"], start.get("headers", ())
        if cycle.scope["method"] == "HEAD" or not cycle.keep_alive or cycle.disconnected or cycle.flow.write_paused:
            return None
        parts = [_line(status)]
        for name, value in (*cycle.default_headers, *headers):
            parts += (name, b": ", value, b"\r\n")
        parts.append(b"\r\n")
        head = b"".join(parts)
        lower = head.lower()
        sized = b"\ncontent-length: %d\r\n" % size in lower and status not in (204, 304)
        if not sized or lower.translate(None, _USUAL) or any(name in lower for name in _SENDING):
            return None
        # No header may contain a line end.
        lines = len(cycle.default_headers) + len(headers) + 2
        return head if head.count(b"\n") == head.count(b"\r") == lines else None


@cache
def _line(status: int) -> bytes:
    # The unofficial status 499 has no phrase.
    phrase = next((known.phrase for known in HTTPStatus if known == status), "")
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()

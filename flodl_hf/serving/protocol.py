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

CYCLE = "flodl_hf.cycle"
"""Key of an ASGI scope with uvicorn's object of the request."""


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
            self._head_size = self._chunk = 0  # bytes since the last complete head or part of a body; of the last read
            self._complete = -1  # headers of the last complete head; -1 while a head is unfinished
            super().connection_made(transport)
            self._expect()

        def connection_lost(self, exc: Exception | None) -> None:
            self._cancel_late()
            self.resume_writing()
            super().connection_lost(exc)
            if closed is not None:
                closed()

        def data_received(self, data: bytes) -> None:
            before, self._chunk = self.cycle, len(data)
            self._head_size += len(data)
            super().data_received(data)
            # An unfinished head, or trailers; the parser keeps an unfinished header for itself.
            if self._head_size > MAX_HEAD or (len(self.headers or ()) != self._complete and self._exceeded()):
                if not self.transport.is_closing():
                    self.send_400_response("Invalid HTTP request received.")
            elif self.cycle is not before or (self.cycle is not None and not self.cycle.response_complete):
                # The head is complete; the endpoint limits the time of the body.
                self._cancel_late()
            else:
                self._expect()

        def on_message_begin(self) -> None:
            self._head_size = 0
            self._complete = -1
            if len(self.pipeline) >= MAX_WAITING:
                raise ValueError("too many requests")  # answered with 400, and the connection is closed
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            count = len(self.headers)
            if count > MAX_HEADERS or (self._head_size + self._chunk > MAX_HEAD and self._exceeded()):
                raise ValueError("too many headers")  # the parser fails, which is answered with 400
            self._complete, self._head_size, before = count, 0, self.cycle
            super().on_headers_complete()
            if self.cycle is not before:
                self.scope[CYCLE] = self.cycle

        def on_body(self, body: bytes) -> None:
            self._head_size = 0
            super().on_body(body)

        def _exceeded(self) -> bool:
            headers = self.headers or ()
            return len(headers) > MAX_HEADERS or sum(len(name) + len(value) for name, value in headers) > MAX_HEAD

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

        def _cancel_late(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

    return Guarded


def write_response(scope: dict[str, Any], status: int, head: bytes, body: bytes | memoryview) -> bool:
    """Write a response in one packet; return False if it has to be sent by ASGI messages.

    uvicorn writes the head before the body and checks each header separately, which takes a tenth of the time of a
    small request.

    Args:
        scope: ASGI scope.
        status: HTTP status.
        head: valid headers with ``content-length``; each ends with a line break.
        body: the whole body.
    """
    cycle = scope.get(CYCLE)
    if cycle is None or cycle.response_started or cycle.disconnected:
        return False
    if not cycle.keep_alive or cycle.flow.write_paused:
        return False
    defaults = b"".join([b"%b: %b\r\n" % header for header in cycle.default_headers])
    head = b"%b%b%b\r\n" % (_line(status), defaults, head)
    if len(body) < LARGE:
        cycle.transport.write(head + body)
    else:
        cycle.transport.writelines((head, body))
    cycle.response_started = cycle.response_complete = True
    cycle.waiting_for_100_continue = False
    cycle.message_event.set()
    cycle.on_response()
    return True


@cache
def _line(status: int) -> bytes:
    # The unofficial status 499 has no phrase.
    phrase = next((known.phrase for known in HTTPStatus if known == status), "")
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()

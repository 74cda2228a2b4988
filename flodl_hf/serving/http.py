"""uvicorn server: limits of connections, signal handlers and log; used by every HTTP process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from flodl_hf.serving.metrics import Lines, Log
from flodl_hf.serving.responses import CYCLE
from flodl_hf.serving.settings import Settings

MAX_HEAD = 64 << 10
"""Maximum bytes of a request's line and headers."""
MAX_HEADERS = 128
"""Maximum number of headers."""
MAX_WAITING = 128
"""Maximum number of pipelined requests of a connection."""

Calls = Mapping[signal.Signals, Callable[[], Any]]


class HttpServer(uvicorn.Server):
    """Server of an application that finishes requests at the first signal and stops at the second.

    Its exit status is 0.

    Args:
        app: the application.
        settings: its limits; the HTTP processes share the maximum number of connections.
        calls: signal handlers; SIGINT and SIGTERM stop the server unless they are given.
        closed: called whenever a connection has ended.
    """

    def __init__(self, app: Any, settings: Settings, calls: Calls, closed: Callable[[], None] | None = None) -> None:
        protocol: Any = partial(_LimitedProtocol, settings, closed)
        super().__init__(uvicorn.Config(
            app, http=protocol, log_config=None, access_log=False,
            server_header=False, timeout_keep_alive=int(settings.idle_s), ws="none",
            timeout_graceful_shutdown=int(settings.drain_s),
            limit_concurrency=math.ceil(settings.max_connections / settings.http_processes),
            h11_max_incomplete_event_size=MAX_HEAD, lifespan="on", proxy_headers=False, backlog=2048,
        ))  # fmt: skip
        stopping = {number: partial(self.handle_exit, number, None) for number in (signal.SIGINT, signal.SIGTERM)}
        self._calls = {**stopping, **calls}

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install the signal handlers while the context is active."""
        with signal_handlers(self._calls):
            yield

    async def begin(self, sockets: list[Any]) -> asyncio.Future[None]:
        """Return the task of the server, which accepts connections already or has ended.

        Args:
            sockets: listening sockets.
        """
        task = asyncio.ensure_future(self.serve(sockets))
        while not self.started and not task.done():
            await asyncio.sleep(0.005)
        return task


@contextlib.contextmanager
def signal_handlers(calls: Calls) -> Iterator[None]:
    """Install signal handlers while the context is active; only in the main thread.

    Args:
        calls: function of each signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    for number, call in calls.items():
        loop.add_signal_handler(number, call)
    try:
        yield
    finally:
        for number in calls:
            loop.remove_signal_handler(number)


class _LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol of a connection with limits that uvicorn has no options for.

    Slow or endless request headers and clients that do not read responses end their connection.

    Args:
        settings: the limits.
        closed: called when the connection has ended.
        **options: of uvicorn.
    """

    def __init__(self, settings: Settings, closed: Callable[[], None] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._settings, self._closed = settings, closed

    def connection_made(self, transport: Any) -> None:
        self._late: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._head_size = self._chunk = 0  # bytes since the last complete head or part of a body; of the last read
        self._complete = -1  # headers of the last complete head; -1 while a head is unfinished
        super().connection_made(transport)
        self._late = self.loop.call_later(self._settings.header_s, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_late()
        self.resume_writing()
        super().connection_lost(exc)
        if self._closed is not None:
            self._closed()

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
        elif self._late is None:
            self._late = self.loop.call_later(self._settings.header_s, self.transport.close)

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
            scope: Any = self.scope
            scope[CYCLE] = self.cycle

    def on_body(self, body: bytes) -> None:
        self._head_size = 0
        super().on_body(body)

    def _exceeded(self) -> bool:
        headers = self.headers or ()
        return len(headers) > MAX_HEADERS or sum(len(name) + len(value) for name, value in headers) > MAX_HEAD

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self._settings.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _cancel_late(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


@contextlib.contextmanager
def server_log() -> Iterator[None]:
    """Write the server's log to stderr while the context is active."""
    logger = logging.getLogger("flodl_hf.serving")
    handler = Lines(sys.stderr)
    handler.setFormatter(Log())
    for each in (logger, logging.getLogger("uvicorn.error"), logging.getLogger("opentelemetry")):
        each.handlers, each.propagate = [handler], False
    logger.setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    try:
        yield
    finally:
        handler.flush()


def runner() -> asyncio.Runner:
    """Return an event loop runner; uvloop's if it is installed."""
    # uvicorn's default configuration would log requests in addition to `server_log`.
    quiet = uvicorn.Config(runner, log_config=None, access_log=False)
    return asyncio.Runner(loop_factory=quiet.get_loop_factory())

"""uvicorn server with limits, signal handlers and log; used by every HTTP process."""

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

from flodl_hf.serving.log import Lines, Log
from flodl_hf.serving.protocol import MAX_HEAD, limited_protocol
from flodl_hf.serving.settings import Settings

Calls = Mapping[signal.Signals, Callable[[], Any]]


class HttpServer(uvicorn.Server):
    """Server that finishes requests at the first signal and stops at the second; its exit status is 0.

    Args:
        config: uvicorn's configuration.
        calls: additional signal handlers, or replacements of the default ones.
    """

    def __init__(self, config: uvicorn.Config, calls: Calls) -> None:
        super().__init__(config)
        self._calls = calls

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install the signal handlers while the context is active."""
        stopping = {number: partial(self.handle_exit, number, None) for number in (signal.SIGINT, signal.SIGTERM)}
        with signal_handlers({**stopping, **self._calls}):
            yield


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


def http_server(app: Any, settings: Settings, calls: Calls, closed: Callable[[], None] | None = None) -> HttpServer:
    """Return a server of an application.

    Args:
        app: the application.
        settings: its limits; the HTTP processes share the maximum number of connections.
        calls: signal handlers; SIGINT and SIGTERM stop the server unless they are given.
        closed: called whenever a connection has ended.
    """
    config = uvicorn.Config(
        app, http=limited_protocol(HttpToolsProtocol, settings, closed), log_config=None, access_log=False,
        server_header=False, timeout_keep_alive=int(settings.idle_s), ws="none",
        timeout_graceful_shutdown=int(settings.drain_s),
        limit_concurrency=math.ceil(settings.max_connections / settings.http_processes),
        h11_max_incomplete_event_size=MAX_HEAD, lifespan="on", proxy_headers=False, backlog=2048,
    )  # fmt: skip
    return HttpServer(config, calls)


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

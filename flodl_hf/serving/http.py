"""HTTP by uvicorn with the limits of a server, signals, and the log: what every process that answers has."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import uvicorn

from flodl_hf.serving.log import Lines, Log
from flodl_hf.serving.protocol import MAX_HEAD, guarded
from flodl_hf.serving.settings import Settings

__all__ = ["HttpServer", "http_server", "listened", "logged", "runner", "settled"]

Calls = Mapping[signal.Signals, Callable[[], Any]]


class HttpServer(uvicorn.Server):
    """Stops at the first signal when all is answered, and at the second at once; the status is then 0.

    Args:
        config: uvicorn's.
        calls: what is done at signals instead, or beside.
    """

    def __init__(self, config: uvicorn.Config, calls: Calls) -> None:
        super().__init__(config)
        self._calls = calls

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take signals for as long as this holds."""
        stopping = {number: partial(self.handle_exit, number, None) for number in (signal.SIGINT, signal.SIGTERM)}
        with listened({**stopping, **self._calls}):
            yield


@contextlib.contextmanager
def listened(calls: Calls) -> Iterator[None]:
    """Have something called at each signal for as long as this holds; in another thread than the first, nothing is.

    Args:
        calls: by signal.
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
        app: of `flodl_hf.serving.app`.
        settings: its limits; connections are shared between the processes that answer HTTP.
        calls: what is done at signals; SIGINT and SIGTERM stop it where nothing else is said.
        closed: called whenever a connection has ended.
    """
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as Protocol
    except ImportError:
        from uvicorn.protocols.http.h11_impl import H11Protocol as Protocol
    config = uvicorn.Config(
        app, http=guarded(Protocol, settings, closed), log_config=None, access_log=False, server_header=False,
        timeout_keep_alive=int(settings.idle_s), timeout_graceful_shutdown=int(settings.drain_s), ws="none",
        limit_concurrency=math.ceil(settings.max_connections / settings.http_processes),
        h11_max_incomplete_event_size=MAX_HEAD, lifespan="on", proxy_headers=False, backlog=2048,
    )  # fmt: skip
    return HttpServer(config, calls)


@contextlib.contextmanager
def logged() -> Iterator[None]:
    """Write the log of a server to stderr for as long as this holds."""
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
    """Return what runs an event loop: uvloop's where it is installed."""
    # A configuration of uvicorn's own would have requests logged, beside what `logged` says.
    quiet = uvicorn.Config(runner, log_config=None, access_log=False)
    return asyncio.Runner(loop_factory=quiet.get_loop_factory())


def settled() -> None:
    """Let what is there now stay: to look through it again and again takes a twentieth of the doors' time."""
    gc.collect()
    gc.freeze()

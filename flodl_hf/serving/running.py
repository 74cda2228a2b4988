"""A server run: its socket, its loop, signals, and its log."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn

from flodl.errors import DeviceError
from flodl_hf.serving.app import create_app, reload_on
from flodl_hf.serving.log import Lines, Log
from flodl_hf.serving.protocol import MAX_HEAD, guarded
from flodl_hf.serving.settings import Settings

__all__ = ["run", "running"]


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket that is bound and does not listen yet, so that nobody is accepted before all is warm.

    Raises:
        DeviceError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held = socket.socket(family)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((host, port))
    except OSError as fault:
        held.close()
        raise DeviceError(f"serve: {host}:{port} cannot be had ({fault.strerror}); choose another --port") from None
    held.set_inheritable(True)
    return held


def _server(app: Any, settings: Settings) -> uvicorn.Server:
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as Protocol
    except ImportError:
        from uvicorn.protocols.http.h11_impl import H11Protocol as Protocol
    config = uvicorn.Config(
        app, http=guarded(Protocol, settings), log_config=None, access_log=False, server_header=False,
        timeout_keep_alive=int(settings.idle_s), timeout_graceful_shutdown=int(settings.drain_s), ws="none",
        limit_concurrency=settings.max_connections, h11_max_incomplete_event_size=MAX_HEAD, lifespan="on",
        proxy_headers=False, backlog=2048,
    )  # fmt: skip
    return _Server(config)


class _Server(uvicorn.Server):
    """Stops at the first signal when all is answered, and at the second at once; the status is then 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        asked = asyncio.Event()
        reloading = asyncio.ensure_future(reload_on(self.config.app, asked))  # type: ignore[arg-type]
        stopping = (signal.SIGINT, signal.SIGTERM)
        for number in stopping:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        loop.add_signal_handler(signal.SIGHUP, asked.set)
        try:
            yield
        finally:
            reloading.cancel()
            for number in (*stopping, signal.SIGHUP):
                loop.remove_signal_handler(number)


async def _serve(app: Any, server: uvicorn.Server, held: socket.socket, here: Any) -> None:
    await app.state.house.workers.start()
    task = asyncio.ensure_future(server.serve([held]))
    while not server.started and not task.done():
        await asyncio.sleep(0.005)
    here(f"http://{_address(held)}")
    await task


def _address(held: socket.socket) -> str:
    host, port = held.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def run(settings: Settings, host: str, port: int, here: Any = lambda url: None) -> None:
    """Serve until a signal says to stop.

    Args:
        settings: what, and how.
        host: the address to listen at.
        port: 0 takes one that is free.
        here: called with the address when all is warm and requests are answered.

    Raises:
        WorkersError: a model cannot be served.
        ConfigError: traces cannot be sent, or a directory of adapters holds what is none.
        DeviceError: the address cannot be had.
    """
    logger = logging.getLogger("flodl_hf.serving")
    handler = Lines(sys.stderr)
    handler.setFormatter(Log())
    for each in (logger, logging.getLogger("uvicorn.error"), logging.getLogger("opentelemetry")):
        each.handlers, each.propagate = [handler], False
    logger.setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    held = _bound(host, port)
    app = create_app(settings)
    server = _server(app, settings)

    def warm(url: str) -> None:
        # What is there now stays: to look through it again and again takes a twentieth of the doors' time.
        gc.collect()
        gc.freeze()
        here(url)

    try:
        with held, asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            runner.run(_serve(app, server, held, warm))
    finally:
        handler.flush()


@contextlib.contextmanager
def running(settings: Settings, host: str = "127.0.0.1", port: int = 0) -> Iterator[tuple[str, Any]]:
    """Serve in a thread for as long as this holds; gives the address and the application.

    Args:
        settings: what, and how.
        host: the address to listen at.
        port: 0 takes one that is free.

    Raises:
        WorkersError: a model cannot be served.
        ConfigError: traces cannot be sent, or a directory of adapters holds what is none.
        DeviceError: the address cannot be had.
    """
    held = _bound(host, port)
    app = create_app(settings)
    server = _server(app, settings)
    there = threading.Event()
    told: list[Any] = []

    def here(url: str) -> None:
        told.append(url)
        there.set()

    def served() -> None:
        try:
            with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
                runner.run(_serve(app, server, held, here))
        except BaseException as fault:
            told.append(fault)
        finally:
            there.set()

    thread = threading.Thread(target=served, name="flodl-hf-serve", daemon=True)
    thread.start()
    there.wait()
    try:
        if isinstance(told[0], BaseException):
            raise told[0]
        yield told[0], app
    finally:
        server.should_exit = True
        thread.join(settings.drain_s + 15)
        held.close()

"""Run of a server: its socket, its event loop, and one or several HTTP processes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from flodl.errors import DeviceError
from flodl_hf.serving.app import create_app, reload_on
from flodl_hf.serving.http import http_server, runner, server_log, signal_handlers
from flodl_hf.serving.multiprocess.parent import Parent
from flodl_hf.serving.settings import Settings, freeze_gc


def _bound(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet, so that no client connects before the models are warm.

    Raises:
        DeviceError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, UnicodeError) as fault:
        listener.close()
        elsewhere = isinstance(fault, (socket.gaierror, UnicodeError)) or fault.errno == errno.EADDRNOTAVAIL
        choose = "--host: an address of this machine" if elsewhere else "--port"
        reason = fault.strerror if isinstance(fault, OSError) else fault
        raise DeviceError(f"serve: cannot bind {host}:{port} ({reason}). Choose another {choose}.") from None
    return listener


class _SingleProcess:
    """A server with one HTTP process, this one; it has the methods of `Parent`."""

    def __init__(self, settings: Settings) -> None:
        self.app = create_app(settings)
        self._reload = asyncio.Event()
        self._server = http_server(self.app, settings, {signal.SIGHUP: self._reload.set})

    async def serve(self, listener: socket.socket, here: Callable[[], None]) -> None:
        processes, server = self.app.state.processes, self._server
        # SIGHUP is handled from the start, so that a reload requested while models are loaded follows later instead of
        # ending the process.
        with signal_handlers({signal.SIGHUP: self._reload.set}):
            await processes.start()
            reloading = asyncio.ensure_future(reload_on(processes, self._reload))
            task = asyncio.ensure_future(server.serve([listener]))
            while not server.started and not task.done():
                await asyncio.sleep(0.005)
            here()
            try:
                await task
            finally:
                reloading.cancel()

    def stop(self) -> None:
        self._server.should_exit = True


def _server(settings: Settings) -> _SingleProcess | Parent:
    return _SingleProcess(settings) if settings.http_processes == 1 else Parent(settings)


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(settings: Settings, host: str, port: int, here: Any = lambda url: None) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        settings: the server's settings.
        host: address to listen on.
        port: port to listen on; 0 selects a free one.
        here: called with the URL when all models are warm and requests are answered.

    Raises:
        WorkersError: a model cannot be served.
        ConfigError: traces cannot be sent, or a directory of adapters is invalid.
        DeviceError: the address cannot be bound.
    """
    with server_log(), _bound(host, port) as listener:
        server = _server(settings)

        def warm() -> None:
            freeze_gc()
            here(_address(listener))

        with runner() as loop:
            loop.run(server.serve(listener, warm))


@contextlib.contextmanager
def running(settings: Settings, host: str = "127.0.0.1", port: int = 0) -> Iterator[tuple[str, Any]]:
    """Serve in a background thread; a context manager that returns the URL and the application.

    With several HTTP processes the second value is the `flodl_hf.serving.multiprocess.parent.Parent`.

    Args:
        settings: the server's settings.
        host: address to listen on.
        port: port to listen on; 0 selects a free one.

    Raises:
        WorkersError: a model cannot be served.
        ConfigError: traces cannot be sent, or a directory of adapters is invalid.
        DeviceError: the address cannot be bound.
    """
    server = _server(settings)
    listener = _bound(host, port)
    started = threading.Event()
    outcome: list[Any] = []

    def here() -> None:
        outcome.append(_address(listener))
        started.set()

    def served() -> None:
        try:
            with runner() as loop:
                loop.run(server.serve(listener, here))
        except BaseException as fault:
            outcome.append(fault)
        finally:
            started.set()

    thread = threading.Thread(target=served, name="flodl-hf-serve", daemon=True)
    thread.start()
    started.wait()
    try:
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        yield outcome[0], server.app if isinstance(server, _SingleProcess) else server
    finally:
        server.stop()
        thread.join(settings.drain_s + 15)
        listener.close()

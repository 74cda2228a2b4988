"""A server run: its socket, its loop, and the processes that answer HTTP: this one, or several of its children."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from flodl.errors import DeviceError
from flodl_hf.serving.app import create_app, reload_on
from flodl_hf.serving.http import http_server, listened, logged, runner, settled
from flodl_hf.serving.settings import Settings
from flodl_hf.serving.several.parent import Parent

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
    except (OSError, UnicodeError) as fault:
        held.close()
        elsewhere = isinstance(fault, (socket.gaierror, UnicodeError)) or fault.errno == errno.EADDRNOTAVAIL
        choose = "--host, an address of this machine" if elsewhere else "--port"
        said = fault.strerror if isinstance(fault, OSError) else fault
        raise DeviceError(f"serve: {host}:{port} cannot be had ({said}); choose another {choose}") from None
    return held


class _Server(Protocol):
    """What runs: one process, or the parent of several."""

    async def serve(self, held: socket.socket, here: Callable[[], None]) -> None:
        """Serve until it is told to stop; ``here`` is called when requests are answered."""

    def stop(self) -> None:
        """Stop when all is answered; from any thread."""


class _Alone:
    """HTTP and the workers' processes held by this one."""

    def __init__(self, settings: Settings) -> None:
        self.app = create_app(settings)
        self._asked = asyncio.Event()
        self._server = http_server(self.app, settings, {signal.SIGHUP: self._asked.set})

    async def serve(self, held: socket.socket, here: Callable[[], None]) -> None:
        processes, server = self.app.state.processes, self._server
        # From the beginning: a reload that is asked for while models are loaded comes after that, and is no end.
        with listened({signal.SIGHUP: self._asked.set}):
            await processes.start()
            reloading = asyncio.ensure_future(reload_on(processes, self._asked))
            task = asyncio.ensure_future(server.serve([held]))
            while not server.started and not task.done():
                await asyncio.sleep(0.005)
            here()
            try:
                await task
            finally:
                reloading.cancel()

    def stop(self) -> None:
        self._server.should_exit = True


def _server(settings: Settings) -> _Server:
    return _Alone(settings) if settings.http_processes == 1 else Parent(settings)


def _address(held: socket.socket) -> str:
    host, port = held.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


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
    with logged(), _bound(host, port) as held:
        server = _server(settings)

        def warm() -> None:
            settled()
            here(_address(held))

        with runner() as loop:
            loop.run(server.serve(held, warm))


@contextlib.contextmanager
def running(settings: Settings, host: str = "127.0.0.1", port: int = 0) -> Iterator[tuple[str, Any]]:
    """Serve in a thread for as long as this holds; gives the address and the application.

    Where several processes answer HTTP it is the parent in its place, a
    `flodl_hf.serving.several.parent.Parent`.

    Args:
        settings: what, and how.
        host: the address to listen at.
        port: 0 takes one that is free.

    Raises:
        WorkersError: a model cannot be served.
        ConfigError: traces cannot be sent, or a directory of adapters holds what is none.
        DeviceError: the address cannot be had.
    """
    server = _server(settings)
    held = _bound(host, port)
    there = threading.Event()
    told: list[Any] = []

    def here() -> None:
        told.append(_address(held))
        there.set()

    def served() -> None:
        try:
            with runner() as loop:
                loop.run(server.serve(held, here))
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
        yield told[0], server.app if isinstance(server, _Alone) else server
    finally:
        server.stop()
        thread.join(settings.drain_s + 15)
        held.close()

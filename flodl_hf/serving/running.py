"""Run of a server: its socket, its event loop, and one or several HTTP processes.

With several, this process is their parent (`Parent`). It owns the listening socket, the worker processes and the shared
counters, and gives each connection to the HTTP process with the fewest; each has its own connection to every worker.
Only new connections pass through the parent, so it is never busy. If it ends, the HTTP processes and workers end too,
because their sockets are closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any

from flodl.errors import DeviceError, FlodlError
from flodl_hf.serving.admission import SharedCounters, key_ids, shared_memory
from flodl_hf.serving.app import create_app
from flodl_hf.serving.http import HttpServer, runner, server_log, signal_handlers
from flodl_hf.serving.metrics import Metrics
from flodl_hf.serving.settings import Settings, freeze_gc
from flodl_hf.serving.traces import Traces
from flodl_hf.serving.workers import Process, Processes, WorkersError, start_task
from flodl_hf.workers.messages import Link, connect_link, send_socket
from flodl_hf.workers.process import END_S
from flodl_hf.workers.process import Process as Child

LOG = logging.getLogger("flodl_hf.serving")
# A process that ran for MIN_UPTIME_S is replaced immediately, others after RESTART_DELAY_S.
MIN_UPTIME_S, RESTART_DELAY_S = 30.0, 1.0
# Connections accepted in one iteration of the loop, and the pause when no file descriptor or no process is left.
ACCEPT_BATCH, ACCEPT_PAUSE_S = 64, 0.2
BACKLOG = 2048


async def _reload_on(processes: Processes, event: asyncio.Event) -> None:
    """Reload all models whenever an event is set."""
    while True:
        await event.wait()
        event.clear()
        try:
            await processes.load()
            LOG.info("reloaded")
        except Exception:
            LOG.exception("reload failed; the previous models remain in use")


class _SingleProcess:
    """A server with one HTTP process, this one; it has the methods of `Parent`."""

    def __init__(self, settings: Settings) -> None:
        self.app = create_app(settings)
        self._reload = asyncio.Event()
        self._server = HttpServer(self.app, settings, {signal.SIGHUP: self._reload.set})

    async def serve(self, listener: socket.socket, here: Callable[[], None]) -> None:
        processes = self.app.state.processes
        # SIGHUP is handled from the start, so that a reload requested while models are loaded follows later instead of
        # ending the process.
        with signal_handlers({signal.SIGHUP: self._reload.set}):
            await processes.load()
            reloading = asyncio.ensure_future(_reload_on(processes, self._reload))
            task = await self._server.begin([listener])
            here()
            try:
                await task
            finally:
                reloading.cancel()

    def stop(self) -> None:
        self._server.should_exit = True


@dataclass(eq=False)
class _HttpChild:
    """One HTTP process.

    Attributes:
        number: its index in the shared counters.
        child: its process.
        link: connection for messages.
        ready: done when it accepts connections; has an exception if it cannot be started.
        workers: process ids of the workers it is connected with.
        taken: connections that were sent to it.
        leaving: whether it accepts no further connections.
        counted: its last reported metrics.
        since: time of its start.
    """

    number: int
    child: Child
    link: Link
    ready: asyncio.Future[None]
    since: float
    workers: set[int] = field(default_factory=set)
    taken: int = 0
    leaving: bool = False
    counted: dict[str, Any] | None = None


class Parent:
    """A server of several HTTP processes.

    Args:
        settings: the server's settings.

    Raises:
        ConfigError: traces cannot be sent.
    """

    def __init__(self, settings: Settings) -> None:
        if settings.otlp_endpoint is not None:
            Traces(settings.otlp_endpoint).close()  # fails before any process is started
        self.settings = settings
        self.processes = Processes(settings, self, fd_channel=True)
        self.restarts = 0
        """Number of replaced HTTP processes."""
        keys = key_ids(settings.api_keys)
        self._memory = shared_memory(len(keys), settings.http_processes)
        self.counters = SharedCounters(keys, settings.http_processes, 0, self._memory)
        """Counters of current requests of all processes."""
        self.counters.calm[0] = time.monotonic()
        self._children: list[_HttpChild] = []
        self._past = Metrics()
        """Metrics of ended processes."""
        self._held: socket.socket
        self._listening = self._closing = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._starting: list[asyncio.Future[None]] = []
        self._replacing: set[asyncio.Task[Any]] = set()
        self._end = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def pids(self) -> list[int]:
        """Process ids of the HTTP processes that accept connections."""
        return [one.child.pid for one in self._children if one.ready.done()]

    # ---- the run -----------------------------------------------------------------------------------

    async def serve(self, listener: socket.socket, here: Callable[[], None]) -> None:
        """Serve until a stop is requested.

        Args:
            listener: a bound socket.
            here: called when requests are answered.

        Raises:
            WorkersError: a model cannot be served.
            ConfigError: a directory of adapters is invalid.
        """
        self._loop, self._held = asyncio.get_running_loop(), listener
        requested = asyncio.Event()
        reloading: asyncio.Future[None] | None = None
        calls = {signal.SIGINT: self._stop, signal.SIGTERM: self._stop, signal.SIGHUP: requested.set}
        try:
            begun = [self._start(number) for number in range(self.settings.http_processes)]
            self._starting = [asyncio.ensure_future(made) for made in (self.processes.load(), *begun)]
            with signal_handlers({signal.SIGHUP: requested.set}):  # a reload requested before all is warm follows later
                await asyncio.gather(*self._starting)
            with signal_handlers(calls):
                reloading = asyncio.ensure_future(_reload_on(self.processes, requested))
                listener.setblocking(False)
                listener.listen(BACKLOG)
                self._listening = True
                self._resume()
                here()
                await self._end.wait()
        finally:
            if reloading is not None:
                reloading.cancel()
            await self._close()

    def stop(self) -> None:
        """Finish current requests and stop; thread-safe."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has stopped
                self._loop.call_soon_threadsafe(self._end.set)

    def _stop(self) -> None:
        if self._end.is_set():
            # The second signal stops immediately.
            for one in self._children:
                one.child.kill()
        self._end.set()

    async def _close(self) -> None:
        """Let all processes finish their current requests, then end the workers."""
        self._closing = True
        for task in self._replacing:
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        if self._listening:
            self._accept()  # waiting clients are served
            asyncio.get_running_loop().remove_reader(self._held.fileno())
        self._held.close()
        here = [one.child for one in self._children]
        for one in self._children:
            with contextlib.suppress(OSError):
                if one.ready.done():
                    one.link.send({"stop": True})
                else:
                    one.link.close()
        await asyncio.gather(*(child.reaped(self.settings.drain_s + END_S) for child in here))
        await self.processes.close()
        # The first of several errors was already raised.
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        os.close(self._memory)

    # ---- HTTP processes ----------------------------------------------------------------------------

    async def _start(self, number: int) -> None:
        """Start a process and return when it accepts connections.

        Raises:
            WorkersError: it ended before that.
        """
        loop, target = asyncio.get_running_loop(), "flodl_hf.serving.http_process:serve"
        began, child = loop.time(), Child(target, "an HTTP process", fd_channel=True, descriptors=[self._memory])
        link = await connect_link(child.socket, lambda message, _: self._on_message(one, message))
        if self._closing:
            link.close()
            await child.reaped()
            return
        one = _HttpChild(number, child, link, loop.create_future(), began)
        self._children.append(one)
        start_task(self._watch(one), self._tasks)
        with contextlib.suppress(OSError):  # it has ended, which is handled elsewhere
            link.send({"settings": asdict(self.settings), "number": number})
        self._send_workers(one)
        await one.ready
        LOG.info("http process ready", extra={"fields": {"pid": child.pid}})

    async def _watch(self, one: _HttpChild) -> None:
        """Replace a process when it ends."""
        child = one.child
        await one.link.closed
        one.link.close()
        self._children.remove(one)
        await child.reaped()
        self.counters.clear(one.number)
        if one.counted is not None:
            self._past.take({**one.counted, "operations": 0.0})
        if not one.ready.done():
            one.ready.set_exception(WorkersError(f"serve: an HTTP process {child.end()} during its start", device=""))
        elif one.ready.exception() is None and not self._closing:
            LOG.error("http process ended", extra={"fields": {"pid": child.pid, "fault": child.end()}})
            lived = asyncio.get_running_loop().time() - one.since
            start_task(self._replace(one.number, 0.0 if lived > MIN_UPTIME_S else RESTART_DELAY_S), self._replacing)

    async def _replace(self, number: int, pause_s: float) -> None:
        """Start a replacement after a pause."""
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self._start(number)
            except (FlodlError, OSError) as fault:
                LOG.error("http process not started", extra={"fields": {"fault": str(fault)}})
                pause_s = min(30.0, 2 * max(pause_s, RESTART_DELAY_S))
            else:
                self.restarts += 1
                return

    def _on_message(self, one: _HttpChild, message: dict[str, Any]) -> None:
        """Handle a message of an HTTP process."""
        if "end" in message:
            one.child.reason = message["end"]
        if "counted" in message:
            one.counted = message["counted"]
            if message["answers"]:
                self.processes.deaths = 0
        if "left" in message:
            one.workers.discard(message["left"])
        if message.get("lost") in one.workers:
            one.workers.remove(message["lost"])
            # Usually the worker has ended, which is reported separately; otherwise a new connection is sent.
            asyncio.get_running_loop().call_later(RESTART_DELAY_S, self._send_workers, one)
        if "leaving" in message:
            one.leaving = True
            one.link.send({"stop": True})
        if "ready" in message and not one.ready.done():
            one.ready.set_result(None)
        if "scrape" in message:
            counted = [other.counted for other in self._children if other is not one and other.counted is not None]
            one.link.send({"of": [self._past.dump(), *counted], "here": len(self.pids), "restarts": self.restarts})

    # ---- workers, as their `Processes` report them ---------------------------------------------------

    def use(self, active: Sequence[Process], restarts: int) -> None:
        """Make these workers the active ones."""
        for one in self._children:
            self._send_workers(one)

    def ended(self, worker: Process) -> None:
        """Forget a worker that ended; HTTP processes detect its end by their connections."""
        for one in self._children:
            one.workers.discard(worker.info.get("pid", 0))

    async def left(self, worker: Process) -> None:
        """Wait until no process has requests at a worker, at most ``drain_s``."""
        loop = asyncio.get_running_loop()
        until, pid = loop.time() + self.settings.drain_s + 1, worker.info.get("pid", 0)
        while any(pid in one.workers for one in self._children) and loop.time() < until:
            await asyncio.sleep(0.02)

    def _send_workers(self, one: _HttpChild) -> None:
        """Send the active workers to a process, with connections to new ones."""
        here, child = self.processes.here, one.child
        if not here or one not in self._children:
            return
        assert child.fd_channel is not None
        try:
            for process in here:
                if (pid := process.info["pid"]) in one.workers:
                    continue
                assert process.child.fd_channel is not None
                ends = socket.socketpair()
                with ends[0], ends[1]:
                    with contextlib.suppress(OSError):  # the worker has ended; so will the connection
                        send_socket(process.child.fd_channel, pid, ends[0])
                    send_socket(child.fd_channel, pid, ends[1])
                one.workers.add(pid)
            infos = [process.info for process in here]
            one.link.send({"workers": infos, "restarts": self.processes.restarts})
        except OSError:
            # It does not read any more, and will be replaced.
            child.kill()

    # ---- connections -------------------------------------------------------------------------------

    def _pause(self) -> None:
        """Accept no connections for a moment."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._held.fileno())
        loop.call_later(ACCEPT_PAUSE_S, self._resume)

    def _resume(self) -> None:
        if not self._closing:
            asyncio.get_running_loop().add_reader(self._held.fileno(), self._accept)

    def _accept(self) -> None:
        """Send new connections to the processes with the fewest."""
        for _ in range(ACCEPT_BATCH):
            ready = [one for one in self._children if one.ready.done() and not one.leaving]
            if not ready:
                self._pause()
                return
            try:
                client, _ = self._held.accept()
            except (BlockingIOError, ConnectionAbortedError, InterruptedError):
                return
            except OSError as fault:
                LOG.error("connection not accepted", extra={"fields": {"fault": str(fault)}})
                self._pause()
                return
            with client:
                with contextlib.suppress(OSError):
                    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for one in sorted(ready, key=self._open):  # the first that accepts it
                    assert one.child.fd_channel is not None
                    with contextlib.suppress(OSError):
                        send_socket(one.child.fd_channel, 0, client)
                        one.taken += 1
                        break

    def _open(self, one: _HttpChild) -> int:
        """Return the number of connections of a process."""
        return one.taken - self.counters.closed[one.number]


# ---- runs ----------------------------------------------------------------------------------------------


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
        server = (_SingleProcess if settings.http_processes == 1 else Parent)(settings)

        def warm() -> None:
            freeze_gc()
            here(_address(listener))

        with runner() as loop:
            loop.run(server.serve(listener, warm))


@contextlib.contextmanager
def running(settings: Settings, host: str = "127.0.0.1", port: int = 0) -> Iterator[tuple[str, Any]]:
    """Serve in a background thread; a context manager that returns the URL and the application.

    With several HTTP processes the second value is the `Parent`.

    Args:
        settings: the server's settings.
        host: address to listen on.
        port: port to listen on; 0 selects a free one.

    Raises:
        WorkersError: a model cannot be served.
        ConfigError: traces cannot be sent, or a directory of adapters is invalid.
        DeviceError: the address cannot be bound.
    """
    server = (_SingleProcess if settings.http_processes == 1 else Parent)(settings)
    listener = _bound(host, port)
    address: Future[str] = Future()

    def serve() -> None:
        try:
            with runner() as loop:
                loop.run(server.serve(listener, lambda: address.set_result(_address(listener))))
        except BaseException as fault:
            if not address.done():
                address.set_exception(fault)

    thread = threading.Thread(target=serve, name="flodl-hf-serve", daemon=True)
    thread.start()
    try:
        yield address.result(), server.app if isinstance(server, _SingleProcess) else server
    finally:
        server.stop()
        thread.join(settings.drain_s + 15)
        listener.close()

"""One of several HTTP processes: receives connections from its parent and has its own connections to all workers.

Runs the same application as a single process (`flodl_hf.serving.app`). Ends with its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from functools import partial
from typing import Any, cast

from flodl_hf.serving.admission import SharedCounters, key_ids
from flodl_hf.serving.app import make_app
from flodl_hf.serving.http import HttpServer, runner, server_log
from flodl_hf.serving.metrics import Metrics, merged
from flodl_hf.serving.responses import RefusedError
from flodl_hf.serving.routes.route import AppState
from flodl_hf.serving.settings import Settings, freeze_gc
from flodl_hf.serving.workers import Worker, start_task
from flodl_hf.workers.messages import Link, Stream, connect_link, receive_socket

LOG = logging.getLogger("flodl_hf.serving")
# Interval in which metrics are sent to the parent, and timeout for those of the other processes.
REPORT_INTERVAL_S, COLLECT_TIMEOUT_S = 0.5, 3.0


class _HttpProcess:
    """This process.

    Args:
        fd_channel: receives client connections and connections to workers.
        memory: file descriptor of the shared counters.
    """

    def __init__(self, fd_channel: socket.socket, memory: int) -> None:
        self._fd_channel, self._memory = fd_channel, memory
        fd_channel.setblocking(False)
        self._given: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._number: int
        self._counters: SharedCounters
        self._state: AppState
        self._link: Link
        self._server: HttpServer
        self._workers: dict[int, Worker] = {}
        self._ends: dict[int, socket.socket] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._using = asyncio.Lock()
        self._used = asyncio.Event()
        self._scrape: asyncio.Future[dict[str, Any]] | None = None
        self._answers = 0

    async def run(self, own: socket.socket) -> None:
        """Answer requests until the parent requests a stop or ends.

        Args:
            own: connection to the parent.
        """
        loop = asyncio.get_running_loop()
        self._link = link = await connect_link(own, lambda message, _: self._on_message(message))
        await asyncio.wait((self._given, link.closed), return_when=asyncio.FIRST_COMPLETED)
        if not self._given.done():
            return
        # The parent handles Ctrl-C and reloads. After a SIGTERM to this process alone, the parent first stops sending
        # connections, then requests the stop.
        calls = {
            signal.SIGTERM: lambda: link.send({"leaving": True}), signal.SIGINT: lambda: None,
            signal.SIGHUP: lambda: None,
        }  # fmt: skip
        self._server = HttpServer(make_app(self._state, None), self._state.settings, calls, self._counters.close)
        serving = await self._server.begin([])
        loop.add_reader(self._fd_channel.fileno(), self._receive_sockets)
        start_task(self._ready(), self._tasks)
        await asyncio.wait((serving, link.closed), return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            os._exit(1)  # the parent owns the workers
        await serving

    async def _ready(self) -> None:
        """Report readiness when a worker is available, and then the metrics periodically."""
        await self._used.wait()
        freeze_gc()
        self._link.send({"ready": True})
        with contextlib.suppress(OSError):
            while True:
                self._link.send(self._counted())
                await asyncio.sleep(REPORT_INTERVAL_S)

    def _on_message(self, message: dict[str, Any]) -> None:
        """Handle a message of the parent."""
        if "settings" in message:
            settings, self._number = Settings.from_dict(message["settings"]), message["number"]
            keys = key_ids(settings.api_keys)
            self._counters = SharedCounters(keys, settings.http_processes, self._number, self._memory)
            self._state = AppState(settings, self._counters, self._collect_metrics)
            self._given.set_result(None)
        if "workers" in message:
            # Immediately, so that `/metrics` agrees with the parent in every process.
            self._state.workers.restarts = message["restarts"]
            start_task(self._use(message["workers"], message["restarts"]), self._tasks)
        if "of" in message and self._scrape is not None:
            self._scrape.set_result(message)
            self._scrape = None
        if "stop" in message:
            self._receive_sockets()  # sockets that were sent before
            asyncio.get_running_loop().remove_reader(self._fd_channel.fileno())
            self._server.should_exit = True

    # ---- connections -------------------------------------------------------------------------------

    def _receive_sockets(self) -> None:
        """Receive client connections and connections to workers."""
        while True:
            try:
                found = receive_socket(self._fd_channel)
            except BlockingIOError:
                return
            except OSError:
                found = None
            if found is None:
                asyncio.get_running_loop().remove_reader(self._fd_channel.fileno())
                return
            number, held = found
            if held is None:
                LOG.error("connection not accepted", extra={"fields": {"fault": "too many open files"}})
                if not number:
                    self._counters.close()
            elif number:
                self._ends[number] = held
            else:
                start_task(self._connect(held), self._tasks)

    async def _connect(self, held: socket.socket) -> None:
        held.setblocking(False)
        server, kind = self._server, cast(Any, self._server.config.http_protocol_class)
        protocol = partial(
            kind, config=server.config, server_state=server.server_state, app_state=server.lifespan.state
        )
        try:
            await asyncio.get_running_loop().connect_accepted_socket(protocol, held)
        except OSError:
            held.close()
            self._counters.close()

    # ---- workers -----------------------------------------------------------------------------------

    async def _use(self, infos: list[dict[str, Any]], restarts: int) -> None:
        """Send requests only to these workers from now on; close others when they have answered."""
        async with self._using:
            here = [await self._worker(info) for info in infos]
            found = [worker for worker in here if worker is not None and not worker.link.closed.done()]
            # With equal load, each process starts with another worker.
            turn = self._number % len(found) if found else 0
            workers, admission = self._state.workers, self._state.admission
            workers.use(found[turn:] + found[:turn], restarts)
            admission.rate, admission.full = workers.rate, workers.max_batch_tokens * len(found)
            if found:
                self._used.set()
            for pid in self._workers.keys() - {info["pid"] for info in infos}:
                start_task(self._leave(pid, self._workers.pop(pid)), self._tasks)

    async def _worker(self, info: dict[str, Any]) -> Worker | None:
        pid = info["pid"]
        if (known := self._workers.get(pid)) is not None:
            return known
        self._receive_sockets()  # its socket was sent before this message
        if (end := self._ends.pop(pid, None)) is None:
            self._link.send({"lost": pid})
            return None
        link = await connect_link(end, lambda message, arrays: self._state.workers.answered(found, message, arrays))
        found = self._workers[pid] = Worker(link, info, float(info["rate"]))
        start_task(self._listen(pid, found), self._tasks)
        return found

    async def _listen(self, pid: int, worker: Worker) -> None:
        await worker.link.closed
        self._state.workers.ended(worker)
        worker.link.close()
        if self._workers.get(pid) is worker:
            del self._workers[pid]
            with contextlib.suppress(OSError):
                self._link.send({"lost": pid})

    async def _leave(self, pid: int, worker: Worker) -> None:
        await self._state.workers.left(worker)
        worker.link.close()
        with contextlib.suppress(OSError):
            self._link.send({"left": pid})

    # ---- metrics -----------------------------------------------------------------------------------

    def _counted(self) -> dict[str, Any]:
        """Return the metrics of this process, and the number of results since the last call."""
        before, self._answers = self._answers, self._state.workers.answers
        return {"counted": self._state.metrics.dump(), "answers": self._answers - before}

    async def _collect_metrics(self) -> tuple[Metrics, int, int]:
        """Return the metrics of all HTTP processes, their number, and the number of replaced ones.

        Metrics of the other processes are those of their last report.

        Raises:
            RefusedError: the parent does not respond.
        """
        if self._scrape is None:
            self._scrape = asyncio.get_running_loop().create_future()
        try:
            self._link.send({"scrape": True, **self._counted()})
            async with asyncio.timeout(COLLECT_TIMEOUT_S):
                message = await asyncio.shield(self._scrape)
        except (OSError, TimeoutError):
            raise RefusedError("the metrics of other processes are not available. Retry.", "ended") from None
        return merged([self._state.metrics.dump(), *message["of"]]), message["here"], message["restarts"]


def serve(stream: Stream, fd_channel: int, memory: int) -> None:
    """Answer HTTP requests until the parent requests a stop or ends.

    Args:
        stream: the connection to the parent.
        fd_channel: file descriptor of the socket that receives sockets.
        memory: file descriptor of the shared counters.
    """

    async def run() -> None:
        await _HttpProcess(socket.socket(fileno=fd_channel), memory).run(stream.socket)

    with server_log(), runner() as held:
        held.run(run())

"""One of several processes that answer HTTP: connections come from its parent, workers are asked by links of its own.

What answers is the application that one process alone has (`flodl_hf.serving.app`). The process ends with its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable
from itertools import count
from typing import Any

from starlette.applications import Starlette

from flodl_hf.serving.admission import words_of
from flodl_hf.serving.app import app_of, closed, new_house
from flodl_hf.serving.faults import RefusedError
from flodl_hf.serving.handing import handed
from flodl_hf.serving.http import HttpServer, http_server, logged, runner, settled
from flodl_hf.serving.ledger import Ledger
from flodl_hf.serving.link import Link, linked
from flodl_hf.serving.metrics import Metrics, merged
from flodl_hf.serving.settings import Settings
from flodl_hf.serving.workers import Worker

__all__ = ["serve"]

LOG = logging.getLogger("flodl_hf.serving")
# What is counted is told so often, so that hardly any of it is lost with the process; and asked for so long.
TELL_S, GATHER_S = 1.0, 3.0


def _nothing() -> None: ...


class _Answers:
    """This process.

    Args:
        hands: what hands over connections, and links to workers.
        memory: the descriptor of the ledger.
    """

    def __init__(self, hands: socket.socket, memory: int) -> None:
        self._hands, self._memory = hands, memory
        hands.setblocking(False)
        self._given: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._link: Link
        self._server: HttpServer
        self._workers: dict[int, Worker] = {}
        self._ends: dict[int, socket.socket] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._using = asyncio.Lock()
        self._made, self._used = asyncio.Event(), asyncio.Event()
        self._numbers = count()
        self._gathering: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._answers = 0

    async def run(self, own: socket.socket) -> None:
        """Answer until the parent says to stop, or is no more.

        Args:
            own: the way to the parent.
        """
        loop = asyncio.get_running_loop()
        self._link = link = await linked(own, lambda message, _: self._heard(message))
        await asyncio.wait((self._given, link.closed), return_when=asyncio.FIRST_COMPLETED)
        if not self._given.done():
            return
        given = self._given.result()
        settings, self._number = Settings.heard(given["settings"]), given["number"]
        keys = words_of(settings.api_keys)
        self._ledger = Ledger(keys, settings.http_processes, self._number, self._memory)
        self._house = new_house(settings, self._ledger, self._gathered)
        self._made.set()
        # Ctrl-C and a reload are the parent's; told to stop by itself, this one is given nothing more, then told again.
        calls = {
            signal.SIGTERM: lambda: link.send({"leaving": True}), signal.SIGINT: _nothing, signal.SIGHUP: _nothing,
        }  # fmt: skip
        self._server = http_server(app_of(self._house, self._lifespan), settings, calls, self._ledger.close)
        serving = asyncio.ensure_future(self._server.serve([]))
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.005)
        loop.add_reader(self._hands.fileno(), self._take)
        self._task(self._ready())
        await asyncio.wait((serving, link.closed), return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            os._exit(1)  # without the parent there are no workers either
        await serving

    async def _ready(self) -> None:
        """Say so when there is a worker to be asked."""
        await self._used.wait()
        settled()
        self._link.send({"ready": True})
        self._tell_often()

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await closed(self._house)

    def _task(self, made: Awaitable[Any]) -> None:
        task = asyncio.ensure_future(made)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _heard(self, message: dict[str, Any]) -> None:
        """Take a message of the parent."""
        if "settings" in message:
            self._given.set_result(message)
        if "workers" in message:
            if self._made.is_set():
                # At once: what `/metrics` says here is what the parent knows, as in every process.
                self._house.workers.restarts = message["restarts"]
            self._task(self._use(message["workers"], message["restarts"]))
        if "count" in message:
            self._tell()
        if "gathered" in message:
            asked = self._gathering.get(message["gathered"])
            if asked is not None and not asked.done():
                asked.set_result(message)
        if "stop" in message:
            self._take()  # what was handed over before
            asyncio.get_running_loop().remove_reader(self._hands.fileno())
            self._server.should_exit = True

    # ---- connections -------------------------------------------------------------------------------

    def _take(self) -> None:
        """Take what was handed over: connections, and ends of links to workers."""
        while True:
            try:
                found = handed(self._hands)
            except BlockingIOError:
                return
            except OSError:
                found = None
            if found is None:
                asyncio.get_running_loop().remove_reader(self._hands.fileno())
                return
            number, held = found
            if held is None:
                LOG.error("no connection taken", extra={"said": {"fault": "too many open files"}})
                if not number:
                    self._ledger.close()
            elif number:
                self._ends[number] = held
            else:
                self._task(self._connect(held))

    async def _connect(self, held: socket.socket) -> None:
        held.setblocking(False)
        server, config = self._server, self._server.config

        def protocol() -> asyncio.Protocol:
            kind: Any = config.http_protocol_class
            made: asyncio.Protocol = kind(
                config=config, server_state=server.server_state, app_state=server.lifespan.state
            )
            return made

        try:
            await asyncio.get_running_loop().connect_accepted_socket(protocol, held)
        except OSError:
            held.close()
            self._ledger.close()

    # ---- workers -----------------------------------------------------------------------------------

    async def _use(self, listed: list[dict[str, Any]], restarts: int) -> None:
        """Ask these workers from now on, and let go of others when they have answered."""
        await self._made.wait()  # a process that has just begun may hear of workers before it has taken its settings
        async with self._using:
            here = [await self._worker(said["number"], said["info"]) for said in listed]
            found = [worker for worker in here if worker is not None and not worker.link.closed.done()]
            # Of workers that have as little to do, each process asks another one first.
            turn = self._number % len(found) if found else 0
            workers = self._house.workers
            workers.use(found[turn:] + found[:turn], restarts)
            self._house.admission.rate = workers.rate
            self._house.admission.full = workers.max_batch_tokens * len(found)
            if found:
                self._used.set()
            for number in self._workers.keys() - {said["number"] for said in listed}:
                self._task(self._leave(number, self._workers.pop(number)))

    async def _worker(self, number: int, info: dict[str, Any]) -> Worker | None:
        if (known := self._workers.get(number)) is not None:
            return known
        self._take()  # it was handed over before it was told of
        if (end := self._ends.pop(number, None)) is None:
            self._link.send({"lost": number})
            return None
        link = await linked(end, lambda message, arrays: self._house.workers.answered(found, message, arrays))
        found = self._workers[number] = Worker(link, info, float(info["rate"]))
        self._task(self._listen(number, found))
        return found

    async def _listen(self, number: int, worker: Worker) -> None:
        await worker.link.closed
        self._house.workers.ended(worker)
        worker.link.close()
        if self._workers.get(number) is worker:
            del self._workers[number]
            with contextlib.suppress(OSError):
                self._link.send({"lost": number})

    async def _leave(self, number: int, worker: Worker) -> None:
        await self._house.workers.left(worker)
        worker.link.close()
        with contextlib.suppress(OSError):
            self._link.send({"left": number})

    # ---- what is counted ---------------------------------------------------------------------------

    def _tell(self) -> None:
        """Tell the parent what was counted."""
        answers = self._house.workers.answers
        with contextlib.suppress(OSError):
            self._link.send({"counted": self._house.metrics.dump(), "answers": answers - self._answers})
        self._answers = answers

    def _tell_often(self) -> None:
        if self._house.workers.answers != self._answers:
            self._tell()
        asyncio.get_running_loop().call_later(TELL_S, self._tell_often)

    async def _gathered(self) -> tuple[Metrics, int, int]:
        """Return what all processes counted, how many they are, and how many were replaced.

        Raises:
            RefusedError: the parent does not say.
        """
        number = next(self._numbers)
        asked = self._gathering[number] = asyncio.get_running_loop().create_future()
        self._tell()
        try:
            self._link.send({"scrape": number})
            async with asyncio.timeout(GATHER_S):
                message = await asked
        except (OSError, TimeoutError):
            raise RefusedError("what other processes counted is not there; ask again", "ended") from None
        finally:
            del self._gathering[number]
        return merged([self._house.metrics.dump(), *message["of"]]), message["here"], message["restarts"]


def serve(descriptor: int, hands: int, memory: int) -> None:
    """Answer HTTP until the parent says to stop, or is no more.

    Args:
        descriptor: of the socket to the parent.
        hands: of the one that hands over sockets.
        memory: of the ledger.
    """

    async def run() -> None:
        await _Answers(socket.socket(fileno=hands), memory).run(socket.socket(fileno=descriptor))

    with logged(), runner() as held:
        held.run(run())

"""The parent of several processes that answer HTTP.

It holds the socket that listens, the workers' processes and the memory of the ledger. Nothing of a request passes
through it but the connection that it comes by, so that it is never busy. Without it nobody answers: its processes end
when their sockets to it do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from flodl.errors import FlodlError
from flodl_hf.serving.admission import words_of
from flodl_hf.serving.app import reload_on
from flodl_hf.serving.child import END_S, Child, start
from flodl_hf.serving.handing import hand
from flodl_hf.serving.http import listened
from flodl_hf.serving.ledger import Ledger, shared_memory
from flodl_hf.serving.metrics import Metrics
from flodl_hf.serving.processes import Process, Processes, WorkersError
from flodl_hf.serving.settings import Settings
from flodl_hf.serving.traces import Traces

__all__ = ["Parent"]

LOG = logging.getLogger("flodl_hf.serving")
# Another process is started at once in the place of one that lived for so long, and soon in that of others.
LIVES_S, SOON_S = 30.0, 1.0
# How long what a process counted is waited for; what it said last is taken then.
COUNT_S = 1.0
# Connections that are taken in a turn of the loop, and how long none is when there is no descriptor left for one.
TURN, PAUSE_S = 64, 0.2
BACKLOG = 2048


@dataclass(eq=False)
class _Answering:
    """One process that answers HTTP.

    Attributes:
        number: its place in the ledger.
        child: its process.
        ready: done when it can be given connections; with a fault, when it cannot be started.
        workers: the workers that it has a link to, by their number.
        taken: connections that it was given.
        leaving: whether it is to be given no more.
        counted: what it counted, as it said last.
        asked: done when it has said it again.
        since: when it was started.
    """

    number: int
    child: Child
    ready: asyncio.Future[None]
    since: float
    workers: dict[int, Process] = field(default_factory=dict)
    taken: int = 0
    leaving: bool = False
    counted: dict[str, Any] | None = None
    asked: asyncio.Future[None] | None = None


class Parent:
    """A server of several processes.

    Args:
        settings: what is served, and how.

    Raises:
        ConfigError: traces cannot be sent.
    """

    def __init__(self, settings: Settings) -> None:
        if settings.otlp_endpoint is not None:
            Traces(settings.otlp_endpoint).close()  # said before anything is started
        self.settings = settings
        self.processes = Processes(settings, self, hands=True)
        self.restarts = 0
        """Processes that answered HTTP, ended and were replaced."""
        keys = words_of(settings.api_keys)
        self._memory = shared_memory(len(keys), settings.http_processes)
        self.ledger = Ledger(keys, settings.http_processes, 0, self._memory)
        """What is inside all of them."""
        self.ledger.calm = time.monotonic()
        self._here: list[_Answering] = []
        # Of workers; 0 is a connection.
        self._numbers: dict[Process, int] = {}
        self._next = count(1)
        self._past = Metrics()
        """What those counted that are no more."""
        self._held: socket.socket
        self._serving = self._listening = self._closing = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._starting: list[asyncio.Future[None]] = []
        self._replacing: set[asyncio.Task[Any]] = set()
        self._end = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def pids(self) -> list[int]:
        """The processes that answer HTTP now."""
        return [one.child.pid for one in self._here if one.ready.done()]

    # ---- the run -----------------------------------------------------------------------------------

    async def serve(self, held: socket.socket, here: Callable[[], None]) -> None:
        """Serve until it is told to stop.

        Args:
            held: a socket that is bound.
            here: called when requests are answered.

        Raises:
            WorkersError: a model cannot be served.
            ConfigError: a directory of adapters holds what is none.
        """
        self._loop, self._held = asyncio.get_running_loop(), held
        asked = asyncio.Event()
        reloading: asyncio.Future[None] | None = None
        calls = {signal.SIGINT: self._stop, signal.SIGTERM: self._stop, signal.SIGHUP: asked.set}
        try:
            begun = [self._begin(number) for number in range(self.settings.http_processes)]
            self._starting = [asyncio.ensure_future(made) for made in (self.processes.start(), *begun)]
            with listened({signal.SIGHUP: asked.set}):  # a reload asked for before all is warm comes after that
                await asyncio.gather(*self._starting)
            with listened(calls):
                reloading = asyncio.ensure_future(reload_on(self.processes, asked))
                held.setblocking(False)
                held.listen(BACKLOG)
                self._serving = True
                self._listen(True)
                here()
                await self._end.wait()
        finally:
            if reloading is not None:
                reloading.cancel()
            await self._close()

    def stop(self) -> None:
        """Stop when all is answered; from any thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has stopped
                self._loop.call_soon_threadsafe(self._end.set)

    def _stop(self) -> None:
        if self._end.is_set():
            # Told twice: at once.
            for one in self._here:
                one.child.process.kill()
        self._end.set()

    async def _close(self) -> None:
        """Let all processes answer what they were asked, then the workers go."""
        self._closing = True
        for task in self._replacing:
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        if self._listening:
            self._accept()  # who has come is answered
            self._listen(False)
        self._held.close()
        here = [one.child for one in self._here]
        for one in self._here:
            with contextlib.suppress(OSError):
                if one.ready.done():
                    one.child.link.send({"stop": True})
                else:
                    one.child.link.close()
        await asyncio.gather(*(child.reaped(self.settings.drain_s + END_S) for child in here))
        await self.processes.close()
        # Of several faults the first was told.
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        os.close(self._memory)

    def _task(self, made: Awaitable[Any], held: set[asyncio.Task[Any]] | None = None) -> None:
        held = self._tasks if held is None else held
        task = asyncio.ensure_future(made)
        held.add(task)
        task.add_done_callback(held.discard)

    # ---- processes that answer ---------------------------------------------------------------------

    async def _begin(self, number: int) -> None:
        """Start a process and return when it can be given connections.

        Raises:
            WorkersError: it ended before it could.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        child = await start(
            "flodl_hf.serving.several.answers", lambda message, _: self._heard(one, message), hands=True,
            memory=self._memory,
        )  # fmt: skip
        if self._closing:
            child.link.close()
            await child.reaped()
            return
        one = _Answering(number, child, loop.create_future(), began)
        self._here.append(one)
        self._task(self._watch(one))
        with contextlib.suppress(OSError):  # it has ended, which is seen
            child.link.send({"settings": self.settings.said(), "number": number})
        self._tell(one)
        await one.ready
        LOG.info("http process ready", extra={"said": {"pid": child.pid}})
        self._listen(True)

    async def _watch(self, one: _Answering) -> None:
        """Have another process started in the place of one that ends."""
        child = one.child
        await child.link.closed
        child.link.close()
        self._here.remove(one)
        if one.asked is not None and not one.asked.done():
            one.asked.set_result(None)
        status = await child.reaped()
        self.ledger.clear(one.number)
        if one.counted is not None:
            self._past.take({**one.counted, "operations": 0.0})
        if not one.ready.done():
            one.ready.set_exception(
                WorkersError(f"serve: a process that is to answer HTTP ended with status {status}", device="")
            )
        elif one.ready.exception() is None and not self._closing:
            LOG.error("http process ended", extra={"said": {"pid": child.pid, "status": status}})
            lived = asyncio.get_running_loop().time() - one.since
            self._task(self._replace(one.number, 0.0 if lived > LIVES_S else SOON_S), self._replacing)

    async def _replace(self, number: int, pause_s: float) -> None:
        """Start a process in the place of another, after a while."""
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self._begin(number)
            except (FlodlError, OSError) as fault:
                LOG.error("http process not started", extra={"said": {"fault": str(fault)}})
                pause_s = min(30.0, 2 * max(pause_s, SOON_S))
            else:
                self.restarts += 1
                return

    def _heard(self, one: _Answering, message: dict[str, Any]) -> None:
        """Take a message of a process that answers."""
        if "counted" in message:
            one.counted = message["counted"]
            if message["answers"]:
                self.processes.alive()
            if one.asked is not None and not one.asked.done():
                one.asked.set_result(None)
        if "left" in message:
            one.workers.pop(message["left"], None)
        if "lost" in message and one.workers.pop(message["lost"], None) is not None:
            # Mostly the worker has ended, and this process hears of it by itself; else there is another link.
            asyncio.get_running_loop().call_later(SOON_S, self._tell, one)
        if "leaving" in message:
            one.leaving = True
            one.child.link.send({"stop": True})
        if "ready" in message and not one.ready.done():
            one.ready.set_result(None)
        if "scrape" in message:
            self._task(self._count(one, message["scrape"]))

    async def _count(self, one: _Answering, number: int) -> None:
        """Tell a process what all of them counted, and those that are no more."""
        waits = []
        for other in self._here:
            if other is not one and other.ready.done():
                if other.asked is None or other.asked.done():
                    other.asked = asyncio.get_running_loop().create_future()
                    with contextlib.suppress(OSError):
                        other.child.link.send({"count": True})
                waits.append(other.asked)
        if waits:
            await asyncio.wait(waits, timeout=COUNT_S)
        counted = [other.counted for other in self._here if other is not one and other.counted is not None]
        said = {
            "gathered": number, "of": [self._past.dump(), *counted], "here": len(self.pids), "restarts": self.restarts,
        }  # fmt: skip
        with contextlib.suppress(OSError):
            one.child.link.send(said)

    # ---- workers -----------------------------------------------------------------------------------

    def use(self, here: Sequence[Process], restarts: int) -> None:
        """Have these workers asked from now on, and no others."""
        for process in here:
            if process not in self._numbers:
                self._numbers[process] = next(self._next)
        for one in self._here:
            self._tell(one)

    def answered(self, worker: Process, message: dict[str, Any], arrays: list[Any]) -> None:
        """Take an answer, which does not come: nobody asks here."""

    def ended(self, worker: Process) -> None:
        """Forget a worker that is no more; who asked it sees its end by the link."""
        number = self._numbers.pop(worker, 0)
        for one in self._here:
            one.workers.pop(number, None)

    async def left(self, worker: Process) -> None:
        """Return when no process waits for what a worker was asked, or that took too long."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self.settings.drain_s + 1
        number = self._numbers.get(worker, 0)
        while any(number in one.workers for one in self._here) and loop.time() < until:
            await asyncio.sleep(0.02)

    def _tell(self, one: _Answering) -> None:
        """Tell a process which workers there are, and hand it a link to those that it does not know."""
        here, child = self.processes.here, one.child
        if not here or one not in self._here:
            return
        try:
            for process in here:
                number = self._numbers[process]
                if number not in one.workers:
                    self._link(child, process, number)
                    one.workers[number] = process
            said = [{"number": self._numbers[process], "info": process.info} for process in here]
            child.link.send({"workers": said, "restarts": self.processes.restarts})
        except OSError:
            # It takes nothing any more: another one takes its place.
            child.process.kill()

    def _link(self, child: Child, process: Process, number: int) -> None:
        """Join a process that answers with a worker."""
        one, other = socket.socketpair()
        with one, other:
            hands = process.child.hands
            assert hands is not None
            assert child.hands is not None
            with contextlib.suppress(OSError):  # a worker that is no more: its link ends at once
                hand(hands, number, one)
            hand(child.hands, number, other)

    # ---- connections -------------------------------------------------------------------------------

    def _listen(self, on: bool) -> None:
        """Take connections from now on, or none."""
        if on == self._listening or (on and (self._closing or not self._serving)):
            return
        self._listening = on
        loop = asyncio.get_running_loop()
        if on:
            loop.add_reader(self._held.fileno(), self._accept)
        else:
            loop.remove_reader(self._held.fileno())

    def _accept(self) -> None:
        """Hand the connections that have come to the processes that have fewest."""
        for _ in range(TURN):
            ready = [one for one in self._here if one.ready.done() and not one.leaving]
            if not ready:
                self._listen(False)  # until there is one
                return
            try:
                client, _ = self._held.accept()
            except (BlockingIOError, ConnectionAbortedError, InterruptedError):
                return
            except OSError as fault:
                LOG.error("no connection taken", extra={"said": {"fault": str(fault)}})
                self._listen(False)
                asyncio.get_running_loop().call_later(PAUSE_S, self._listen, True)
                return
            with client:
                with contextlib.suppress(OSError):
                    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._give(client, sorted(ready, key=self._open))

    def _give(self, client: socket.socket, to: Sequence[_Answering]) -> None:
        """Hand a connection to the first that takes it; if none does, it ends."""
        for one in to:
            assert one.child.hands is not None
            with contextlib.suppress(OSError):
                hand(one.child.hands, 0, client)
                one.taken += 1
                return

    def _open(self, one: _Answering) -> int:
        """Return how many connections a process has."""
        return one.taken - self.ledger.closed(one.number)

"""The worker processes of a server, and the requests to them.

`Workers` sends requests: load balancing, timeouts, and errors of workers that ended. Each request belongs to one
worker; if that worker ends, the request fails, and later requests wait for the next worker. `Processes` starts,
replaces and reloads the processes, and reports the current ones to `Workers`, or to the parent of several HTTP
processes, which has the same methods. All code runs in the event loop and never blocks it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from typing import Any

import numpy as np

from flodl.errors import FlodlError
from flodl_hf.serving.responses import RefusedError
from flodl_hf.serving.settings import Settings, find_adapters
from flodl_hf.workers.messages import Link, Message, connect_link
from flodl_hf.workers.process import Process as Child

LOG = logging.getLogger("flodl_hf.serving")
# Workers report timeouts themselves. Requests of a worker that reports nothing fail after this additional time, checked
# in this interval.
GRACE_S, LOOK_S = 1.0, 0.5
# A worker is not restarted after this many ends without a result in between.
MAX_RESTARTS = 5


class WorkersError(FlodlError):
    """Workers cannot be started."""


@dataclass(eq=False)
class Worker:
    """A worker process that accepts requests.

    Attributes:
        link: the connection.
        info: its first message, sent when its models were warm.
        rate: tokens per second at full load.
        load: approximate tokens of its current requests.
        pending: future and latest time of each current request, by number.
    """

    link: Link
    info: dict[str, Any] = field(default_factory=dict)
    rate: float = 0.0
    load: int = 0
    pending: dict[int, tuple[asyncio.Future[Message], float]] = field(default_factory=dict)


class Workers:
    """The workers of a server.

    Args:
        settings: the server's settings.
        on_batches: called with (rows, tokens, seconds) of each finished batch, and the number of queued tokens.
    """

    def __init__(self, settings: Settings, on_batches: Callable[[list[Any], int], None]) -> None:
        self.settings = settings
        self.models: dict[str, dict[str, Any]] = {}
        """Information about each model, by name."""
        self.max_batch_tokens = 0
        self.restarts = 0
        """Number of workers that were replaced."""
        self.answers = 0
        """Number of received results."""
        self.active: list[Worker] = []
        self.ready = asyncio.Event()
        """Set while a warm worker exists."""
        self._on_batches = on_batches
        # Includes workers that only finish their current requests.
        self._every: set[Worker] = set()
        self._looking: asyncio.TimerHandle | None = None
        self._numbers = count()

    @property
    def rate(self) -> float:
        """Tokens per second of all active workers at full load."""
        return sum(worker.rate for worker in self.active)

    @property
    def peak(self) -> float:
        """Peak operations per second of all devices; see `flodl_hf.serving.tasks.measure_peak`."""
        peaks: dict[str, float] = {}
        for worker in self.active:
            device = worker.info["device"]
            peaks[device] = max(peaks.get(device, 0.0), worker.info["peak"])
        return sum(peaks.values())

    # ---- active workers ----------------------------------------------------------------------------

    def use(self, active: Sequence[Worker], restarts: int) -> None:
        """Send requests only to these workers from now on; other workers finish their current requests.

        Args:
            active: all warm workers.
            restarts: number of workers that were replaced so far.
        """
        self.active, self.restarts = list(active), restarts
        self._every |= {*active}
        if not active:
            self.ready.clear()
            return
        self.models = active[-1].info["ready"]
        self.max_batch_tokens = active[-1].info["max_batch_tokens"]
        self.ready.set()

    def ended(self, worker: Worker) -> None:
        """Fail the requests of a worker that ended."""
        for future, _ in worker.pending.values():
            if not future.done():
                future.set_exception(_refused("ended"))
        self._every.discard(worker)
        if worker in self.active:
            # Immediately, so that new requests wait for another worker.
            self.active.remove(worker)
            if not self.active:
                self.ready.clear()

    async def left(self, worker: Worker) -> None:
        """Wait until a worker has no requests, at most ``drain_s``."""
        until = time.monotonic() + self.settings.drain_s
        while worker.pending and time.monotonic() < until:
            await asyncio.sleep(0.02)

    # ---- requests ----------------------------------------------------------------------------------

    async def ask(self, message: dict[str, Any], until: float, weight: int) -> Message:
        """Send a request to a worker and return its result; if cancelled, the request leaves its batch.

        Args:
            message: the request: ``task`` (a name of `flodl_hf.serving.tasks.TASKS`), ``model``, ``items``,
                ``options``, ``key`` (identifier of the API key), ``priority`` (1 is processed before other requests of
                the key, -1 after them), ``characters``, and ``traced`` for a timeline.
            until: deadline, by ``time.monotonic``.
            weight: estimated number of tokens.

        Raises:
            RefusedError: the request was refused or too late, or its worker ended.
        """
        if not self.active:
            try:
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    await self.ready.wait()
            except TimeoutError:
                raise _refused("deadline") from None
            if not self.active:
                raise _refused("ended")
        worker = min(self.active, key=attrgetter("load"))
        loop = asyncio.get_running_loop()
        number, future = next(self._numbers), loop.create_future()
        worker.pending[number] = future, until + GRACE_S
        worker.load += weight
        if self._looking is None:
            self._looking = loop.call_later(LOOK_S, self._look)
        try:
            worker.link.send({**message, "id": number, "left_s": until - time.monotonic()})
            while (room := worker.link.room) is not None:
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    await asyncio.shield(room)
            reply, arrays = await future
        except (TimeoutError, OSError) as fault:
            raise _refused("deadline" if isinstance(fault, TimeoutError) else "ended") from None
        finally:
            worker.load -= weight
            if worker.pending.pop(number, None) is not None:  # the worker may still process it
                with contextlib.suppress(OSError):
                    worker.link.send({"cancel": number})
        if (fault := reply.get("fault")) is not None:
            raise RefusedError(fault["message"], fault["kind"])
        return reply, arrays

    def _look(self) -> None:
        """Fail requests of unresponsive workers; one timer serves all requests."""
        now = time.monotonic()
        every = [pending for worker in self._every for pending in worker.pending.values()]
        for future, until in every:
            if now > until and not future.done():
                future.set_exception(_refused("deadline"))
        self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look) if every else None

    def answered(self, worker: Worker, message: dict[str, Any], arrays: list[np.ndarray]) -> None:
        """Handle a result of a worker.

        Args:
            worker: the worker.
            message: its message.
            arrays: arrays of the message.
        """
        worker.rate = message["rate"]
        self._on_batches(message["ran"], message["queued"])
        self.answers += 1
        future, _ = worker.pending.pop(message["id"], (None, 0.0))
        if future is not None and not future.done():
            future.set_result((message, arrays))


def _refused(kind: str) -> RefusedError:
    if kind == "ended":
        return RefusedError("the worker process ended. Retry; another worker replaces it.", kind, after_s=1.0)
    return RefusedError("the request timed out. Send fewer texts, or allow more time.", kind)


# ---- processes -----------------------------------------------------------------------------------------


def start_task(made: Awaitable[Any], held: set[asyncio.Task[Any]]) -> None:
    """Run a coroutine, and keep its task in a set until it ends; the event loop would not keep it."""
    task = asyncio.ensure_future(made)
    held.add(task)
    task.add_done_callback(held.discard)


@dataclass(eq=False, kw_only=True)
class Process(Worker):
    """A worker whose process was started here.

    Attributes:
        device: its device.
        child: the process.
    """

    device: str
    child: Child
    leaving: bool = False
    listening: asyncio.Task[None] | None = None


class Processes:
    """The worker processes of a server.

    Args:
        settings: the server's settings.
        listener: receives changes by ``use``, ``ended`` and ``left``, and results of its requests by ``answered``,
            methods of `Workers`.
        fd_channel: whether connections to further HTTP processes are sent to the workers.
    """

    def __init__(self, settings: Settings, listener: Any, *, fd_channel: bool = False) -> None:
        self.settings = settings
        self.restarts = 0
        """Number of workers that were replaced."""
        self.deaths = 0
        """Number of workers that ended since the last result."""
        self.here: list[Process] = []
        """The active workers."""
        self._listener, self._fd_channel = listener, fd_channel
        self._adapters: list[dict[str, str]] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._replacing: set[asyncio.Task[Any]] = set()
        self._closing = False
        self._loads = 0

    async def load(self) -> None:
        """Load all models in new workers, and return when they are warm; old workers finish their current requests.

        Raises:
            WorkersError: a model cannot be served; the message has the reason, and old workers remain active.
            ConfigError: a directory of adapters is invalid; old workers remain active.
        """
        adapters = find_adapters(self.settings)

        def start(devices: Sequence[str]) -> Awaitable[list[Process | BaseException]]:
            return asyncio.gather(*(self._one(device, adapters) for device in devices), return_exceptions=True)

        done = await start(self.settings.devices * (self.settings.workers or 1))
        new = [one for one in done if isinstance(one, Process)]
        if faults := [one for one in done if isinstance(one, BaseException)]:
            await asyncio.gather(*map(self._let_go, new))
            raise faults[0]
        if self.settings.workers is None:
            roomy = [one.device for one in new if one.info["room"]]
            for device, one in zip(roomy, await start(roomy), strict=True):
                if isinstance(one, Process):
                    new.append(one)
                else:
                    LOG.warning("one worker", extra={"fields": {"device": device, "fault": str(one)}})
        if self._closing:
            await asyncio.gather(*map(self._let_go, new))
            return
        self._adapters, self.deaths, before = adapters, 0, self.here
        self._loads += 1
        self._use(new)
        for process in before:
            start_task(self._let_go(process), self._tasks)

    def _use(self, here: list[Process]) -> None:
        self.here = here
        self._listener.use(here, self.restarts)
        for process in here:
            # The end of each process is observed from now on, also of one that ended while others were started.
            if process.listening is None:
                process.listening = asyncio.ensure_future(self._listen(process))

    async def _one(self, device: str, adapters: list[dict[str, str]]) -> Process:
        first: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

        def on_message(message: dict[str, Any], arrays: list[np.ndarray]) -> None:
            if "end" in message:
                child.reason = message["end"]
            elif "warned" in message:
                LOG.warning(message["warned"], extra={"fields": {"device": device}})
            elif first.done():
                self.deaths = 0
                self._listener.answered(found, message, arrays)
            else:
                first.set_result(message)

        child = Child("flodl_hf.serving.worker:serve", device, fd_channel=self._fd_channel)
        found = Process(await connect_link(child.socket, on_message), device=device, child=child)
        found.link.send(self.settings.for_worker(device, adapters))
        try:
            await asyncio.wait((first, found.link.closed), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            found.link.close()
            await child.reaped(0.0)
            raise
        if not first.done():
            await self._let_go(found)
            raise WorkersError(f"serve: the worker of {device} {child.end()}", device=device)
        found.info = first.result()
        found.rate = float(found.info["rate"])
        LOG.info("worker ready", extra={"fields": {name: found.info[name] for name in ("device", "pid")}})
        return found

    # ---- ends --------------------------------------------------------------------------------------

    async def _listen(self, process: Process) -> None:
        """Replace a worker that ends unexpectedly."""
        await process.link.closed
        self._listener.ended(process)
        process.link.close()
        expected = process.leaving or self._closing or process not in self.here
        if not expected:
            self.here.remove(process)
        await process.child.reaped()
        if not expected:
            LOG.error("worker ended", extra={"fields": {"device": process.device, "fault": process.child.end()}})
            start_task(self._replace(process.device), self._replacing)

    async def _replace(self, device: str) -> None:
        """Start a replacement, unless all models are reloaded meanwhile."""
        loads = self._loads
        while loads == self._loads and not self._closing:
            self.deaths += 1
            if self.deaths > MAX_RESTARTS:
                LOG.error("worker given up", extra={"fields": {"device": device}})
                return
            try:
                again = await self._one(device, self._adapters)
            except WorkersError as fault:
                LOG.error("worker not started", extra={"fields": {"device": device, "fault": str(fault)}})
                await asyncio.sleep(min(30.0, 2.0**self.deaths))
                continue
            if loads != self._loads or self._closing:
                start_task(self._let_go(again), self._tasks)
                return
            self.restarts += 1
            self._use([*self.here, again])
            return

    async def close(self) -> None:
        """Let all workers finish their current requests, and end them."""
        self._closing = True
        for task in self._replacing:
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        here = self.here
        self._use([])
        await asyncio.gather(*(self._let_go(process) for process in here), *self._tasks)

    async def _let_go(self, process: Process) -> None:
        process.leaving = True
        await self._listener.left(process)
        process.link.close()
        await process.child.reaped()
        if process.listening is not None:
            await process.listening

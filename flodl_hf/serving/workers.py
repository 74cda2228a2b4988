"""Requests of an HTTP process to the workers: load balancing, timeouts, and errors of workers that ended.

All code runs in the event loop of the HTTP process and never blocks it. Each request belongs to one worker; if that
worker ends, the request fails, and later requests wait for the next worker. `flodl_hf.serving.worker_processes` reports
the current workers, in this process or in the parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from typing import Any

import numpy as np

from flodl_hf.serving.http_errors import RefusedError
from flodl_hf.serving.settings import Settings
from flodl_hf.workers.ipc import Link

# Workers report timeouts themselves. Requests of a worker that reports nothing fail after this additional time, checked
# in this interval.
GRACE_S, LOOK_S = 1.0, 0.5


@dataclass(frozen=True)
class Answer:
    """Result of a worker.

    Attributes:
        message: the message: ``data`` (JSON types), and counts and times, see `flodl_hf.serving.worker`.
        arrays: arrays in addition to ``data``.
    """

    message: dict[str, Any]
    arrays: list[np.ndarray]

    @property
    def data(self) -> Any:
        """The result as JSON types."""
        return self.message["data"]


@dataclass(slots=True)
class _Pending:
    """A request that a worker processes."""

    answer: asyncio.Future[Answer]
    until: float
    open: bool = True
    """Whether the worker may still process it."""

    def done(self, answer: Answer | RefusedError) -> None:
        self.open = False
        if self.answer.done():
            return
        if isinstance(answer, RefusedError):
            self.answer.set_exception(answer)
        else:
            self.answer.set_result(answer)


@dataclass(eq=False)
class Worker:
    """A worker process that accepts requests.

    Attributes:
        link: the connection.
        info: its first message, sent when its models were warm.
        rate: tokens per second at full load.
        load: approximate tokens of its current requests.
        pending: its current requests by number.
    """

    link: Link
    info: dict[str, Any] = field(default_factory=dict)
    rate: float = 0.0
    load: int = 0
    pending: dict[int, _Pending] = field(default_factory=dict)


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
        self._on_batches = on_batches
        self._active: list[Worker] = []
        self._ready = asyncio.Event()
        # Includes workers that only finish their current requests.
        self._every: set[Worker] = set()
        self._looking: asyncio.TimerHandle | None = None
        self._numbers = count()

    @property
    def ready(self) -> bool:
        """Whether a warm worker exists."""
        return self._ready.is_set()

    @property
    def pids(self) -> list[int]:
        """Process ids of the active workers."""
        return [worker.info["pid"] for worker in self._active]

    @property
    def devices(self) -> list[str]:
        """Device of each active worker."""
        return [worker.info["device"] for worker in self._active]

    @property
    def rate(self) -> float:
        """Tokens per second of all active workers at full load."""
        return sum(worker.rate for worker in self._active)

    @property
    def peak(self) -> float:
        """Peak operations per second of all devices; see `flodl_hf.serving.throughput`."""
        peaks: dict[str, float] = {}
        for worker in self._active:
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
        self._active, self.restarts = list(active), restarts
        self._every |= {*active}
        if not active:
            self._ready.clear()
            return
        self.models = active[-1].info["ready"]
        self.max_batch_tokens = active[-1].info["max_batch_tokens"]
        self._ready.set()

    def ended(self, worker: Worker) -> None:
        """Fail the requests of a worker that ended."""
        for pending in worker.pending.values():
            pending.done(_refused("ended"))
        self._every.discard(worker)
        if worker in self._active:
            # Immediately, so that new requests wait for another worker.
            self._active.remove(worker)
            if not self._active:
                self._ready.clear()

    async def left(self, worker: Worker) -> None:
        """Wait until a worker has no requests, at most ``drain_s``."""
        until = time.monotonic() + self.settings.drain_s
        while worker.pending and time.monotonic() < until:
            await asyncio.sleep(0.02)

    # ---- requests ----------------------------------------------------------------------------------

    async def ask(
        self,
        task: str,
        model: str,
        items: list[Any],
        options: dict[str, Any],
        *,
        key: str,
        until: float,
        weight: int,
        priority: int = 0,
        traced: bool = False,
    ) -> Answer:
        """Send a request to a worker and return its result; if cancelled, the request leaves its batch.

        Args:
            task: a name of `flodl_hf.serving.tasks.TASKS`.
            model: name of the model.
            items: the inputs.
            options: options of the task.
            key: identifier of the API key.
            until: deadline, by ``time.monotonic``.
            weight: estimated number of tokens.
            priority: 1 is processed before other requests of the key, -1 after them.
            traced: whether to return a timeline.

        Raises:
            RefusedError: the request was refused or too late, or its worker ended.
        """
        worker = self._least() or await self._free(until)
        loop = asyncio.get_running_loop()
        number = next(self._numbers)
        pending = worker.pending[number] = _Pending(loop.create_future(), until + GRACE_S)
        worker.load += weight
        if self._looking is None:
            self._looking = loop.call_later(LOOK_S, self._look)
        left = until - time.monotonic()
        message = {
            "id": number, "task": task, "model": model, "items": items, "options": options, "key": key,
            "left_s": left, "priority": priority,
        }  # fmt: skip
        if traced:
            message["traced"] = True
        try:
            worker.link.send(message)
            if worker.link.full:
                async with asyncio.timeout(max(0.0, left)):
                    await worker.link.room()
            return await pending.answer
        except (TimeoutError, OSError) as fault:
            raise _refused("deadline" if isinstance(fault, TimeoutError) else "ended") from None
        finally:
            worker.load -= weight
            del worker.pending[number]
            if pending.open:
                with contextlib.suppress(OSError):
                    worker.link.send({"cancel": number})

    def _least(self) -> Worker | None:
        """Return the worker with the least load."""
        here = self._active
        return min(here, key=attrgetter("load")) if len(here) > 1 else here[0] if here else None

    async def _free(self, until: float) -> Worker:
        """Return a worker as soon as one is active."""
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                await self._ready.wait()
        except TimeoutError:
            raise _refused("deadline") from None
        if (worker := self._least()) is None:
            raise _refused("ended")
        return worker

    def _look(self) -> None:
        """Fail requests of unresponsive workers; one timer serves all requests."""
        now = time.monotonic()
        every = [pending for worker in self._every for pending in worker.pending.values()]
        for pending in every:
            if now > pending.until and not pending.answer.done():
                pending.answer.set_exception(_refused("deadline"))
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
        pending = worker.pending.get(message["id"])
        if pending is None:
            return
        if (fault := message.get("fault")) is not None:
            pending.done(RefusedError(fault["message"], fault["kind"]))
            return
        pending.done(Answer(message, arrays))


def _refused(kind: str) -> RefusedError:
    if kind == "ended":
        return RefusedError("the worker process ended. Retry; another worker replaces it.", kind, after_s=1.0)
    return RefusedError("the request timed out. Send fewer texts, or allow more time.", kind)

"""The processes of the workers: started, replaced when they end, exchanged for others, and let go.

Who asks them is told which there are (`Asker`): the doors of this process, or the parent of several processes of doors.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from flodl.errors import FlodlError
from flodl_hf.serving.adapters import find_adapters
from flodl_hf.serving.child import Child, start
from flodl_hf.serving.settings import Settings
from flodl_hf.serving.workers import Worker

__all__ = ["Asker", "Process", "Processes", "WorkersError"]

LOG = logging.getLogger("flodl_hf.serving")
# After so many deaths without an answer between them a worker is not started again.
TRIES = 5


class WorkersError(FlodlError):
    """Workers that cannot be started."""


@dataclass(eq=False, kw_only=True)
class Process(Worker):
    """A worker whose process is held here.

    Attributes:
        device: what it was started for.
        child: its process.
    """

    device: str
    child: Child
    leaving: bool = False
    listening: asyncio.Task[None] | None = None


class Asker(Protocol):
    """Who asks workers; `flodl_hf.serving.workers.Workers` is one."""

    def use(self, here: Sequence[Process], restarts: int) -> None:
        """Ask these from now on, and no others."""

    def answered(self, worker: Process, message: dict[str, Any], arrays: list[np.ndarray]) -> None:
        """Take an answer."""

    def ended(self, worker: Process) -> None:
        """Fail what a worker was asked, which is no more."""

    async def left(self, worker: Process) -> None:
        """Return when nobody waits for what a worker was asked, or that took too long."""


class Processes:
    """The processes of a server's workers.

    Args:
        settings: of the server.
        asker: who asks them.
        hands: whether they are to be handed links to several that ask.
    """

    def __init__(self, settings: Settings, asker: Asker, *, hands: bool = False) -> None:
        self.settings = settings
        self.restarts = 0
        """Workers that ended and were replaced."""
        self.here: list[Process] = []
        """Those that answer now."""
        self._asker = asker
        self._hands = hands
        self._adapters: list[dict[str, str]] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._replacing: set[asyncio.Task[Any]] = set()
        self._closing = False
        self._deaths = 0
        self._reloads = 0

    async def start(self) -> None:
        """Start a worker for each device and return when all are warm.

        Raises:
            WorkersError: a model cannot be served; the text says why.
            ConfigError: likewise of a directory of adapters.
        """
        found = await self._started()
        if self._closing:
            await asyncio.gather(*(self._let_go(process) for process in found))
            return
        self._use(found)

    def alive(self) -> None:
        """Note that workers answer."""
        self._deaths = 0

    def _use(self, here: list[Process]) -> None:
        self.here = here
        self._asker.use(here, self.restarts)
        for process in here:
            # From now on its end is looked for: one that ended while others were being started is seen at once.
            if process.listening is None:
                process.listening = asyncio.ensure_future(self._listen(process))

    async def _started(self) -> list[Process]:
        adapters = find_adapters(self.settings)
        devices = self.settings.devices * (self.settings.workers or 1)
        done = await self._all(devices, adapters)
        if self.settings.workers is None and all(isinstance(one, Process) for one in done):
            roomy = [one.device for one in done if isinstance(one, Process) and one.info["room"]]
            second = await self._all(roomy, adapters)
            for device, one in zip(roomy, second, strict=True):
                if isinstance(one, BaseException):
                    LOG.warning("one worker", extra={"said": {"device": device, "fault": str(one)}})
            done += [one for one in second if isinstance(one, Process)]
        found = [process for process in done if isinstance(process, Process)]
        faults = [fault for fault in done if isinstance(fault, BaseException)]
        if faults:
            for process in found:
                await self._let_go(process)
            raise faults[0]
        self._adapters = adapters
        return found

    async def _all(self, devices: Sequence[str], adapters: list[dict[str, str]]) -> list[Process | BaseException]:
        made = [asyncio.ensure_future(self._one(device, adapters)) for device in devices]
        return await asyncio.gather(*made, return_exceptions=True)

    async def _one(self, device: str, adapters: list[dict[str, str]]) -> Process:
        first: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

        def heard(message: dict[str, Any], arrays: list[np.ndarray]) -> None:
            if "warned" in message:
                LOG.warning(message["warned"], extra={"said": {"device": device}})
            elif first.done():
                self._deaths = 0
                self._asker.answered(found, message, arrays)
            else:
                first.set_result(message)

        child = await start("flodl_hf.serving.worker", heard, hands=self._hands)
        found = Process(child.link, device=device, child=child)
        found.link.send(self.settings.of_worker(device, adapters))
        try:
            await asyncio.wait((first, found.link.closed), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            found.link.close()
            await child.reaped(0.0)
            raise
        if first.done():
            message = first.result()
        else:
            message = {"broken": f"the worker of {device} ended with status {await child.reaped()}"}
        if "broken" in message:
            await self._let_go(found)
            raise WorkersError(f"serve: {message['broken']}", device=device)
        found.info, found.rate = message, float(message["rate"])
        LOG.info("worker ready", extra={"said": {"device": message["device"], "pid": message["pid"]}})
        return found

    # ---- ends --------------------------------------------------------------------------------------

    async def _listen(self, process: Process) -> None:
        """Have another worker started in the place of one that ends."""
        await process.link.closed
        self._asker.ended(process)
        process.link.close()
        expected = process.leaving or self._closing or process not in self.here
        if not expected:
            self.here.remove(process)
        status = await process.child.reaped()
        if not expected:
            LOG.error("worker ended", extra={"said": {"device": process.device, "status": status}})
            self._task(self._replace(process.device), self._replacing)

    async def _replace(self, device: str) -> None:
        """Start a worker in the place of another, unless all are loaded anew meanwhile."""
        reloads = self._reloads
        while reloads == self._reloads and not self._closing:
            self._deaths += 1
            if self._deaths > TRIES:
                LOG.error("worker given up", extra={"said": {"device": device}})
                return
            try:
                again = await self._one(device, self._adapters)
            except WorkersError as fault:
                LOG.error("worker not started", extra={"said": {"device": device, "fault": str(fault)}})
                await asyncio.sleep(min(30.0, 2.0**self._deaths))
                continue
            if reloads != self._reloads or self._closing:
                self._task(self._let_go(again), self._tasks)
                return
            self.restarts += 1
            self._use([*self.here, again])
            return

    async def reload(self) -> None:
        """Load all models anew, let the new workers take over, and let the old ones finish what they were asked.

        Raises:
            WorkersError: a model cannot be loaded any more; the old workers go on.
            ConfigError: likewise of a directory of adapters.
        """
        new = await self._started()
        if self._closing:
            await asyncio.gather(*(self._let_go(process) for process in new))
            return
        self._reloads += 1
        self._deaths = 0
        before = self.here
        self._use(new)
        for process in before:
            self._task(self._let_go(process), self._tasks)

    async def close(self) -> None:
        """Let all workers finish what they were asked, and end."""
        self._closing = True
        for task in self._replacing:
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        here = self.here
        self._use([])
        await asyncio.gather(*(self._let_go(process) for process in here), *self._tasks)

    def _task(self, made: Awaitable[Any], held: set[asyncio.Task[Any]]) -> None:
        task = asyncio.ensure_future(made)
        held.add(task)
        task.add_done_callback(held.discard)

    async def _let_go(self, process: Process) -> None:
        process.leaving = True
        await self._asker.left(process)
        process.link.close()
        await process.child.reaped()
        if process.listening is not None:
            await process.listening

"""The doors' side of the workers: processes started, asked, replaced when they end, and let go.

Everything here runs in the event loop of the doors and waits for nothing but it. A request belongs to one worker; if
that one ends, the request fails and says so, and the next is held until a worker is there again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from flodl.errors import FlodlError
from flodl_hf.serving.adapters import find_adapters
from flodl_hf.serving.link import Link, linked
from flodl_hf.serving.settings import Settings

__all__ = ["Answer", "TaskError", "Workers", "WorkersError"]

LOG = logging.getLogger("flodl_hf.serving")
# After so many deaths without an answer between them a worker is not started again.
TRIES = 5
# A worker says itself that a request is late. One that says nothing has so much longer, and is looked at this often.
GRACE_S, LOOK_S = 1.0, 0.5
_PROGRAM = """
import os, sys
sys.path[:] = {path!r}
from flodl_hf.serving.worker import serve
serve({descriptor})
sys.stderr.flush()
os._exit(0)
"""


class WorkersError(FlodlError):
    """Workers that cannot be started."""


class TaskError(FlodlError):
    """A request that a worker did not answer; ``kind`` says why."""

    kind: str


@dataclass(frozen=True)
class Answer:
    """What a worker answered.

    Attributes:
        data: JSON types.
        arrays: arrays beside them.
        tokens: tokens that ran.
        rows: rows likewise; a text of several windows has several.
        dropped: tokens that were cut off.
        waited_s: how long the first row waited for its batch.
        took_s: all of it, in the worker.
        timeline: what it did when, where that was asked for.
    """

    data: Any
    arrays: list[np.ndarray]
    tokens: int
    rows: int
    dropped: int
    waited_s: float
    took_s: float
    timeline: Sequence[Any] = ()


@dataclass(eq=False)
class _Process:
    """One worker."""

    device: str
    process: subprocess.Popen[bytes]
    link: Link
    asked: dict[int, _Asked] = field(default_factory=dict)
    load: int = 0
    info: dict[str, Any] = field(default_factory=dict)
    rate: float = 0.0
    leaving: bool = False
    listening: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _Asked:
    """One request of a worker."""

    answer: asyncio.Future[Answer]
    until: float
    open: bool = True
    """Whether the worker may still be busy with it."""

    def done(self, answer: Answer | TaskError) -> None:
        self.open = False
        if self.answer.done():
            return
        if isinstance(answer, TaskError):
            self.answer.set_exception(answer)
        else:
            self.answer.set_result(answer)


class Workers:
    """The workers of a server.

    Args:
        settings: of the server.
        heard: called with each batch that ran: rows, tokens, seconds; and with the tokens that are queued.
    """

    def __init__(self, settings: Settings, heard: Callable[[list[Any], int], None]) -> None:
        self.settings = settings
        self.models: dict[str, dict[str, Any]] = {}
        """What is known of each model."""
        self.max_batch_tokens = 0
        self.restarts = 0
        self._heard = heard
        self._adapters: list[dict[str, str]] = []
        self._here: list[_Process] = []
        self._ready = asyncio.Event()
        # Those too that only finish what they were asked.
        self._every: set[_Process] = set()
        self._looking: asyncio.TimerHandle | None = None
        self._numbers = count()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False
        self._deaths = 0

    @property
    def ready(self) -> bool:
        """Whether a worker is there and warm."""
        return self._ready.is_set()

    @property
    def pids(self) -> list[int]:
        """The processes that answer now."""
        return [process.process.pid for process in self._here]

    @property
    def devices(self) -> list[str]:
        """The device of each."""
        return [process.info["device"] for process in self._here]

    @property
    def rate(self) -> float:
        """Tokens a second that those run, together, when there is enough to run."""
        return sum(process.rate for process in self._here)

    @property
    def peak(self) -> float:
        """Operations a second that the devices of those reach, together; see `flodl_hf.serving.peak`."""
        peaks: dict[str, float] = {}
        for process in self._here:
            peaks[process.device] = max(peaks.get(process.device, 0.0), process.info["peak"])
        return sum(peaks.values())

    async def start(self) -> None:
        """Start a worker for each device and return when all are warm.

        Raises:
            WorkersError: a model cannot be served; the text says why.
            ConfigError: likewise of a directory of adapters.
        """
        self._here = await self._started()
        self._ready.set()

    async def _started(self) -> list[_Process]:
        adapters = find_adapters(self.settings)
        devices = self.settings.devices * (self.settings.workers or 1)
        done = await self._all(devices, adapters)
        if self.settings.workers is None and all(isinstance(one, _Process) for one in done):
            roomy = [one.device for one in done if isinstance(one, _Process) and one.info["room"]]
            second = await self._all(roomy, adapters)
            for device, one in zip(roomy, second, strict=True):
                if isinstance(one, BaseException):
                    LOG.warning("one worker", extra={"said": {"device": device, "fault": str(one)}})
            done += [one for one in second if isinstance(one, _Process)]
        faults = [fault for fault in done if isinstance(fault, BaseException)]
        for process in done:
            if isinstance(process, _Process):
                self.models = process.info["ready"]
                self.max_batch_tokens = process.info["max_batch_tokens"]
                if faults:
                    await self._let_go(process)
        if faults:
            raise faults[0]
        self._adapters = adapters
        return [process for process in done if isinstance(process, _Process)]

    async def _all(self, devices: Sequence[str], adapters: list[dict[str, str]]) -> list[_Process | BaseException]:
        made = [asyncio.ensure_future(self._one(device, adapters)) for device in devices]
        return await asyncio.gather(*made, return_exceptions=True)

    async def _one(self, device: str, adapters: list[dict[str, str]]) -> _Process:
        ours, theirs = socket.socketpair()
        os.set_inheritable(theirs.fileno(), True)
        code = _PROGRAM.format(path=sys.path, descriptor=theirs.fileno())
        # In a group of its own: Ctrl-C is for the doors, which let it finish first.
        process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, process_group=0
        )
        theirs.close()
        first: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

        def heard(message: dict[str, Any], arrays: list[np.ndarray]) -> None:
            if "warned" in message:
                LOG.warning(message["warned"], extra={"said": {"device": device}})
            elif first.done():
                self._answered(found, message, arrays)
            else:
                first.set_result(message)

        found = _Process(device, process, await linked(ours, heard))
        found.link.send(self.settings.of_worker(device, adapters))
        await asyncio.wait((first, found.link.closed), return_when=asyncio.FIRST_COMPLETED)
        if first.done():
            message = first.result()
        else:
            message = {"broken": f"the worker of {device} ended with status {await self._reaped(found)}"}
        if "broken" in message:
            await self._let_go(found)
            raise WorkersError(f"serve: {message['broken']}", device=device)
        found.info, found.rate = message, float(message["rate"])
        self._every.add(found)
        found.listening = asyncio.ensure_future(self._listen(found))
        LOG.info("worker ready", extra={"said": {"device": message["device"], "pid": message["pid"]}})
        return found

    # ---- asking ------------------------------------------------------------------------------------

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
        """Return a worker's answer; cancelled, the request leaves its batch.

        Args:
            task: of `flodl_hf.serving.tasks`.
            model: its name.
            items: what is asked of.
            options: of the task.
            key: whose request it is.
            until: when its time is over, by ``time.monotonic``.
            weight: about how many tokens it has.
            priority: 1 goes before others of its key, -1 behind them.
            traced: whether to say what is done when.

        Raises:
            TaskError: it was refused, was too late, or its worker ended.
        """
        process = self._least() or await self._free(until)
        loop = asyncio.get_running_loop()
        number = next(self._numbers)
        asked = process.asked[number] = _Asked(loop.create_future(), until + GRACE_S)
        process.load += weight
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
            process.link.send(message)
            if process.link.full:
                async with asyncio.timeout(max(0.0, left)):
                    await process.link.room()
            return await asked.answer
        except (TimeoutError, OSError) as fault:
            late = isinstance(fault, TimeoutError)
            raise TaskError(_LATE if late else _ENDED, kind="deadline" if late else "ended") from None
        finally:
            process.load -= weight
            del process.asked[number]
            if asked.open:
                with contextlib.suppress(OSError):
                    process.link.send({"cancel": number})

    def _least(self) -> _Process | None:
        """Return the worker that has least to do."""
        here = self._here
        return min(here, key=_load) if len(here) > 1 else here[0] if here else None

    async def _free(self, until: float) -> _Process:
        """Return a worker as soon as there is one."""
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                await self._ready.wait()
        except TimeoutError:
            raise TaskError(_LATE, kind="deadline") from None
        if (process := self._least()) is None:
            raise TaskError(_ENDED, kind="ended")
        return process

    def _look(self) -> None:
        """Give up what a silent worker was asked too long ago; one timer does for all requests."""
        now = time.monotonic()
        every = [asked for process in self._every for asked in process.asked.values()]
        for asked in every:
            if now > asked.until and not asked.answer.done():
                asked.answer.set_exception(TaskError(_LATE, kind="deadline"))
        self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look) if every else None

    async def _listen(self, process: _Process) -> None:
        await process.link.closed
        await self._ended(process)

    def _answered(self, process: _Process, message: dict[str, Any], arrays: list[np.ndarray]) -> None:
        process.rate = message["rate"]
        self._heard(message["ran"], message["queued"])
        self._deaths = 0
        asked = process.asked.get(message["id"])
        if asked is None:
            return
        if (fault := message.get("fault")) is not None:
            asked.done(TaskError(fault["message"], kind=fault["kind"]))
            return
        asked.done(
            Answer(
                message["data"], arrays, message["tokens"], message["rows"], message["dropped"], message["waited_s"],
                message["took_s"], message.get("timeline", ()),
            )
        )  # fmt: skip

    # ---- ends --------------------------------------------------------------------------------------

    async def _ended(self, process: _Process) -> None:
        """Fail what a worker was asked, and start another in its place."""
        for asked in process.asked.values():
            asked.done(TaskError(_ENDED, kind="ended"))
        self._every.discard(process)
        process.link.close()
        expected = process.leaving or self._closing or process not in self._here
        if not expected:
            # At once: who asks now waits for another.
            self._here.remove(process)
            if not self._here:
                self._ready.clear()
        status = await self._reaped(process)
        if expected:
            return
        LOG.error("worker ended", extra={"said": {"device": process.device, "status": status}})
        while not self._closing:
            self._deaths += 1
            if self._deaths > TRIES:
                LOG.error("worker given up", extra={"said": {"device": process.device}})
                return
            try:
                again = await self._one(process.device, self._adapters)
            except WorkersError as fault:
                LOG.error("worker not started", extra={"said": {"device": process.device, "fault": str(fault)}})
                await asyncio.sleep(min(30.0, 2.0**self._deaths))
                continue
            self.restarts += 1
            self._here.append(again)
            self._ready.set()
            return

    async def reload(self) -> None:
        """Load all models anew, let the new workers take over, and let the old ones finish what they were asked.

        Raises:
            WorkersError: a model cannot be loaded any more; the old workers go on.
            ConfigError: likewise of a directory of adapters.
        """
        before, self._here = self._here, await self._started()
        self._ready.set()
        for process in before:
            task = asyncio.ensure_future(self._let_go(process))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Let all workers finish what they were asked, and end."""
        self._closing = True
        self._ready.clear()
        here, self._here = self._here, []
        await asyncio.gather(*(self._let_go(process) for process in here), *self._tasks)

    async def _let_go(self, process: _Process) -> None:
        process.leaving = True
        until = time.monotonic() + self.settings.drain_s
        while process.asked and time.monotonic() < until:
            await asyncio.sleep(0.02)
        process.link.close()
        await self._reaped(process)
        if process.listening is not None:
            await process.listening

    async def _reaped(self, process: _Process) -> int:
        """Return a process's status; it ends by itself when its socket is closed, and is made to after a while."""
        for wait in range(500):
            if (status := process.process.poll()) is not None:
                return status
            if wait == 400:
                process.process.kill()
            await asyncio.sleep(0.02)
        return process.process.wait(1)


_LATE = "the answer was not there in time; ask for less at once, or allow more time"
_ENDED = "the process that computed the answer ended; ask again, another one takes its place"


def _load(process: _Process) -> int:
    return process.load

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
from flodl_hf.serving.frames import HEAD, packed, unpacked
from flodl_hf.serving.settings import Settings

__all__ = ["Answer", "TaskError", "Workers", "WorkersError"]

LOG = logging.getLogger("flodl_hf.serving")
# After so many deaths without an answer between them a worker is not started again.
TRIES = 5
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
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    asked: dict[int, asyncio.Future[Answer]] = field(default_factory=dict)
    weights: dict[int, int] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    rate: float = 0.0
    leaving: bool = False
    listening: asyncio.Task[None] | None = None

    @property
    def load(self) -> int:
        return sum(self.weights.values())


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
        reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 22)
        found = _Process(device, process, reader, writer)
        writer.writelines(packed(self.settings.of_worker(device, adapters)))
        message: dict[str, Any]
        try:
            while "warned" in (message := (await _read(reader))[0]):
                _warn(found, message)
        except (EOFError, OSError):
            message = {"broken": f"the worker of {device} ended with status {await self._reaped(found)}"}
        if "broken" in message:
            await self._let_go(found)
            raise WorkersError(f"serve: {message['broken']}", device=device)
        found.info, found.rate = message, float(message["rate"])
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
        process = await self._free(until)
        number = next(self._numbers)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        process.asked[number] = future
        process.weights[number] = weight
        left = until - time.monotonic()
        try:
            process.writer.writelines(
                packed(
                    {"id": number, "task": task, "model": model, "items": items, "options": options, "key": key,
                     "left_s": left, "priority": priority, **({"traced": True} if traced else {})}
                )
            )  # fmt: skip
            await process.writer.drain()
            # The worker says itself that it is late; this is for one that says nothing.
            async with asyncio.timeout(max(0.0, left) + 1.0):
                return await future
        except TaskError:
            raise
        except (TimeoutError, OSError, RuntimeError) as fault:
            # A loop says by RuntimeError that a transport is closed.
            late = isinstance(fault, TimeoutError)
            raise TaskError(_LATE if late else _ENDED, kind="deadline" if late else "ended") from None
        finally:
            process.weights.pop(number, None)
            if process.asked.pop(number, None) is not None and not (future.done() and not future.cancelled()):
                with contextlib.suppress(OSError, RuntimeError):
                    process.writer.writelines(packed({"cancel": number}))

    async def _free(self, until: float) -> _Process:
        if not self._here:
            try:
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    await self._ready.wait()
            except TimeoutError:
                raise TaskError(_LATE, kind="deadline") from None
        if not self._here:
            raise TaskError(_ENDED, kind="ended")
        return min(self._here, key=lambda process: process.load)

    async def _listen(self, process: _Process) -> None:
        with contextlib.suppress(EOFError, OSError, asyncio.IncompleteReadError):
            while True:
                message, arrays = await _read(process.reader)
                if "warned" in message:
                    _warn(process, message)
                    continue
                process.rate = message["rate"]
                self._heard(message["ran"], message["queued"])
                self._deaths = 0
                future = process.asked.get(message["id"])
                if future is None or future.done():
                    continue
                if "fault" in message:
                    fault = message["fault"]
                    future.set_exception(TaskError(fault["message"], kind=fault["kind"]))
                    continue
                names = ("tokens", "rows", "dropped", "waited_s", "took_s")
                said = {name: message[name] for name in names}
                future.set_result(Answer(message["data"], arrays, **said, timeline=message.get("timeline", ())))
        await self._ended(process)

    # ---- ends --------------------------------------------------------------------------------------

    async def _ended(self, process: _Process) -> None:
        """Fail what a worker was asked, and start another in its place."""
        for future in process.asked.values():
            if not future.done():
                future.set_exception(TaskError(_ENDED, kind="ended"))
        process.writer.close()
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
        process.writer.close()
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


def _warn(process: _Process, message: dict[str, Any]) -> None:
    LOG.warning(message["warned"], extra={"said": {"device": process.device}})


async def _read(reader: asyncio.StreamReader) -> tuple[dict[str, Any], list[np.ndarray]]:
    try:
        size, text = HEAD.unpack(await reader.readexactly(HEAD.size))
        body = await reader.readexactly(size)
    except asyncio.IncompleteReadError:
        raise EOFError from None
    return unpacked(text, body)

"""The workers as who asks them sees them: requests out, answers in, and what becomes of requests whose worker ends.

Everything here runs in the event loop of the doors and waits for nothing but it. A request belongs to one worker; if
that one ends, the request fails and says so, and the next is held until a worker is there again. Which workers there
are is told by who holds their processes (`flodl_hf.serving.processes`), here or in another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from flodl.errors import FlodlError
from flodl_hf.serving.link import Link
from flodl_hf.serving.settings import Settings

__all__ = ["Answer", "TaskError", "Worker", "Workers"]

# A worker says itself that a request is late. One that says nothing has so much longer, and is looked at this often.
GRACE_S, LOOK_S = 1.0, 0.5


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
        truncated: texts that they were cut off.
        waited_s: how long the first row waited for its batch.
        took_s: all of it, in the worker.
        timeline: what it did when, where that was asked for.
    """

    data: Any
    arrays: list[np.ndarray]
    tokens: int
    rows: int
    dropped: int
    truncated: int
    waited_s: float
    took_s: float
    timeline: Sequence[Any] = ()


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


@dataclass(eq=False)
class Worker:
    """One worker that can be asked.

    Attributes:
        link: the way to it.
        info: what it said when it was warm.
        rate: tokens a second that it runs when there is enough to run.
        load: tokens of what it was asked, about.
        asked: what it was asked.
    """

    link: Link
    info: dict[str, Any] = field(default_factory=dict)
    rate: float = 0.0
    load: int = 0
    asked: dict[int, _Asked] = field(default_factory=dict)


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
        """Workers that ended and were replaced."""
        self.answers = 0
        """Answers that came."""
        self._heard = heard
        self._here: list[Worker] = []
        self._ready = asyncio.Event()
        # Those too that only finish what they were asked.
        self._every: set[Worker] = set()
        self._looking: asyncio.TimerHandle | None = None
        self._numbers = count()

    @property
    def ready(self) -> bool:
        """Whether a worker is there and warm."""
        return self._ready.is_set()

    @property
    def pids(self) -> list[int]:
        """The processes that answer now."""
        return [worker.info["pid"] for worker in self._here]

    @property
    def devices(self) -> list[str]:
        """The device of each."""
        return [worker.info["device"] for worker in self._here]

    @property
    def rate(self) -> float:
        """Tokens a second that those run, together, when there is enough to run."""
        return sum(worker.rate for worker in self._here)

    @property
    def peak(self) -> float:
        """Operations a second that the devices of those reach, together; see `flodl_hf.serving.peak`."""
        peaks: dict[str, float] = {}
        for worker in self._here:
            device = worker.info["device"]
            peaks[device] = max(peaks.get(device, 0.0), worker.info["peak"])
        return sum(peaks.values())

    # ---- which there are ---------------------------------------------------------------------------

    def use(self, here: Sequence[Worker], restarts: int) -> None:
        """Ask these from now on, and no others; what others were asked they may finish.

        Args:
            here: all that are warm.
            restarts: how many ended so far and were replaced.
        """
        self._here, self.restarts = list(here), restarts
        self._every |= {*here}
        if not here:
            self._ready.clear()
            return
        self.models = here[-1].info["ready"]
        self.max_batch_tokens = here[-1].info["max_batch_tokens"]
        self._ready.set()

    def ended(self, worker: Worker) -> None:
        """Fail what a worker was asked, which is no more."""
        for asked in worker.asked.values():
            asked.done(TaskError(_ENDED, kind="ended"))
        self._every.discard(worker)
        if worker in self._here:
            # At once: who asks now waits for another.
            self._here.remove(worker)
            if not self._here:
                self._ready.clear()

    async def left(self, worker: Worker) -> None:
        """Return when nobody waits for what a worker was asked, or that took too long."""
        until = time.monotonic() + self.settings.drain_s
        while worker.asked and time.monotonic() < until:
            await asyncio.sleep(0.02)

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
        as_text: str | None = None,
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
            as_text: the form, JSON or MessagePack, in which it writes its data, which is then the one array of the
                answer.

        Raises:
            TaskError: it was refused, was too late, or its worker ended.
        """
        worker = self._least() or await self._free(until)
        loop = asyncio.get_running_loop()
        number = next(self._numbers)
        asked = worker.asked[number] = _Asked(loop.create_future(), until + GRACE_S)
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
        if as_text is not None:
            message["as_text"] = as_text
        try:
            worker.link.send(message)
            if worker.link.full:
                async with asyncio.timeout(max(0.0, left)):
                    await worker.link.room()
            return await asked.answer
        except (TimeoutError, OSError) as fault:
            late = isinstance(fault, TimeoutError)
            raise TaskError(_LATE if late else _ENDED, kind="deadline" if late else "ended") from None
        finally:
            worker.load -= weight
            del worker.asked[number]
            if asked.open:
                with contextlib.suppress(OSError):
                    worker.link.send({"cancel": number})

    def _least(self) -> Worker | None:
        """Return the worker that has least to do."""
        here = self._here
        return min(here, key=_load) if len(here) > 1 else here[0] if here else None

    async def _free(self, until: float) -> Worker:
        """Return a worker as soon as there is one."""
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                await self._ready.wait()
        except TimeoutError:
            raise TaskError(_LATE, kind="deadline") from None
        if (worker := self._least()) is None:
            raise TaskError(_ENDED, kind="ended")
        return worker

    def _look(self) -> None:
        """Give up what a silent worker was asked too long ago; one timer does for all requests."""
        now = time.monotonic()
        every = [asked for worker in self._every for asked in worker.asked.values()]
        for asked in every:
            if now > asked.until and not asked.answer.done():
                asked.answer.set_exception(TaskError(_LATE, kind="deadline"))
        self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look) if every else None

    def answered(self, worker: Worker, message: dict[str, Any], arrays: list[np.ndarray]) -> None:
        """Take an answer of a worker.

        Args:
            worker: whose.
            message: what it says.
            arrays: of the answer.
        """
        worker.rate = message["rate"]
        self._heard(message["ran"], message["queued"])
        self.answers += 1
        asked = worker.asked.get(message["id"])
        if asked is None:
            return
        if (fault := message.get("fault")) is not None:
            asked.done(TaskError(fault["message"], kind=fault["kind"]))
            return
        asked.done(
            Answer(
                message["data"], arrays, message["tokens"], message["rows"], message["dropped"], message["truncated"],
                message["waited_s"],
                message["took_s"], message.get("timeline", ()),
            )
        )  # fmt: skip


_LATE = "the answer was not there in time; ask for less at once, or allow more time"
_ENDED = "the process that computed the answer ended; ask again, another one takes its place"


def _load(worker: Worker) -> int:
    return worker.load

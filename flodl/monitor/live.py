"""Runs that are looked on: their records together, and the run of this process, whose events arrive here.

`Runs` holds records and tells readers of every change. `LiveRun` takes events in without keeping the training
waiting: they are put in a queue, and a thread of the monitor makes of them what is told, written and sent.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from flodl.monitor.journal import MARK, RECORD, Journal
from flodl.monitor.record import RunRecord, as_text
from flodl.monitor.recorder import Recorder
from flodl.monitor.resources import Resources, hardware
from flodl.monitor.series import MOST_POINTS
from flodl.monitor.server import Ring

__all__ = ["Begin", "LiveRun", "Runs"]

MOST_WAITING = 200_000
"""Events that may wait for the monitor's thread; of more, the oldest are lost and counted."""
WHOLE_POINTS = 40_000
"""Points of all curves of all runs together in what a page begins with."""


class Runs:
    """Records by id, and the messages to readers.

    Args:
        kind: ``"live"`` for this process's runs, ``"folder"`` for those of a folder.
    """

    def __init__(self, kind: str = "live") -> None:
        self.kind = kind
        self.control = False
        self.records: dict[str, RunRecord] = {}
        self.ring = Ring(self.everything)
        self.on_news: Callable[[], Any] = lambda: None

    def add(self, record: RunRecord) -> None:
        """Take in a record that readers are told of by its next delta."""
        with self.ring.lock:
            self.records[record.id] = record

    def fold(self, record: RunRecord, delta: Mapping[str, Any]) -> str:
        """Take in a delta of a record, tell readers, and return the delta as JSON."""
        text = as_text(delta)
        with self.ring.lock:
            record.fold(delta)
            self.ring.add('{"run":' + as_text(record.id) + "," + text[1:])
        self.on_news()
        return text

    def everything(self) -> Iterator[str]:
        """Yield what a page begins with, in pieces."""
        curves = sum(len(record.series) for record in self.records.values())
        most = max(60, min(MOST_POINTS, WHOLE_POINTS // max(1, curves)))
        yield f'{{"kind":"{self.kind}","control":{"true" if self.control else "false"},"now":{time.time():.3f},"runs":['
        for place, record in enumerate(list(self.records.values())):
            yield "," if place else ""
            yield from record.snapshot_parts(most)
        yield "]}"


class Begin(NamedTuple):
    """A run begins that tells no events; ``goes_on`` is whether it has a record already."""

    goes_on: bool


class LiveRun:
    """The run of this process.

    Args:
        runs: where its record is shown.
        name: what people call it.
        folder: where its record is kept; None for nowhere.
        recorder: options of `Recorder`: ``tokens``, ``flops``, ``peak``, ``total_steps``.
        resources_s: seconds between two looks at the machine; 0 for none.

    Attributes:
        record: as it is now.
        faults: what went wrong with the file, told once.
    """

    def __init__(
        self,
        runs: Runs,
        name: str,
        folder: str | os.PathLike[str] | None = None,
        *,
        recorder: Mapping[str, Any] | None = None,
        resources_s: float = 1.0,
    ) -> None:
        self.runs, self.folder, self.resources_s = runs, folder, resources_s
        began = time.time()
        self.record = RunRecord(_id_of(name, began), name)
        self.record.began = began
        self.recorder = Recorder(began, **(recorder or {}))
        self.journal: Journal | None = None
        self.is_over = False
        self._options = dict(recorder or {})
        self._waiting: deque[Any] = deque(maxlen=MOST_WAITING)
        self._lost = self._taken = 0
        self._resources: Resources | None = None
        self._looked = 0.0
        self._shown = False

    # ---- from any thread -----------------------------------------------------------------------------

    def put(self, event: Any) -> None:
        """Take in an event; costs the caller next to nothing."""
        self._waiting.append(event)
        self._taken += 1

    def reckon(self, options: Mapping[str, Any]) -> None:
        """Have speeds reckoned by these options of `Recorder`; before the run begins."""
        self._options = dict(options)
        self.put(lambda recorder: recorder.reckon(**options))

    # ---- from the monitor's thread -------------------------------------------------------------------

    def pump(self) -> None:
        """Make of what came since the last call what is told, written and sent."""
        for event in self._all_waiting():
            if isinstance(event, Begin):
                self._open(event.goes_on)
                continue
            if callable(event):
                event(self.recorder)
                continue
            if type(event).__name__ == "RunStarted":
                self._open(event.resumed_from is not None or event.step > 0)
            self.recorder.take(event)
            if type(event).__name__ in ("RunDone", "RunFailed"):
                self.is_over = type(event).__name__ == "RunDone" or not event.restarts
        self._look_at_machine()
        self._tell(self.recorder.delta())

    def _all_waiting(self) -> Iterator[Any]:
        waiting = self._waiting
        count = len(waiting)
        lost = self._taken - count
        self._taken -= count
        if lost > 0:
            self._taken -= lost
            self._lost += lost
            self.recorder.note(f"{lost:,} events came faster than they could be kept", "warning")
        for _ in range(count):
            yield waiting.popleft()

    def _look_at_machine(self) -> None:
        now = time.monotonic()
        if not self.resources_s or self.is_over or now - self._looked < self.resources_s or not self._shown:
            return
        self._looked = now
        if self._resources is None:
            self._resources = Resources()
            self.recorder.say(facts={"hardware": hardware()})
            return
        self.recorder.figures(self._resources.read(), self.recorder.step)

    def _open(self, goes_on: bool) -> None:
        """Open the record on disk when the run begins: a run that goes on has its own before it."""
        if self.folder is None or self.journal is not None:
            return
        try:
            if not goes_on:
                _put_aside(self.folder)
            self.journal = Journal(self.folder)
        except Exception as fault:  # a monitor must not end a run
            self.folder = None
            self.recorder.note(f"no record is kept on disk: {fault}", "warning")
            return
        before = self.journal.record
        if before is None and self._shown:  # what was told before the file was opened
            self._write({**MARK, **self.record.snapshot()})
        if before is not None:
            before.id, before.name = before.id or self.record.id, self.record.name or before.name
            waiting = self.recorder.delta()
            shift = self.recorder.began - before.began
            self.recorder = Recorder(before.began, **self._options)
            self.recorder.is_new = False
            with self.runs.ring.lock:
                self.runs.records.pop(self.record.id, None)
            self.record, self._shown = before, False
            if waiting is not None:
                self.recorder.say(**{k: v for k, v in waiting.items() if k in ("facts", "model")})
                for line in waiting.get("log", ()):
                    self.recorder.note(line[3], line[2], step=line[1], at=line[0] + shift)

    def _tell(self, delta: dict[str, Any] | None) -> None:
        if delta is None:
            return
        if not self._shown:
            self._shown = True
            self.runs.add(self.record)
            head = {"id": self.record.id, "name": self.record.name, "began": self.record.began}
            delta = {**MARK, **head, **delta}
        text = self.runs.fold(self.record, delta)
        self._write(delta, text)

    def _write(self, delta: Mapping[str, Any], text: str | None = None) -> None:
        if self.journal is None:
            return
        try:
            self.journal.add(delta, text)
        except OSError as fault:
            with contextlib.suppress(OSError):
                self.journal.close()
            self.journal, self.folder = None, None
            self.recorder.note(f"the record on disk ends here: {fault}", "warning")

    def close(self) -> None:
        """Be done: write what is left and let go of files."""
        self.pump()
        self.is_over = True
        if self._resources is not None:
            self._resources.close()
            self._resources = None
        if self.journal is not None:
            self.journal.close()
            self.journal = None


def _id_of(name: str, began: float) -> str:
    plain = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:40] or "run"
    return f"{plain}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(began))}-{secrets.token_hex(2)}"


def _put_aside(folder: str | os.PathLike[str]) -> None:
    """Give the record of an earlier run another name, so that nothing is lost."""
    path = os.path.join(folder, RECORD)
    if os.path.isfile(path):
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(os.path.getmtime(path)))
        stem, ending = os.path.splitext(RECORD)
        os.replace(path, os.path.join(folder, f"{stem}-{stamp}-{secrets.token_hex(2)}{ending}"))

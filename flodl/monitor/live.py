"""The run of this process: events wait in a queue, and the monitor's thread records, writes and sends them."""

from __future__ import annotations

import re
import secrets
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from flodl.monitor.journal import FIRST_LINE, Journal
from flodl.monitor.record import RunRecord
from flodl.monitor.recorder import Recorder, Throughput
from flodl.monitor.resources import Resources, hardware

MAX_WAITING = 200_000
"""Events in the queue; the oldest are dropped."""


class LiveRun:
    """The run of this process.

    Args:
        monitor: the `flodl.monitor.Monitor`; its store contains the record from the first event; its ``name``,
            ``folder`` and ``throughput`` are read when the run begins.

    Attributes:
        record: the record.
        is_over: whether the run has ended.
        usage: newest reading of the machine.
    """

    def __init__(self, monitor: Any) -> None:
        began, name = time.time(), monitor.name
        plain = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:40] or "run"
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(began))
        self.record = RunRecord(f"{plain}-{stamp}-{secrets.token_hex(2)}", name, began)
        self.recorder = Recorder(began)
        self.is_over = False
        self.usage: dict[str, float] = {}
        self._monitor = monitor
        self._journal: Journal | None = None
        self._is_open, self._is_stored = False, False
        self._queue: deque[Any] = deque(maxlen=MAX_WAITING)
        self._resources: Resources | None = None
        self._read_at = 0.0

    def put(self, item: Any) -> None:
        """Add an event, or a function that is called with this run; from any thread."""
        self._queue.append(item)

    def update(self, **parts: Any) -> None:
        """Add parts of a delta; from any thread."""
        self.put(lambda run: run.recorder.update(**parts))

    # ---- called by the monitor, which has acquired its lock ------------------------------------------------------

    def pump(self) -> None:
        """Process the queue: record, write and send."""
        for _ in range(len(self._queue)):
            item: Any = self._queue.popleft()
            kind = type(item).__name__
            if kind == "RunStarted":
                self.open(is_resumed=item.resumed_from is not None or item.step > 0)
            if callable(item):
                item(self)
            else:
                self.recorder.take(item)
            if kind in ("RunDone", "RunFailed"):
                self.is_over = kind == "RunDone" or not getattr(item, "restarts", 0)
        if self._is_stored and not self.is_over:
            self.read_machine()
        self._store(self.recorder.delta())

    def read_machine(self) -> None:
        """Record the state of the machine, unless it was read a short time ago."""
        now, every_s = time.monotonic(), self._monitor.resources_s
        if not every_s or now - self._read_at < every_s:
            return
        self._read_at = now
        if self._resources is None:
            self._resources = Resources()
            self.recorder.update(facts={"hardware": hardware()})
        self.usage = self._resources.read()
        self.recorder.points("", self.usage, self.recorder.step)

    def open(self, is_resumed: bool) -> None:
        """Begin the run, and its record on disk; a resumed run continues its earlier record."""
        if self._is_open:
            return
        self._is_open, folder = True, self._monitor.folder
        self.recorder.throughput = Throughput(**self._monitor.throughput)
        self.recorder.update(name=self._monitor.name)
        self._store(self.recorder.delta())
        if folder is None:
            return
        try:
            self._journal = Journal(folder, is_new=not is_resumed)
        except Exception as fault:  # a monitor must not end a run
            self.recorder.note(f"no record is written to disk: {fault}", "warning")
            return
        before, fresh = self._journal.record, self.record
        if before is None:
            self._write({**FIRST_LINE, **fresh.snapshot()})
            return
        # Later deltas are relative to the beginning of the earlier record.
        self._monitor.store.records.pop(fresh.id)
        before.id = before.id or fresh.id
        self.record, self._is_stored = before, False
        self.recorder = Recorder(before.began, **self._monitor.throughput)
        known = fresh.snapshot()
        self.recorder.update(**{key: known[key] for key in ("name", "facts", "state", "model", "picture")})
        for _, step, level, text in fresh.log:
            self.recorder.note(text, level, step=step)

    def _store(self, delta: dict[str, Any] | None) -> None:
        if delta is not None:
            store, record = self._monitor.store, self.record
            if not self._is_stored:
                self._is_stored = True
                store.add(record)
                delta = {**FIRST_LINE, "id": record.id, "name": record.name, "began": record.began, **delta}
            self._write(delta, store.fold(record, delta))

    def _write(self, delta: Mapping[str, Any], text: str | None = None) -> None:
        if self._journal is not None:
            try:
                self._journal.add(delta, text)
            except OSError as fault:
                self._journal = None
                self.recorder.note(f"the record on disk ends here: {fault}", "warning")

    def close(self) -> None:
        """Process the queue and close files."""
        self.pump()
        self.is_over = True
        if self._journal is not None:
            self._journal.close()
            self._journal = None

"""The run of this process, and records on disk.

The events of a run wait in a queue; the monitor's thread records, writes and sends them. A record on disk is a file of
deltas, one on each line, that is only appended to. A line that was cut off when a process ended is ignored, so a record
remains readable whatever happened to its run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flodl.errors import TrainError, printable
from flodl.files import open_regular
from flodl.monitor.record import RunRecord, as_text
from flodl.monitor.recorder import Recorder, Throughput
from flodl.monitor.resources import Resources, hardware

RECORD_FILE = "run.jsonl"
FIRST_LINE = {"flodl_run": 1}
"""Part of the first line of each session."""
MAX_LINE = 64 << 20
MAX_WAITING = 200_000
"""Events in the queue; the oldest are dropped."""


class Journal:
    """Appends to the record in ``folder``, which is created if needed.

    Args:
        folder: folder of the run.
        is_new: start a new file; an earlier one is renamed.

    Attributes:
        path: the file.
        record: contents of the file before this session, or None.

    Raises:
        OSError: the folder is not writable.
        TrainError: the existing file is not a record.
    """

    def __init__(self, folder: str | os.PathLike[str], *, is_new: bool = False) -> None:
        self.path = Path(folder) / RECORD_FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if is_new and self.path.is_file():
            stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(self.path.stat().st_mtime))
            self.path.replace(self.path.with_stem(f"{self.path.stem}-{stamp}-{secrets.token_hex(2)}"))
        self.record = read_record(self.path) if self.path.is_file() else None
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - closed by `close`
        weakref.finalize(self, self._file.close)
        if self.record is not None:
            self._file.write(b"\n")  # ends a line that was cut off

    def add(self, delta: Mapping[str, Any], text: str | None = None) -> None:
        """Append a delta; ``text`` is its JSON if known. Does nothing after `close`.

        Raises:
            OSError: the file cannot be written.
        """
        if not self._file.closed:
            self._file.write((as_text(delta) if text is None else text).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class JournalReader:
    """Reads a record as it grows.

    Attributes:
        path: the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._is_record = False
        self._place = 0
        self._rest = b""

    def new_deltas(self) -> Iterator[dict[str, Any]]:
        """Yield the deltas that were added since the last call.

        Raises:
            CheckpointError: the file cannot be opened.
            TrainError: the first line does not mark a record.
        """
        with os.fdopen(open_regular(self.path), "rb") as file:
            if os.fstat(file.fileno()).st_size < self._place:  # another file of this name
                self._place, self._rest, self._is_record = 0, b"", False
            file.seek(self._place)
            while piece := file.read(1 << 20):
                self._place += len(piece)
                *lines, self._rest = (self._rest + piece).split(b"\n")
                self._rest = self._rest if len(self._rest) <= MAX_LINE else b""
                for line in filter(bytes.strip, lines):
                    delta: Any = None
                    with contextlib.suppress(ValueError, RecursionError):
                        delta = json.loads(line)
                    if not self._is_record and not (isinstance(delta, dict) and "flodl_run" in delta):
                        raise _not_a_record(self.path)
                    self._is_record = True
                    if isinstance(delta, dict):
                        yield delta


def read_record(path: str | os.PathLike[str]) -> RunRecord:
    """Return the record in a file, or in ``run.jsonl`` of a folder.

    Raises:
        CheckpointError: the file does not exist.
        TrainError: the file is not a record.
    """
    path = Path(path)
    path = path / RECORD_FILE if path.is_dir() else path
    record, is_empty = RunRecord(), True
    for delta in JournalReader(path).new_deltas():
        record.fold(delta)
        is_empty = False
    if is_empty:
        raise _not_a_record(path)
    return record


def _not_a_record(path: Path) -> TrainError:
    return TrainError(
        f'{printable(str(path), 400)}: not a record of a run, expected lines of JSON, the first with "flodl_run". '
        "Pass the folder of a run, or its run.jsonl.",
        path=str(path),
    )


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

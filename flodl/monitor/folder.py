"""A folder of runs, shown side by side: records on disk, read as they grow.

Which files are read is found out here, at the beginning and again every few seconds; no request names a file.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from flodl.errors import CheckpointError, TrainError, printable
from flodl.monitor.access import Doors
from flodl.monitor.archive import archive_page
from flodl.monitor.journal import JournalReader
from flodl.monitor.live import Runs
from flodl.monitor.record import RunRecord

__all__ = ["RunFolder"]

DEEPEST = 4
MOST_RUNS = 200
LOOK_S = 5.0
SILENT_S = 60.0
"""Seconds without a word, after which a run that did not say how it ended is called silent."""


class RunFolder:
    """The records below a folder.

    Args:
        folder: searched for ``run*.jsonl``, four folders deep; links are not followed.
        every_s: seconds between two looks at the files.

    Attributes:
        runs: their records.
        problems: files that are no records, with what is wrong.

    Raises:
        TrainError: there is no such folder.
    """

    def __init__(self, folder: str | os.PathLike[str], *, every_s: float = 0.5) -> None:
        self.folder, self.every_s = Path(folder), every_s
        if not self.folder.is_dir():
            raise TrainError(
                f"runs: {printable(str(folder), 400)} is no folder; expected one with runs, each with its run.jsonl.",
                path=str(folder),
            )
        self.runs = Runs("folder")
        self.problems: dict[str, str] = {}
        self._readers: dict[Path, tuple[JournalReader, RunRecord]] = {}
        self._heard: dict[str, float] = {}
        self._looked = 0.0
        self._doors: Doors | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.look()

    def look(self) -> None:
        """Read what is new: in the files that are known, and every few seconds in new ones."""
        now = time.monotonic()
        if not self._looked or now - self._looked > LOOK_S:
            self._looked = now
            for path in _records(self.folder):
                if path not in self._readers and str(path) not in self.problems and len(self._readers) < MOST_RUNS:
                    self._readers[path] = (JournalReader(path), RunRecord())
        for path, (reader, record) in list(self._readers.items()):
            self._read(path, reader, record)

    def _read(self, path: Path, reader: JournalReader, record: RunRecord) -> None:
        try:
            for delta in reader.more():
                if reader.is_record:
                    self._fold(path, record, delta)
            if reader.is_record is False:
                raise TrainError("the first line does not say that this is the record of a run")
        except (CheckpointError, TrainError, OSError) as fault:
            del self._readers[path]
            self.problems[str(path)] = str(fault)
            return
        if record.id in self.runs.records and record.state.get("status") in ("running", "restarting", None):
            silent = time.time() - max(self._heard[record.id], 0.0) > SILENT_S
            if silent:
                self.runs.fold(record, {"state": {"status": "silent"}})

    def _fold(self, path: Path, record: RunRecord, delta: dict[str, Any]) -> None:
        if record.id not in self.runs.records:
            # Two copies of a folder hold the same run twice: a path tells them apart.
            record.id = f"{len(self.runs.records)}-{path.parent.name}"[:80]
            self.runs.add(record)
            delta = {**delta, "began": delta.get("began", 0.0)}
        named = {key: value for key, value in delta.items() if key != "id"}
        if record.state.get("status") == "silent" and "state" not in named:
            named["state"] = {"status": "running"}
        self.runs.fold(record, named)
        self._heard[record.id] = max(record.began + record.t, self._heard.get(record.id, 0.0))

    def page(self) -> str:
        """Return all runs as one file that opens offline."""
        with self.runs.ring.lock:
            return archive_page("".join(self.runs.everything()), str(self.folder))

    def serve(
        self, port: int | None = None, *, host: str = "127.0.0.1", token: str | None = None, names: Iterable[str] = ()
    ) -> str:
        """Show the runs at an address, going on with those that grow; see `flodl.monitor.Monitor.serve`."""
        self._doors = Doors(self.runs, host=host, port=port, token=token, names=names)
        self._thread = threading.Thread(target=self._go_on, name="flodl-runs", daemon=True)
        self._thread.start()
        return self._doors.url

    def wait(self, until: Callable[[], bool] = lambda: False) -> None:
        """Wait until ``until()`` or an interruption."""
        while not until() and not self._ended.wait(0.5):
            pass

    def close(self) -> None:
        """Read no more, and let go of the address."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
        if self._doors is not None:
            self._doors.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    def _go_on(self) -> None:
        while not self._ended.wait(self.every_s):
            self.look()


def _records(folder: Path) -> Iterator[Path]:
    """Yield the records below a folder, in order of their names."""
    top = len(folder.parts)
    for here, below, files in os.walk(folder):
        deeper = len(Path(here).parts) - top < DEEPEST
        below[:] = sorted(name for name in below if not name.startswith(".")) if deeper else []
        for name in sorted(files):
            path = Path(here) / name
            if name.startswith("run") and name.endswith(".jsonl") and not path.is_symlink():
                yield path

"""A folder of runs, shown side by side: records on disk, read as they grow.

Which files are read is decided here, at the start and every few seconds; no request names a file.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from flodl.errors import CheckpointError, TrainError, printable
from flodl.monitor.journal import JournalReader
from flodl.monitor.record import RunRecord
from flodl.monitor.server import PageServer
from flodl.monitor.store import RunStore

MAX_RUNS = 200
SEARCH_S = 5.0
"""Seconds between two searches for new files."""
SILENT_S = 60.0
"""Seconds without a new line, after which an unfinished run has the status ``silent``."""


class RunFolder:
    """The records below a folder.

    Args:
        folder: searched for ``run*.jsonl`` in all folders below; links are not followed.
        every_s: seconds between two readings of the files.

    Attributes:
        store: the records.
        problems: files that are not records, with the reason.

    Raises:
        TrainError: the folder does not exist.
    """

    def __init__(self, folder: str | os.PathLike[str], *, every_s: float = 0.5) -> None:
        self.folder, self.every_s = Path(folder), every_s
        if not self.folder.is_dir():
            raise TrainError(
                f"runs: {printable(str(folder), 400)} is not a folder, expected one of runs with run.jsonl files.",
                path=str(folder),
            )
        self.store = RunStore("folder")
        self.problems: dict[str, str] = {}
        self._readers: dict[Path, tuple[JournalReader, RunRecord]] = {}
        self._searched = -SEARCH_S
        self._server: PageServer | None = None
        self._closed = threading.Event()
        self.refresh()

    def refresh(self) -> None:
        """Read new lines of known files, and every few seconds search for new files."""
        if time.monotonic() - self._searched >= SEARCH_S:
            self._searched = time.monotonic()
            for path in sorted(self.folder.rglob("run*.jsonl"))[:MAX_RUNS]:
                if path not in self._readers and str(path) not in self.problems and not path.is_symlink():
                    self._readers[path] = (JournalReader(path), RunRecord())
        for path, (reader, record) in list(self._readers.items()):
            try:
                for delta in reader.new_deltas():
                    self._fold(path, record, delta)
            except (CheckpointError, TrainError, OSError) as fault:
                del self._readers[path]
                self.problems[str(path)] = str(fault)
                continue
            is_going = record.id and record.state.get("status") in ("running", "restarting", None)
            if is_going and time.time() - record.began - record.t > SILENT_S:
                self.store.fold(record, {"state": {"status": "silent"}})

    def _fold(self, path: Path, record: RunRecord, delta: dict[str, Any]) -> None:
        if not record.id:
            # Copies of a folder contain the same id.
            record.id = f"{len(self.store.records)}-{path.parent.name}"[:80]
            self.store.add(record)
        if record.state.get("status") == "silent":
            delta = {"state": {"status": "running"}, **delta}
        self.store.fold(record, {key: value for key, value in delta.items() if key != "id"})

    def page(self) -> str:
        """Return all runs as one file that opens offline."""
        return self.store.page(str(self.folder))

    def serve(self, port: int | None = None) -> str:
        """Serve the page on this machine, which `wait` keeps up to date; see `flodl.monitor.Monitor.serve`."""
        self._server = PageServer(self.store, port=port)
        return self._server.url

    def wait(self) -> None:
        """Update the page as runs grow, until `close` or an interruption."""
        while not self._closed.wait(self.every_s):
            self.refresh()

    def close(self) -> None:
        """Stop reading and serving."""
        self._closed.set()
        if self._server is not None:
            self._server.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

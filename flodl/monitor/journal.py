"""The record of a run on disk: a file of deltas, one on each line, that is only appended to.

A line that was cut off when a process ended is ignored, so a record remains readable whatever happened to its run.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flodl.errors import TrainError, printable
from flodl.files import open_regular
from flodl.monitor.record import RunRecord, as_text

RECORD_FILE = "run.jsonl"
FIRST_LINE = {"flodl_run": 1}
"""Part of the first line of each session."""
MAX_LINE = 64 << 20


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

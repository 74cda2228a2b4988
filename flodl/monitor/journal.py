"""The record of a run on disk: a file of deltas, one a line, that is only ever added to.

A line that was cut off by the end of a process is passed over, and the next one begins anew, so a record survives
whatever happened to its run. Nothing is executed and nothing else is opened.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flodl.errors import TrainError, printable
from flodl.files import open_regular
from flodl.monitor.record import RunRecord, as_text

__all__ = ["RECORD", "Journal", "JournalReader", "read_record"]

RECORD = "run.jsonl"
"""Name of the file in a run's folder."""
MARK = {"flodl_run": 1}
"""In the first line of each session."""
MOST_LINE = 64 << 20
PIECE = 1 << 20


class Journal:
    """Adds to the record in ``folder``, which is made if need be.

    Args:
        folder: of the run.
        anew: begin the record again instead of adding to one that is there.

    Attributes:
        path: of the file.
        record: what the file holds already; None where it begins now.

    Raises:
        OSError: the folder cannot be written.
        TrainError: the file there is no record.
    """

    def __init__(self, folder: str | os.PathLike[str], *, anew: bool = False) -> None:
        self.path = Path(folder) / RECORD
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.record = read_record(self.path) if self.path.is_file() and not anew else None
        mode = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if anew else 0)
        mode |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        self._descriptor = os.open(self.path, mode, 0o666)
        # A monitor that is dropped without being closed leaves nothing open and nothing unwritten.
        self._closing = weakref.finalize(self, os.close, self._descriptor)
        if os.fstat(self._descriptor).st_size:
            self._write(b"\n")  # ends a line that was cut off

    def add(self, delta: Mapping[str, Any], text: str | None = None) -> None:
        """Add a delta.

        Args:
            text: its JSON, where that is made already.

        Raises:
            OSError: the disk is full or gone.
        """
        if self._closing.alive:
            self._write((as_text(delta) if text is None else text).encode() + b"\n")

    def close(self) -> None:
        """Close the file; further deltas are passed over."""
        self._closing()

    def _write(self, line: bytes) -> None:
        rest = memoryview(line)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]


class JournalReader:
    """Reads a record as it grows.

    Args:
        path: of the file.

    Attributes:
        wrong: lines that were no delta.
        is_record: whether the first line says that this is a record; None before it was read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.wrong = 0
        self.is_record: bool | None = None
        self._place = 0
        self._rest = b""

    def more(self) -> Iterator[dict[str, Any]]:
        """Yield the deltas that were added since the last call.

        Raises:
            CheckpointError: the file cannot be opened.
        """
        descriptor = open_regular(self.path)
        with os.fdopen(descriptor, "rb") as file:
            if os.fstat(descriptor).st_size < self._place:  # written anew
                self._place, self._rest, self.is_record = 0, b"", None
            file.seek(self._place)
            while piece := file.read(PIECE):
                self._place += len(piece)
                *lines, self._rest = (self._rest + piece).split(b"\n")
                if len(self._rest) > MOST_LINE:
                    self._rest, self.wrong = b"", self.wrong + 1
                for line in lines:
                    delta = self._parsed(line)
                    if delta is not None:
                        yield delta

    def _parsed(self, line: bytes) -> dict[str, Any] | None:
        if not line.strip():
            return None
        try:
            delta = json.loads(line)
        except (ValueError, RecursionError):
            delta = None
        if self.is_record is None:
            self.is_record = isinstance(delta, dict) and "flodl_run" in delta
        if not isinstance(delta, dict):
            self.wrong += 1
            return None
        return delta


def read_record(path: str | os.PathLike[str]) -> RunRecord:
    """Return the record that a file holds, or the one in a run's folder.

    Raises:
        CheckpointError: there is no such file.
        TrainError: it is no record of a run.
    """
    path = Path(path)
    path = path / RECORD if path.is_dir() else path
    record, reader = RunRecord(), JournalReader(path)
    for delta in reader.more():
        record.fold(delta)
        if not reader.is_record:
            break
    if not reader.is_record:
        raise TrainError(
            f"{printable(str(path), 400)}: found no record of a run; expected lines of JSON, the first with "
            '"flodl_run". Give the run\'s folder, or its run.jsonl.',
            path=str(path),
        )
    return record

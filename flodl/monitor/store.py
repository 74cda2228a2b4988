"""The store of runs: one record for each run, from which open pages are kept up to date."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from flodl.monitor.record import RunRecord, as_text
from flodl.monitor.series import MAX_POINTS

MAX_WAITING = 400
"""Messages that wait for one page; a page that reads too slowly is disconnected, and reconnects by itself."""
MAX_TOTAL_POINTS = 40_000
"""Points of all curves together in the first message to a page."""


class RunStore:
    """Records by id; `lock` protects them.

    Args:
        kind: ``"live"`` for runs of this process, ``"folder"`` for runs read from files.

    Attributes:
        control: whether the page may send commands.
        records: records by id, in the order in which runs began.
    """

    def __init__(self, kind: str = "live") -> None:
        self.kind, self.control = kind, False
        self.records: dict[str, RunRecord] = {}
        self.lock = threading.RLock()
        self._readers: list[queue.Queue[bytes | None]] = []
        self._first: bytes | None = None

    def add(self, record: RunRecord) -> None:
        """Add a record, replacing one with the same id."""
        with self.lock:
            self.records[record.id] = record
            self._first = None

    def fold(self, record: RunRecord, delta: Mapping[str, Any]) -> str:
        """Add a delta to a record, send it to open pages, and return it as JSON."""
        text = as_text(delta)
        message = _message("delta", '{"run":' + as_text(record.id) + "," + text[1:])
        with self.lock:
            record.fold(delta)
            self._first = None
            for reader in list(self._readers):
                try:
                    reader.put_nowait(message)
                except queue.Full:
                    self._readers.remove(reader)
        return text

    @contextlib.contextmanager
    def reader(self) -> Iterator[queue.Queue[bytes | None]]:
        """Yield a queue of messages for one page, beginning with all runs; None is the last message."""
        messages: queue.Queue[bytes | None] = queue.Queue(MAX_WAITING)
        with self.lock:
            self._first = self._first or _message("all", self.to_json())
            messages.put(self._first)
            self._readers.append(messages)
        try:
            yield messages
        finally:
            with self.lock, contextlib.suppress(ValueError):
                self._readers.remove(messages)

    @property
    def num_readers(self) -> int:
        """Number of open pages."""
        return len(self._readers)

    def is_reading(self, messages: queue.Queue[bytes | None]) -> bool:
        """Return whether a page still receives messages."""
        return messages in self._readers

    def close(self) -> None:
        """End the queues of all pages after the messages they contain."""
        with self.lock:
            for reader in self._readers:
                with contextlib.suppress(queue.Full):
                    reader.put_nowait(None)

    def to_json(self) -> str:
        """Return all runs as the JSON text that a page begins with."""
        with self.lock:
            records = list(self.records.values())
            curves = sum(len(record.series) for record in records)
            most = max(60, min(MAX_POINTS, MAX_TOTAL_POINTS // max(1, curves)))
            head = as_text({"kind": self.kind, "control": self.control, "now": round(time.time(), 3)})
            return f'{head[:-1]},"runs":[{",".join(record.snapshot_text(most) for record in records)}]}}'


def _message(event: str, text: str) -> bytes:
    return f"event: {event}\ndata: {text}\n\n".encode()

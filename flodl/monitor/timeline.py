"""Activity of each rank over time, and the state of the machine meanwhile, as files and for subscribers."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from flodl.files import write_atomically
from flodl.monitor.export import csv_text
from flodl.monitor.record import MAX_BINS, Lanes, RunRecord, as_text
from flodl.monitor.store import RunStore

# Kinds of spans by event, and the field with their duration in milliseconds.
_EVENTS = {
    "StepDone": ("step", "compute_ms"),
    "Synced": ("sync", "sync_ms"),
    "EvalDone": ("evaluation", "wall_ms"),
    "Saved": ("save", "wall_ms"),
    "EpochMetrics": ("epoch", ""),
    "Decided": ("decision", ""),
}
_LANE_KINDS = {"step": "compute", "sync": "sync", "evaluation": "evaluation"}
_FIELDS = ("rank", "kind", "begin_ms", "end_ms", "step", "epoch", "wait_ms", "divergence")

Span = dict[str, Any]


class Timeline:
    """Spans of one rank, and samples of the machine; `merge` combines all ranks.

    A span is ``{"rank", "kind", "begin_ms", "end_ms", "step", "epoch"}``, with ``wait_ms`` and ``divergence`` for a
    ``sync``. A sample is ``{"rank", "at_ms"}`` and named values such as ``system/cpu`` (percent). Times are
    milliseconds of the monotonic clock; after `merge` since the first span.

    Args:
        rank: the rank.
        read: returns the values of a sample, such as `flodl.monitor.resources.Resources.read`; None for no samples.
        every_s: seconds between samples.
    """

    def __init__(
        self, rank: int = 0, read: Callable[[], Mapping[str, float]] | None = None, every_s: float = 0.5
    ) -> None:
        self.rank = rank
        self.spans: list[Span] = []
        self.samples: list[dict[str, Any]] = []
        self._read, self._every_s = read, every_s
        self._subscribers: list[Callable[[Span], Any]] = []
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start a thread that takes samples."""
        if self._read is not None:
            self._thread = threading.Thread(target=self._sample, name="flodl-timeline", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop taking samples."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _sample(self) -> None:
        while self._read is not None:
            try:
                values = {name: float(value) for name, value in self._read().items()}
            except Exception:
                return  # the run does not depend on samples
            self.samples.append({"rank": self.rank, "at_ms": time.monotonic() * 1e3, **values})
            if self._stopped.wait(self._every_s):
                return

    def subscribe(self, call: Callable[[Span], Any]) -> Callable[[], None]:
        """Call ``call(span)`` for each new span; return a function that ends the subscription."""
        self._subscribers.append(call)
        return lambda: self._subscribers.remove(call)

    def add(self, kind: str, begin_s: float, end_s: float | None = None, **fields: Any) -> None:
        """Add a span of any kind, in seconds of the monotonic clock; without an end a moment.

        Args:
            kind: such as ``step``, ``sync``, ``evaluation``, or a name of your own.
            begin_s: start.
            end_s: end.
            **fields: ``step``, ``epoch`` and further values of the span.
        """
        end_s = begin_s if end_s is None else end_s
        known = {"rank": self.rank, "kind": kind, "begin_ms": begin_s * 1e3, "end_ms": end_s * 1e3}
        span = {**known, "step": None, "epoch": None, **fields}
        self.spans.append(span)
        for call in tuple(self._subscribers):
            call(span)

    def note(self, event: Any) -> None:
        """Add the span of a training event; events without a duration are moments."""
        kind, duration = _EVENTS.get(type(event).__name__, ("", ""))
        if kind:
            length_s = getattr(event, duration) / 1e3 if duration else 0.0
            more = {"wait_ms": event.wait_ms, "divergence": event.divergence} if kind == "sync" else {}
            epoch = getattr(event, "epoch", None)
            self.add(kind, event.at_s - length_s, event.at_s, step=event.step, epoch=epoch, **more)

    def to_dict(self) -> dict[str, Any]:
        """Return spans and samples as JSON values."""
        return {"rank": self.rank, "spans": self.spans, "samples": self.samples}

    @classmethod
    def merge(cls, parts: Sequence[Mapping[str, Any]]) -> Timeline:
        """Return one timeline of all ranks from the results of `to_dict`."""
        merged = cls()
        spans, samples = ([dict(one) for part in parts for one in part.get(key, ())] for key in ("spans", "samples"))
        starts = [span["begin_ms"] for span in spans] or [sample["at_ms"] for sample in samples]
        start = min(starts, default=0.0)
        for entry in (*spans, *samples):
            entry.update({key: round(entry[key] - start, 3) for key in ("begin_ms", "end_ms", "at_ms") if key in entry})
        merged.spans = sorted(spans, key=lambda span: (span["begin_ms"], span["rank"]))
        merged.samples = sorted(samples, key=lambda sample: (sample["at_ms"], sample["rank"]))
        return merged

    def write(self, path: str | PathLike[str]) -> tuple[Path, ...]:
        """Write a merged timeline and return the paths of its files.

        ``<path>.json`` contains spans and samples, ``<path>.csv`` the spans; ``<path>.html`` is a page that opens
        offline.
        """
        base = Path(path)
        base.parent.mkdir(parents=True, exist_ok=True)
        contents = {
            ".json": as_text({"spans": self.spans, "samples": self.samples}).encode(),
            ".csv": csv_text([_FIELDS, *([span.get(key, "") for key in _FIELDS] for span in self.spans)]),
            ".html": self._page().encode(),
        }
        for suffix, content in contents.items():
            write_atomically(base.with_name(base.name + suffix), [content])
        return tuple(base.with_name(base.name + suffix) for suffix in contents)

    def _page(self) -> str:
        record, store = RunRecord("timeline", "Timeline"), RunStore("folder")
        store.add(record)
        total_s = max((span["end_ms"] for span in self.spans), default=0.0) / 1e3
        record.lanes = Lanes(max(total_s / MAX_BINS, 1e-4) * 1.01)
        for span in self.spans:
            lanes = {str(span["rank"]): {"spans": lane_spans(span)}}
            if span["kind"] == "sync" and span["rank"] == 0:
                lanes["all"] = {"meetings": [span["end_ms"] / 1e3]}
            is_line = span["kind"] not in _LANE_KINDS and span["rank"] == 0
            line = [span["begin_ms"] / 1e3, span["step"], "info", span["kind"]]
            record.fold({"lanes": lanes, "log": [line] * is_line})
        for sample in self.samples:
            t = max(0.0, sample["at_ms"] / 1e3)
            record.fold({"p": {name: [[0, 0, t, sample[name]]] for name in sample.keys() - {"rank", "at_ms"}}})
        record.fold({"t": total_s, "state": {"status": "finished"}})
        return store.page("Timeline")


def lane_spans(span: Span, after_s: float = -math.inf) -> list[tuple[str, float, float]]:
    """Return a span as ``(kind, begin, end)`` of a lane, in seconds, without the part before ``after_s``."""
    begin, end = max(span["begin_ms"] / 1e3, after_s), span["end_ms"] / 1e3
    if span["kind"] not in _LANE_KINDS or end <= begin:
        return []
    waited = min(end, begin + span.get("wait_ms", 0.0) / 1e3)
    return [("wait", begin, waited), (_LANE_KINDS[span["kind"]], waited, end)]

"""When each rank computed, averaged, evaluated and saved, the idle gaps between, and what the machine did meanwhile.

Fed by training events, and by readings of the machine's state that a thread takes now and then; times are milliseconds
since the first span of any rank on this host. How it looks is decided in `flodl.distributed.timeline_view`.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flodl.distributed.timeline_view import timeline_page
from flodl.files import write_atomically

__all__ = ["Timeline"]

_SPANS = {"StepDone": "compute_ms", "Synced": "sync_ms", "EvalDone": "wall_ms", "Saved": "wall_ms"}
_NAMES = {
    "StepDone": "step",
    "Synced": "sync",
    "EvalDone": "evaluation",
    "Saved": "save",
    "EpochMetrics": "epoch",
    "Decided": "decision",
}
_BUSY = {"step", "sync", "evaluation"}


class Timeline:
    """Collects spans of one rank; `merge` joins those of all.

    A span is ``{"rank", "kind", "begin_ms", "end_ms", "step", "epoch"}``, for a sync also ``wait_ms``
    and ``divergence``. A sample is ``{"rank", "at_ms"}`` and figures by name, such as ``system/cpu`` (percent) and
    ``gpu0/memory`` (bytes).

    Args:
        rank: whose.
        read: gives the figures of a sample; None takes none. `flodl.monitor.resources.Resources` has such a method.
        every_s: seconds between samples.
    """

    def __init__(
        self, rank: int = 0, read: Callable[[], Mapping[str, float]] | None = None, every_s: float = 0.5
    ) -> None:
        self.rank = rank
        self.spans: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []
        self._read, self._every_s = read, every_s
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Take samples from now on, in a thread."""
        if self._read is not None and self._thread is None:
            self._thread = threading.Thread(target=self._sample, name="flodl-timeline", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Take no more samples; once more does nothing."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
            self._thread = None

    def _sample(self) -> None:
        assert self._read is not None
        while True:
            try:
                found = {name: float(value) for name, value in self._read().items()}
            except Exception:
                return  # what cannot be read is absent; the run has nothing to do with it
            self.samples.append({"rank": self.rank, "at_ms": time.monotonic() * 1e3, **found})
            if self._over.wait(self._every_s):
                return

    def note(self, event: Any) -> None:
        """Take in one training event; kinds without a duration become spans of length 0."""
        kind = type(event).__name__
        if kind not in _NAMES:
            return
        end = event.at_s * 1e3
        length = getattr(event, _SPANS[kind]) if kind in _SPANS else 0.0
        span = {
            "rank": self.rank,
            "kind": _NAMES[kind],
            "begin_ms": end - length,
            "end_ms": end,
            "step": event.step,
            "epoch": getattr(event, "epoch", None),
        }
        if kind == "Synced":
            span |= {"wait_ms": event.wait_ms, "divergence": event.divergence}
        self.spans.append(span)

    def to_dict(self) -> dict[str, Any]:
        """Return spans and samples as JSON values."""
        return {"rank": self.rank, "spans": self.spans, "samples": self.samples}

    @classmethod
    def merge(cls, parts: Sequence[Mapping[str, Any]]) -> Timeline:
        """Return one timeline of all ranks, with times counted from the first of them."""
        merged = cls()
        spans = [dict(span) for part in parts for span in part["spans"]]
        samples = [dict(sample) for part in parts for sample in part.get("samples", ())]
        starts = [span["begin_ms"] for span in spans] or [sample["at_ms"] for sample in samples]
        start = min(starts, default=0.0)
        for span in spans:
            span["begin_ms"] = round(span["begin_ms"] - start, 3)
            span["end_ms"] = round(span["end_ms"] - start, 3)
        for sample in samples:
            sample["at_ms"] = round(sample["at_ms"] - start, 3)
        merged.spans = sorted(spans, key=lambda span: (span["begin_ms"], span["rank"]))
        merged.samples = sorted(samples, key=lambda sample: (sample["at_ms"], sample["rank"]))
        return merged

    def gaps(self, min_ms: float = 500.0) -> list[dict[str, Any]]:
        """Return the times of at least ``min_ms`` in which a rank neither computed, averaged nor evaluated,
        and the part of a sync that it spent waiting for others, with what they are next to.
        """
        found = []
        for rank in sorted({span["rank"] for span in self.spans}):
            own = [span for span in self.spans if span["rank"] == rank]
            busy = sorted((s for s in own if s["kind"] in _BUSY), key=lambda s: s["begin_ms"])
            for before, after in itertools.pairwise(busy):
                length = after["begin_ms"] - before["end_ms"]
                if length >= min_ms:
                    cause = _cause(before, after, own)
                    found.append(
                        {"rank": rank, "begin_ms": before["end_ms"], "length_ms": round(length, 3), "cause": cause}
                    )
            for span in own:
                if span["kind"] == "sync" and span["wait_ms"] >= min_ms:
                    found.append(
                        {
                            "rank": rank,
                            "begin_ms": span["begin_ms"],
                            "length_ms": round(span["wait_ms"], 3),
                            "cause": "sync",
                        }
                    )
        return sorted(found, key=lambda gap: gap["begin_ms"])

    def device_gaps(self, name: str, below: float = 5.0, min_ms: float = 500.0) -> list[dict[str, float]]:
        """Return the times of at least ``min_ms`` in which every sample of a figure was below a bound.

        Args:
            name: such as ``gpu0/util``.
            below: the bound.
        """
        found: list[dict[str, float]] = []
        values = [(sample["at_ms"], sample[name]) for sample in self.samples if name in sample]
        for idle, group in itertools.groupby(values, key=lambda pair: pair[1] < below):
            times = [at for at, _ in group]
            if idle and times[-1] - times[0] >= min_ms:
                found.append({"begin_ms": times[0], "length_ms": round(times[-1] - times[0], 3)})
        return found

    def summary(self) -> dict[str, Any]:
        """Return what the timeline comes to: its length, how often ranks met and for how long, means of samples.

        ``idle`` is the part of the samples in which a device did next to nothing.
        """
        syncs = [span["end_ms"] - span["begin_ms"] for span in self.spans if span["kind"] == "sync"]
        kept = {name: [sample[name] for sample in self.samples if name in sample] for name in self._figures()}
        utils = {name: values for name, values in kept.items() if name.endswith("/util")}
        return {
            "total_ms": max((span["end_ms"] for span in self.spans), default=0.0),
            "spans": len(self.spans),
            "samples": len(self.samples),
            "syncs": max(Counter(span["rank"] for span in self.spans if span["kind"] == "sync").values(), default=0),
            "mean_sync_ms": sum(syncs) / len(syncs) if syncs else 0.0,
            "means": {name: sum(values) / len(values) for name, values in kept.items()},
            "most": {name: max(values) for name, values in kept.items()},
            "idle": {name: sum(value < 5.0 for value in values) / len(values) for name, values in utils.items()},
        }

    def _figures(self) -> list[str]:
        return sorted({name for sample in self.samples for name in sample} - {"rank", "at_ms"})

    def busy_share(self) -> dict[int, float]:
        """Return for each rank the part of the whole time in which it computed."""
        if not self.spans:
            return {}
        whole = max(s["end_ms"] for s in self.spans) - min(s["begin_ms"] for s in self.spans)
        ranks = sorted({span["rank"] for span in self.spans})
        sums = {
            r: sum(s["end_ms"] - s["begin_ms"] for s in self.spans if s["rank"] == r and s["kind"] == "step")
            for r in ranks
        }
        return {rank: total / whole if whole else 0.0 for rank, total in sums.items()}

    def write(self, path: str | os.PathLike[str]) -> tuple[Path, ...]:
        """Write the timeline, and return the paths of its files.

        ``<path>.json`` has spans, samples, gaps, the busy share and the summary, ``<path>.csv`` the spans,
        ``<path>.samples.csv`` the samples; ``<path>.html`` is a page that shows all of it and needs nothing but itself.
        """
        base = Path(path)
        base.parent.mkdir(parents=True, exist_ok=True)
        as_json, as_csv = base.with_name(base.name + ".json"), base.with_name(base.name + ".csv")
        as_samples, as_page = base.with_name(base.name + ".samples.csv"), base.with_name(base.name + ".html")
        gaps, busy, summary = self.gaps(), self.busy_share(), self.summary()
        body = {"spans": self.spans, "samples": self.samples, "gaps": gaps, "busy": busy, "summary": summary}
        _replace(as_json, [json.dumps(body, indent=1)])
        fields = ["rank", "kind", "begin_ms", "end_ms", "step", "epoch", "wait_ms", "divergence"]
        _replace(as_csv, _table(fields, self.spans))
        _replace(as_samples, _table(["at_ms", "rank", *self._figures()], self.samples))
        _replace(as_page, [timeline_page(self.spans, self.samples, gaps, busy, summary)])
        return as_json, as_csv, as_samples, as_page


class _Lines(list[str]):
    def write(self, text: str) -> None:
        self.append(text)


def _table(fields: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    lines = _Lines()
    table = csv.DictWriter(lines, fields, restval="", lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return lines


def _replace(path: Path, parts: Iterable[str]) -> None:
    write_atomically(path, ["".join(parts).encode()])


def _cause(before: Mapping[str, Any], after: Mapping[str, Any], own: Sequence[Mapping[str, Any]]) -> str:
    if before["epoch"] != after["epoch"]:
        return "epoch boundary"
    if "sync" in (before["kind"], after["kind"]):
        return "sync"
    near = [s for s in own if s["kind"] == "save" and before["end_ms"] - 500 <= s["end_ms"] <= after["begin_ms"] + 500]
    return "save" if near else "unexplained"

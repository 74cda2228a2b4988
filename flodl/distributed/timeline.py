"""When each rank computed, averaged, evaluated and saved, and the idle gaps between: for benchmarks.

Fed by training events; times are milliseconds since the first event of any rank on this host.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flodl.files import write_atomically

__all__ = ["Timeline"]

_SPANS = {"StepDone": "compute_ms", "Synced": "sync_ms", "EvalDone": "wall_ms", "Saved": "wall_ms"}
_NAMES = {"StepDone": "step", "Synced": "sync", "EvalDone": "evaluation", "Saved": "save", "EpochMetrics": "epoch"}
_BUSY = {"step", "sync", "evaluation"}


class Timeline:
    """Collects spans of one rank; `merge` joins those of all.

    A span is ``{"rank", "kind", "begin_ms", "end_ms", "step", "epoch"}``, for a sync also ``wait_ms``
    and ``divergence``.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.spans: list[dict[str, Any]] = []

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
        """Return the spans as JSON values."""
        return {"rank": self.rank, "spans": self.spans}

    @classmethod
    def merge(cls, parts: Sequence[Mapping[str, Any]]) -> Timeline:
        """Return one timeline of all ranks, with times counted from the first of them."""
        merged = cls()
        spans = [dict(span) for part in parts for span in part["spans"]]
        start = min((span["begin_ms"] for span in spans), default=0.0)
        for span in spans:
            span["begin_ms"] = round(span["begin_ms"] - start, 3)
            span["end_ms"] = round(span["end_ms"] - start, 3)
        merged.spans = sorted(spans, key=lambda span: (span["begin_ms"], span["rank"]))
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

    def write(self, path: str | os.PathLike[str]) -> tuple[Path, Path]:
        """Write ``<path>.json`` (spans, gaps, busy share) and ``<path>.csv`` (spans), and return their paths."""
        base = Path(path)
        base.parent.mkdir(parents=True, exist_ok=True)
        as_json, as_csv = base.with_name(base.name + ".json"), base.with_name(base.name + ".csv")
        body = {"spans": self.spans, "gaps": self.gaps(), "busy": self.busy_share()}
        _replace(as_json, [json.dumps(body, indent=1)])
        fields = ["rank", "kind", "begin_ms", "end_ms", "step", "epoch", "wait_ms", "divergence"]
        lines = _Lines()
        table = csv.DictWriter(lines, fields, restval="", lineterminator="\n")
        table.writeheader()
        table.writerows(self.spans)
        _replace(as_csv, lines)
        return as_json, as_csv


class _Lines(list[str]):
    def write(self, text: str) -> None:
        self.append(text)


def _replace(path: Path, parts: Iterable[str]) -> None:
    write_atomically(path, ["".join(parts).encode()])


def _cause(before: Mapping[str, Any], after: Mapping[str, Any], own: Sequence[Mapping[str, Any]]) -> str:
    if before["epoch"] != after["epoch"]:
        return "epoch boundary"
    if "sync" in (before["kind"], after["kind"]):
        return "sync"
    near = [s for s in own if s["kind"] == "save" and before["end_ms"] - 500 <= s["end_ms"] <= after["begin_ms"] + 500]
    return "save" if near else "unexplained"

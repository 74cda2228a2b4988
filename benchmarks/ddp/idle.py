"""Idle time of the ranks of a run and its causes, from a merged `flodl.monitor.Timeline`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from flodl.monitor import Timeline

_BUSY = ("step", "sync", "evaluation")

Span = dict[str, Any]


def gaps(timeline: Timeline, min_ms: float = 500.0) -> list[dict[str, Any]]:
    """Return the idle times of each rank of at least ``min_ms`` with a cause, and its waiting within a sync.

    Causes are ``epoch boundary``, ``sync``, ``save`` and ``unexplained``, by the activity next to the gap.
    """
    found = []
    for rank, own in _by_rank(timeline).items():
        busy = sorted((span for span in own if span["kind"] in _BUSY), key=lambda span: span["begin_ms"])
        end = busy[0]["begin_ms"] if busy else 0.0
        for before, span in zip([*busy[:1], *busy], busy, strict=False):
            if span["begin_ms"] - end >= min_ms:
                found.append(_gap(rank, end, span["begin_ms"] - end, _cause(before, span, own)))
            if span["kind"] == "sync" and span.get("wait_ms", 0.0) >= min_ms:
                found.append(_gap(rank, span["begin_ms"], span["wait_ms"], "sync"))
            end = max(end, span["end_ms"])
    return sorted(found, key=lambda gap: gap["begin_ms"])


def idle_shares(timeline: Timeline) -> dict[int, dict[str, float]]:
    """Return the part of the whole time that each rank was idle, by cause."""
    begin = min((span["begin_ms"] for span in timeline.spans), default=0.0)
    whole = max((span["end_ms"] for span in timeline.spans), default=0.0) - begin
    found: dict[int, Counter[str]] = {rank: Counter() for rank in _by_rank(timeline)}
    for gap in gaps(timeline, min_ms=0.0) if whole else ():
        found[gap["rank"]][gap["cause"]] += gap["length_ms"] / whole
    return {rank: dict(shares) for rank, shares in found.items()}


def summary(timeline: Timeline) -> dict[str, Any]:
    """Return the length, number and mean duration of synchronisations, means of samples, and idle shares.

    ``mean_sync_ms`` covers synchronisations with a measured duration.
    """
    syncs = [span for span in timeline.spans if span["kind"] == "sync"]
    measured = [length for span in syncs if (length := span["end_ms"] - span["begin_ms"]) > 0]
    names = sorted({name for sample in timeline.samples for name in sample} - {"rank", "at_ms"})
    return {
        "total_ms": max((span["end_ms"] for span in timeline.spans), default=0.0),
        "spans": len(timeline.spans),
        "samples": len(timeline.samples),
        "syncs": max(Counter(span["rank"] for span in syncs).values(), default=0),
        "mean_sync_ms": fmean(measured) if measured else 0.0,
        "means": {name: fmean(sample[name] for sample in timeline.samples if name in sample) for name in names},
        "idle_shares": idle_shares(timeline),
    }


def add_to_file(path: str | Path) -> None:
    """Add ``gaps`` and ``summary`` to the JSON file of a timeline."""
    body = json.loads(Path(path).read_text())
    timeline = Timeline.merge([body])
    body |= {"gaps": gaps(timeline), "summary": summary(timeline)}
    Path(path).write_text(json.dumps(body))


def _by_rank(timeline: Timeline) -> dict[int, list[Span]]:
    ranks = sorted({span["rank"] for span in timeline.spans})
    return {rank: [span for span in timeline.spans if span["rank"] == rank] for rank in ranks}


def _gap(rank: int, begin_ms: float, length_ms: float, cause: str) -> dict[str, Any]:
    return {"rank": rank, "begin_ms": begin_ms, "length_ms": round(length_ms, 3), "cause": cause}


def _cause(before: Span, after: Span, own: Sequence[Span]) -> str:
    if before["epoch"] != after["epoch"]:
        return "epoch boundary"
    if "sync" in (before["kind"], after["kind"]):
        return "sync"
    near = [s for s in own if s["kind"] == "save" and before["end_ms"] - 500 <= s["end_ms"] <= after["begin_ms"] + 500]
    return "save" if near else "unexplained"

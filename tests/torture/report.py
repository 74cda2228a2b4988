"""The result of a suite: counts by grade, costs and the worst cases, as text and JSON."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.torture.case import GOOD, Case, Grade, Verdict

__all__ = ["Report", "as_text", "write_reports"]

MOST_SHOWN = 10


@dataclass
class Report:
    """The result of one suite.

    Attributes:
        suite: its name.
        seed: of the run.
        seconds: how long it took.
        counts: cases by grade.
        kinds: the same by sort of damage.
        worst: bad cases: line, kind, damage, grade and text, at most so many of each sort and grade.
        slowest: the case that took most of the processor, with its seconds.
        largest: the case that took most memory, with its MB.
    """

    suite: str
    seed: int
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, dict[str, int]] = field(default_factory=dict)
    worst: list[dict[str, Any]] = field(default_factory=list)
    slowest: tuple[str, float] = ("", 0.0)
    largest: tuple[str, float] = ("", 0.0)
    _shown: Counter[tuple[str, str]] = field(default_factory=Counter, repr=False)

    def add(self, case: Case, verdict: Verdict) -> None:
        """Count one verdict."""
        grade = verdict.grade.value
        self.counts[grade] = self.counts.get(grade, 0) + 1
        kind = self.kinds.setdefault(case.kind, {})
        kind[grade] = kind.get(grade, 0) + 1
        if verdict.seconds > self.slowest[1]:
            self.slowest = (case.line, verdict.seconds)
        if verdict.memory_mb > self.largest[1]:
            self.largest = (case.line, verdict.memory_mb)
        if not verdict.good and self._shown[case.kind, grade] < MOST_SHOWN:
            self._shown[case.kind, grade] += 1
            self.worst.append(
                {
                    "line": case.line, "kind": case.kind, "what": repr(dict(case.what))[:300], "grade": grade,
                    "error": verdict.error, "text": verdict.text[:600],
                }
            )  # fmt: skip

    @property
    def total(self) -> int:
        """How many cases ran."""
        return sum(self.counts.values())

    @property
    def bad(self) -> int:
        """How many are not as they should be."""
        return self.total - sum(self.counts.get(grade.value, 0) for grade in GOOD)

    def as_json(self) -> dict[str, Any]:
        """Return what a file keeps."""
        kept = asdict(self)
        del kept["_shown"]
        return {**kept, "total": self.total, "bad": self.bad}


def as_text(report: Report, *, most: int = MOST_SHOWN) -> str:
    """Return a report for a terminal."""
    counts = ", ".join(f"{report.counts[g.value]} {g.value}" for g in Grade if report.counts.get(g.value))
    rate = report.total / report.seconds if report.seconds else 0.0
    lines = [
        f"{report.suite}: {report.total:,} cases, {report.bad:,} bad; {counts}",
        f"  {report.seconds:.1f} s, {rate:,.0f} cases a second; slowest {report.slowest[1]:.2f} s, "
        f"most memory {report.largest[1]:.0f} MB",
    ]
    for bad in report.worst[:most]:
        lines += [f"  {bad['grade']}: {bad['kind']} {bad['what']}", f"    {bad['line']}"]
        lines += [f"    {bad['error']}: {bad['text'][:300]}" if bad["error"] else f"    {bad['text'][:300]}"]
    if len(report.worst) > most:
        lines.append(f"  ... and {report.bad - most} more bad ones; --json keeps up to ten of each sort")
    return "\n".join(lines)


def write_reports(path: Path, reports: Sequence[Report]) -> None:
    """Write reports to a JSON file, with the versions that were tested."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {"python": platform.python_version()}
    for library in ("torch", "tokenizers", "safetensors", "transformers", "sentence-transformers", "huggingface_hub"):
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            continue
    kept = {"versions": versions, "reports": [report.as_json() for report in reports]}
    path.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")

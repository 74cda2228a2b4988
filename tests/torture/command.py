"""The command ``python -m tests.torture``: suites and cases by name, a report, and an exit status."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from flodl.errors import nearest
from tests.torture import library
from tests.torture.case import Case
from tests.torture.judging import start_watch
from tests.torture.report import Report, as_text, write_reports
from tests.torture.runner import default_place, load_suite, run_cases
from tests.torture.suites import DEFAULT_CASES, SUITES
from tests.torture.worker import run_one

__all__ = ["main", "run_suite"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run suites as the command line says; return 0 if no case is bad, 1 if one is, 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.torture",
        description="Damage files, settings, texts and runs, and grade what becomes of each. "
        "0 if all is well, 1 if a case is bad.",
    )
    parser.add_argument("suite", nargs="+", help=f"all, or some of {', '.join(SUITES)}")
    parser.add_argument("--cases", type=int, help="cases of each suite; by default the number it is run with in full")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1, help="processes at once")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="give up what is not finished then, suite by suite"
    )
    parser.add_argument("--json", type=Path, help="write counts, costs and bad cases to this file")
    parser.add_argument("--only", type=int, help="run the case of this number alone and show what it does")
    parser.add_argument("--place", type=Path, help="a folder to work in, on the file system to be tested")
    given = parser.parse_args(arguments)
    names = list(SUITES) if given.suite == ["all"] else given.suite
    for name in names:
        if name not in SUITES:
            parser.error(f"no suite {name!r}{nearest(name, SUITES)}; expected all, or some of {', '.join(SUITES)}")
    asked, names = names, [name for name in names if _can_run(name)]
    if asked != names and given.suite != ["all"]:
        return 2
    if given.only is not None:
        good = [show_one(name, given.seed, given.only, given.place) for name in names]
        return 0 if all(good) else 1
    reports = []
    for name in names:
        count = given.cases or DEFAULT_CASES[name]
        report = run_suite(name, count, given.seed, workers=given.workers, place=given.place, seconds=given.seconds)
        print(as_text(report), flush=True)
        reports.append(report)
        if given.json:
            write_reports(given.json, reports)
    return 0 if not any(report.bad for report in reports) else 1


def _can_run(name: str) -> bool:
    """Return whether what a suite needs is installed, and say so where it is not."""
    lacking: str | None = getattr(load_suite(name), "lacking", lambda: None)()
    if lacking is not None:
        print(f"{name}: left out; it needs {lacking}", flush=True)
    return lacking is None


def run_suite(
    name: str,
    count: int,
    seed: int = 0,
    *,
    workers: int = 1,
    place: Path | None = None,
    seconds: float = math.inf,
) -> Report:
    """Return the report of one suite.

    Args:
        name: of the suite.
        count: how many cases.
        seed: of the run.
        workers: processes at once.
        place: a folder to work in.
        seconds: what is not finished then is given up and not counted.
    """
    suite = load_suite(name)
    report = Report(name, seed)
    started = time.monotonic()
    shown = time.monotonic() if sys.stderr.isatty() else float("inf")

    def told(finished: int) -> None:
        nonlocal shown
        if time.monotonic() - shown > 1.0:
            shown = time.monotonic()
            sys.stderr.write(f"\r{name}: {finished:,} of {count:,}\x1b[K")

    for case, verdict in run_cases(
        suite, list(suite.cases(seed, count)), workers=workers, place=place, told=told, seconds=seconds
    ):
        report.add(case, verdict)
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    report.seconds = round(time.monotonic() - started, 2)
    return report


def show_one(name: str, seed: int, number: int, place: Path | None) -> bool:
    """Run one case in this process, where a debugger reaches it, and print what it does; return whether it is good."""
    suite = load_suite(name)
    case: Case = next(islice(suite.cases(seed, number + 1), number, None))
    library.prepare()
    print(f"{case.line}\n{case.kind}: {dict(case.what)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="flodl-torture-", dir=place or default_place()) as root:
        start_watch(Path(root))
        try:
            verdict = run_one(suite, case, Path(root))
        except Exception:
            traceback.print_exc()
            return False
    print(f"{verdict.grade.value}: {verdict.error} {verdict.text}")
    print(f"{verdict.seconds:.3f} s of the processor, {verdict.memory_mb:.0f} MB")
    return verdict.good

"""The command ``python -m flodl_hf.torture``: suites, cases and subjects by name, a report, and an exit status."""

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
from flodl_hf.torture.case import Case
from flodl_hf.torture.judging import start_watch
from flodl_hf.torture.report import Report, as_markdown, as_text, write_reports
from flodl_hf.torture.runner import default_place, load_suite, run_cases
from flodl_hf.torture.subjects import SUBJECTS, Subject, subject_named
from flodl_hf.torture.suites import DEFAULT_CASES, SUITES
from flodl_hf.torture.worker import run_one

__all__ = ["main", "run_suite"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run suites as the command line says; return 0 if no case is bad, 1 if one is, 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="python -m flodl_hf.torture",
        description="Damage files, settings, texts and runs, and grade what becomes of each. "
        "0 if all is well, 1 if a case is bad.",
    )
    parser.add_argument("suite", nargs="+", help=f"all, or some of {', '.join(SUITES)}")
    parser.add_argument("--cases", type=int, help="cases of each suite; by default the number it is run with in full")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--subject", action="append", help=f"{' or '.join(SUBJECTS)}; may be repeated")
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
    try:
        subjects = [subject_named(name) for name in given.subject or ["ours"]]
    except ValueError as fault:
        parser.error(str(fault))
    if given.only is not None:
        good = [show_one(name, given.seed, given.only, subject, given.place) for name in names for subject in subjects]
        return 0 if all(good) else 1
    reports = []
    for name in names:
        suite = load_suite(name)
        for subject in subjects:
            if subject.name not in getattr(suite, "SUBJECTS", ("ours",)):
                print(f"{name}: {subject.name} has nothing of the kind")
                continue
            count = given.cases or DEFAULT_CASES[name]
            report = run_suite(
                name, subject, count, given.seed, workers=given.workers, place=given.place, seconds=given.seconds
            )
            print(as_text(report), flush=True)
            reports.append(report)
            if given.json:
                write_reports(given.json, reports)
    if len(reports) > 1:
        print(as_markdown(reports))
    return 0 if not any(report.bad for report in reports) else 1


def _can_run(name: str) -> bool:
    """Return whether what a suite needs is installed, and say so where it is not."""
    lacking: str | None = getattr(load_suite(name), "lacking", lambda: None)()
    if lacking is not None:
        print(f"{name}: left out; it needs {lacking}", flush=True)
    return lacking is None


def run_suite(
    name: str,
    subject: Subject,
    count: int,
    seed: int = 0,
    *,
    workers: int = 1,
    place: Path | None = None,
    seconds: float = math.inf,
) -> Report:
    """Return the report of one suite with one subject.

    Args:
        name: of the suite.
        subject: who is tested.
        count: how many cases.
        seed: of the run.
        workers: processes at once.
        place: a folder to work in.
        seconds: what is not finished then is given up and not counted.
    """
    suite = load_suite(name)
    report = Report(name, subject.name, seed)
    started = time.monotonic()
    shown = time.monotonic() if sys.stderr.isatty() else float("inf")

    def told(finished: int) -> None:
        nonlocal shown
        if time.monotonic() - shown > 1.0:
            shown = time.monotonic()
            sys.stderr.write(f"\r{name} ({subject.name}): {finished:,} of {count:,}\x1b[K")

    for case, verdict in run_cases(
        suite, list(suite.cases(seed, count)), subject, workers=workers, place=place, told=told, seconds=seconds
    ):
        report.add(case, verdict)
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    report.seconds = round(time.monotonic() - started, 2)
    return report


def show_one(name: str, seed: int, number: int, subject: Subject, place: Path | None) -> bool:
    """Run one case in this process, where a debugger reaches it, and print what it does; return whether it is good."""
    suite = load_suite(name)
    case: Case = next(islice(suite.cases(seed, number + 1), number, None))
    subject.prepare()
    print(f"{case.line} --subject {subject.name}\n{case.kind}: {dict(case.what)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="flodl-torture-", dir=place or default_place()) as root:
        start_watch(Path(root))
        try:
            verdict = run_one(suite, case, subject, Path(root))
        except Exception:
            traceback.print_exc()
            return False
    print(f"{verdict.grade.value}: {verdict.error} {verdict.text}")
    print(f"{verdict.seconds:.3f} s of the processor, {verdict.memory_mb:.0f} MB")
    return verdict.good

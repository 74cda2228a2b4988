"""The command ``python -m tests.peers``: each group of cases beside the original library, and an exit status."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import logging
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.peers.case import Outcome, compare

__all__ = ["GROUPS", "main", "run"]

# Group: what it needs besides this library.
GROUPS = {
    "tokenizers": ("transformers", "sentencepiece"),
    "pipelines": ("transformers",),
    "peft": ("transformers", "peft"),
    "sentence": ("transformers", "sentence_transformers"),
    "tei": ("starlette", "uvicorn", "httpx", "orjson", "msgpack", "httptools"),
}
SHOWN = 160


def main(arguments: Sequence[str] | None = None) -> int:
    """Run groups as the command line states; return 1 if a case is different."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.peers",
        description="Run cases of the original libraries on both sides. Exit status 1 if a case is different.",
    )
    parser.add_argument(
        "--only", nargs="+", choices=GROUPS, default=list(GROUPS), metavar="GROUP", help=", ".join(GROUPS)
    )
    parser.add_argument("--shown", type=int, default=20, help="how many different cases of a group are printed")
    parser.add_argument("--json", type=Path, help="write counts, refusals and different cases to this file")
    given = parser.parse_args(arguments)
    reports = {}
    for group in given.only:
        lacking = missing(group)
        if lacking:
            print(f"{group}: skipped, {', '.join(lacking)} not installed", flush=True)
            continue
        reports[group] = summary(run(group))
        print(as_text(group, reports[group], given.shown), flush=True)
    if given.json:
        given.json.write_text(json.dumps(reports, indent=1, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
    return int(any(report["different"] for report in reports.values()))


def missing(group: str) -> list[str]:
    """Return the packages of a group that are not installed."""
    return [name for name in GROUPS[group] if importlib.util.find_spec(name) is None]


def run(group: str, *, quick: bool = False) -> list[Outcome]:
    """Return the outcome of every case of a group.

    Args:
        group: a name of `GROUPS`.
        quick: leave out most settings and texts.
    """
    cases = importlib.import_module(f"tests.peers.{group}_cases").cases
    with tempfile.TemporaryDirectory(prefix="peers-") as room, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            outcomes = [compare(case) for case in cases(Path(room), quick=quick)]
        finally:
            logging.disable(logging.NOTSET)
    for outcome in outcomes:
        if isinstance(outcome.ours, str):
            outcome.ours = re.sub(rf"{re.escape(room)}[^ :]*", "FOLDER", outcome.ours)
    return outcomes


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the counts, the distinct refusals with their numbers, and the different cases."""
    counts = Counter(outcome.kind for outcome in outcomes)
    refusals = Counter(str(outcome.ours) for outcome in outcomes if outcome.kind == "refused")
    different = [vars(outcome) for outcome in outcomes if outcome.kind == "different"]
    errors = Counter(f"{one.theirs} | {one.ours}" for one in outcomes if one.kind == "failed")
    equal, more = counts["equal"], counts["more"]
    return {"equal": equal, "more": more, "failed": dict(errors), "refused": dict(refusals), "different": different}


def as_text(group: str, report: dict[str, Any], shown: int) -> str:
    """Return a summary as lines."""
    refused, different = report["refused"], report["different"]
    failed = sum(report["failed"].values())
    lines = [
        f"{group}: equal {report['equal']}, refused {sum(refused.values())}, different {len(different)} "
        f"(errors on both sides {failed}, internal errors there alone {report['more']})"
    ]
    lines += [f"  refused {number}: {message.splitlines()[0][:SHOWN]}" for message, number in refused.items()]
    for one in different[:shown]:
        lines += [
            f"  different: {one['case']}",
            f"    theirs {one['theirs']!r:.{SHOWN}}",
            f"    ours   {one['ours']!r:.{SHOWN}}",
        ]
    return "\n".join(lines)

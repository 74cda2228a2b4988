"""The matrix: every family with every head, every check, every cell one of five words.

``pass`` and ``fail``; ``unsupported``: the family has no such head; ``no reference``: transformers cannot read files of
the family, so there is nothing to compare with; ``not run``: no configuration of this size, or transformers is not
installed.
"""

from __future__ import annotations

import json
import platform
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.resources import files
from multiprocessing import get_context
from typing import Any

import torch

from flodl.errors import FlodlError, nearest
from flodl_hf.checkpoints.folders import BIN_FILES, MODEL_FILES
from flodl_hf.checkpoints.hub.download import resolve_folder
from flodl_hf.errors import ParityError
from flodl_hf.families import registered
from flodl_hf.families.schema import Family
from flodl_hf.families.schema.tasks import HEADS
from flodl_hf.parity.cell import Bench, Cell, Evidence, Status, all_cells, variants_of
from flodl_hf.parity.checks import CHECKS, first_parting

# Files of the Hub's conversion differ from run to run only in what these checks do not read.
LIVE_CHECKS = ("config_triage", "strict_load", "forward", "layouts", "gradients", "export_bytes", "half_precision")


@dataclass
class CellResult:
    """One cell with the evidence of each check."""

    cell: Cell
    evidence: list[Evidence] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def status(self) -> Status:
        """The cell in one word: fail if any check failed, pass if all that ran passed."""
        found = {e.status for e in self.evidence}
        for status in ("fail", "unsupported", "no reference"):
            if status in found:
                return status  # type: ignore[return-value]
        return "pass" if "pass" in found else "not run"

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON types."""
        return {
            "cell": self.cell.name,
            **asdict(self.cell),
            "status": self.status,
            "seconds": round(self.seconds, 2),
            "checks": [asdict(e) for e in self.evidence],
        }


def check_names(chosen: Sequence[str] = ()) -> list[str]:
    """Return the chosen names of checks, else all, in order.

    Raises:
        ParityError: there is no such check.
    """
    known = [check.__name__ for check in CHECKS]
    if wrong := [name for name in chosen if name not in known]:
        raise ParityError(f"no check {wrong[0]!r}{nearest(wrong[0], known)}; expected {', '.join(known)}")
    return list(chosen) or known


def select_cells(families: Sequence[str] = (), heads: Sequence[str] = (), size: str = "tiny") -> list[Cell]:
    """Return the cells of the named families and heads; all of them where none is named.

    Raises:
        ParityError: a name that is no family or no head.
    """
    from flodl_hf.heads.auto import head_named

    cells = all_cells(size)
    known = {cell.family for cell in cells}
    wrong = [name for name in families if name not in known]
    if wrong:
        raise ParityError(f"no family {wrong[0]!r}{nearest(wrong[0], known)}; expected {', '.join(sorted(known))}")
    wanted = {head_named(name).name for name in heads}
    return [c for c in cells if (not families or c.family in families) and (not wanted or c.head in wanted)]


def run_cell(
    cell: Cell, *, size: str = "tiny", checks: Sequence[str] = (), seed: int = 0, live: bool = False
) -> CellResult:
    """Return the evidence of one cell; an exception inside a check is that check's failure."""
    result = CellResult(cell)
    started = time.perf_counter()
    names = check_names(checks or (LIVE_CHECKS if live else ()))
    chosen = [check for check in CHECKS if check.__name__ in names]
    obstacle = _obstacle(cell, size, live)
    if obstacle is None:
        torch.manual_seed(seed)
        try:
            source = None
            if live:
                names = (*MODEL_FILES, *BIN_FILES)
                source = resolve_folder(checkpoints_of(cell.record)[cell.head], {}, names)[0]
        except FlodlError as fault:
            obstacle = "not run", str(fault)
        else:
            with Bench(cell, size, seed, source) as bench:
                result.evidence = [_guarded(check, bench) for check in chosen]
    if obstacle is not None:
        result.evidence = [Evidence(check.__name__, *obstacle) for check in chosen]
    result.seconds = time.perf_counter() - started
    return result


@cache
def published() -> Mapping[str, Mapping[str, str]]:
    """Return the catalogue of published checkpoints by family and task."""
    return json.loads((files("flodl_hf.parity") / "published.json").read_text("utf-8"))


def checkpoints_of(family: Family) -> Mapping[str, str]:
    """Return the published checkpoint of each task of a family that has one: its own, or those of `published`."""
    return family.checkpoints or published().get(family.model_type, {})


def _obstacle(cell: Cell, size: str, live: bool) -> tuple[Status, str] | None:
    """Return why a cell cannot be compared, or None."""
    from flodl_hf.parity.reference import available

    if cell.head != "base" and cell.head not in cell.record.heads:
        return "unsupported", f"{cell.family} has no {cell.head} head"
    if not cell.record.tiny and not cell.record.real:
        return "no reference", (
            f"transformers cannot read files of {cell.family}, which were written for the code of a repository; tests "
            "compare the encoder with another implementation"
        )
    if live and (cell.variant != "base" or cell.head not in checkpoints_of(cell.record)):
        return "not run", "no published checkpoint is named for this cell"
    if not live and not variants_of(cell.record, size):
        return "not run", f"no {size} configuration is stated for {cell.family}"
    return None if available() else ("not run", "transformers is not installed")


def _guarded(check: Callable[[Bench], Evidence], bench: Bench) -> Evidence:
    try:
        evidence = check(bench)
    except Exception as fault:
        last = traceback.extract_tb(fault.__traceback__)[-1]
        return Evidence(check.__name__, "fail", f"{type(fault).__name__}: {fault} ({last.name}, line {last.lineno})")
    if evidence.status == "fail" and evidence.check in ("forward", "reload") and evidence.where is not None:
        batch = next(b for b in bench.batches() if b.name == "mixed lengths")
        parting = first_parting(bench.ours, bench.theirs.model, batch.inputs)
        if parting is not None:
            return replace(evidence, detail=f"{evidence.detail}; first at {parting[1]}", where=parting[0])
    return evidence


def run_matrix(
    cells: Iterable[Cell],
    *,
    size: str = "tiny",
    checks: Sequence[str] = (),
    jobs: int = 1,
    seed: int = 0,
    live: bool = False,
) -> Iterator[CellResult]:
    """Yield each cell's result when it is complete.

    Args:
        cells: from `select_cells`.
        size: "tiny" or "real".
        checks: names of checks; all if empty.
        jobs: number of parallel processes; other processes do not know families that were registered in this one, so
            cells of these run in it.
        seed: seed of weights and batches.
        live: compare published checkpoints instead of random ones; cells without one are not run. This needs a network
            or a cache with the checkpoints.

    Raises:
        ParityError: an unknown check.
    """
    check_names(checks)
    options: dict[str, Any] = {"size": size, "checks": tuple(checks), "seed": seed, "live": live}
    todo, own = list(cells), registered()
    for cell in [cell for cell in todo if jobs <= 1 or cell.record in own]:
        yield run_cell(cell, **options)
    todo = [cell for cell in todo if cell.record not in own]
    if jobs <= 1 or not todo:
        return
    # Fresh interpreters: torch's thread pools do not survive a fork.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_one_share, initargs=(jobs,)) as pool:
        futures = [pool.submit(run_cell, cell, **options) for cell in todo]
        for future in as_completed(futures):
            yield future.result()


def _one_share(jobs: int) -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() // jobs))


def provenance(size: str, command: str | None = None) -> dict[str, Any]:
    """Return versions, processor and settings, for every report."""
    from flodl_hf.parity.reference import available, version

    try:
        with open("/proc/cpuinfo") as file:
            processor = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        processor = ""
    return {
        "size": size,
        "torch": torch.__version__,
        "transformers": version() if available() else None,
        "python": platform.python_version(),
        "processor": processor or platform.processor(),
        "threads": torch.get_num_threads(),
        "command": command,
    }


def as_json(results: Sequence[CellResult], facts: dict[str, Any]) -> dict[str, Any]:
    """Return everything as JSON types."""
    counts: dict[str, int] = {}
    for result in results:
        counts[result.status] = counts.get(result.status, 0) + 1
    return {"provenance": facts, "counts": counts, "cells": [result.to_dict() for result in results]}


def _grid(results: Sequence[CellResult]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Return the names of heads, and a row of states for each family and variant."""
    heads = [head for head in HEADS if any(r.cell.head == head.name for r in results)]
    states: dict[str, dict[str, str]] = {}
    for result in results:
        label = result.cell.family + (f" ({result.cell.variant})" if result.cell.variant != "base" else "")
        states.setdefault(label, {})[result.cell.head] = result.status
    rows = [(label, [found.get(head.name, "") for head in heads]) for label, found in states.items()]
    return [head.short for head in heads], rows


def as_text(results: Sequence[CellResult]) -> str:
    """Return families down, heads across, one word a cell, then every failure and the largest differences."""
    heads, rows = _grid(results)
    width = max([len(label) for label, _ in rows] + [6]) + 2
    lines = [f"{label:<{width}}" + "".join(f"{word:<13}" for word in words) for label, words in [("", heads), *rows]]
    lines += [f"{status}: {where}: {detail}" for where, status, detail in _not_passed(results)]
    lines += ["", "largest difference of each check:"]
    lines += [f"  {name:<26}{value}" for name, value in _largest(results)]
    return "\n".join(lines)


def _not_passed(results: Sequence[CellResult]) -> list[tuple[str, str, str]]:
    """Return cell, status and reason of failures: one row for a cell if all its checks have the same reason."""
    found = []
    for result in results:
        reasons = {(e.status, e.detail) for e in result.evidence}
        if len(reasons) == 1 < len(result.evidence) and result.status != "pass":
            found.append((result.cell.name, *next(iter(reasons))))
            continue
        rows = [e for e in result.evidence if e.status != "pass"]
        found += [(f"{result.cell.name}, {e.check}", e.status, e.detail) for e in rows]
    return found


def _largest(results: Sequence[CellResult]) -> list[tuple[str, str]]:
    largest: dict[str, tuple[float, str]] = {}
    for result in results:
        for e in result.evidence:
            if e.measured is not None and e.measured >= largest.get(e.check, (-1.0, ""))[0]:
                largest[e.check] = (e.measured, result.cell.name)
    return [(check, "0 (equal to the bit)" if v == 0 else f"{v:.3g} ({cell})") for check, (v, cell) in largest.items()]


def as_markdown(results: Sequence[CellResult], facts: dict[str, Any]) -> str:
    """Return the page: the grid, the checks with their largest differences, and how it was measured."""
    heads, rows = _grid(results)
    counts = as_json(results, facts)["counts"]
    counted = ", ".join(f"{count} {status}" for status, count in counts.items())
    lines = [
        "# Parity matrix",
        "",
        "Generated by `flodl-hf verify-matrix --markdown docs/parity.md`; not written by hand.",
        "",
        f"{len(results)} cells at {facts['size']} size: {counted}. torch {facts['torch']}, transformers "
        f"{facts['transformers']}, Python {facts['python']}, {facts['processor']}, {facts['threads']} thread(s).",
        "",
        "`unsupported`: the family has no such head, in transformers or here. `no reference`: transformers cannot read "
        "files of the family; tests compare the encoder with another implementation.",
        "",
        f"| family | {' | '.join(heads)} |",
        "|---" * (len(heads) + 1) + "|",
        *(f"| {label} | {' | '.join(words)} |" for label, words in rows),
    ]
    lines += ["", "| check | largest difference (cell) |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in _largest(results)]
    open_ends = [row for row in _not_passed(results) if row[1] in ("fail", "not run")]
    if open_ends:
        lines += ["", "## Not passed", ""]
        lines += [f"- {where}: **{status}**, {detail}" for where, status, detail in open_ends]
    return "\n".join(lines) + "\n"

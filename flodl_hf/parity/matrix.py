"""The matrix: every family with every head, every check, every cell one of five words.

``pass`` and ``fail``; ``unsupported``: the family has no such head; ``no reference``: transformers cannot read files of
the family, so there is nothing to compare with; ``not run``: no configuration of this size, or transformers is not
installed.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.resources import files
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from flodl.errors import FlodlError, nearest
from flodl_hf.errors import ParityError
from flodl_hf.families import register, registered
from flodl_hf.families.schema import Family
from flodl_hf.parity.cell import Bench, Cell, Evidence, Status, all_cells, variants_of
from flodl_hf.parity.checks import CHECKS

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


def check_names() -> list[str]:
    """Return the names of the checks, in order."""
    return [check.__name__ for check in CHECKS]


def expect_checks(names: Sequence[str]) -> None:
    """Raise for the name of a check that does not exist.

    Raises:
        ParityError: an unknown check.
    """
    known = check_names()
    if wrong := [name for name in names if name not in known]:
        raise ParityError(f"no check {wrong[0]!r}{nearest(wrong[0], known)}; expected {', '.join(known)}")


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
    names = checks or (LIVE_CHECKS if live else check_names())
    chosen = [check for check in CHECKS if check.__name__ in names]
    obstacle = _obstacle(cell, size, live)
    if obstacle is None:
        torch.manual_seed(seed)
        try:
            source = _published(cell) if live else None
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


def _published(cell: Cell) -> Path:
    """Return the folder of a cell's published checkpoint."""
    from flodl_hf.checkpoints.folders import BIN_FILES, MODEL_FILES
    from flodl_hf.checkpoints.hub.download import resolve_folder

    return resolve_folder(checkpoints_of(cell.record)[cell.head], {}, (*MODEL_FILES, *BIN_FILES))[0]


def _guarded(check: Callable[[Bench], Evidence], bench: Bench) -> Evidence:
    try:
        evidence = check(bench)
    except Exception as fault:
        last = traceback.extract_tb(fault.__traceback__)[-1]
        return Evidence(check.__name__, "fail", f"{type(fault).__name__}: {fault} ({last.name}, line {last.lineno})")
    if evidence.status == "fail" and evidence.check in ("forward", "reload") and evidence.where is not None:
        from flodl_hf.parity.probe import first_parting

        batch = next(b for b in bench.batches() if b.name == "mixed lengths")
        parting = first_parting(bench.ours, bench.theirs.model, batch.inputs)
        if parting is not None:
            return replace(evidence, detail=f"{evidence.detail}; first at {parting}", where=parting.ours)
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
        jobs: number of parallel processes.
        seed: seed of weights and batches.
        live: compare published checkpoints instead of random ones; cells without one are not run. This needs a network
            or a cache with the checkpoints.

    Raises:
        ParityError: an unknown check.
    """
    expect_checks(checks)
    options: dict[str, Any] = {"size": size, "checks": tuple(checks), "seed": seed, "live": live}
    todo = list(cells)
    if jobs <= 1:
        for cell in todo:
            yield run_cell(cell, **options)
        return
    # Fresh interpreters: torch's thread pools do not survive a fork.
    share = (jobs, _portable())
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_one_share, initargs=share) as pool:
        futures = [pool.submit(run_cell, cell, **options) for cell in todo]
        for future in as_completed(futures):
            yield future.result()


def _one_share(jobs: int, known: Sequence[tuple[str, str]]) -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() // jobs))
    for module, name in known:
        register(getattr(import_module(module), name))


def _portable() -> list[tuple[str, str]]:
    """Return module and name of each family that was registered here, for processes that begin without them.

    Raises:
        ParityError: one of them is in no module.
    """
    found: dict[int, tuple[str, str]] = {}
    wanted = {id(family): family.model_type for family in registered()}
    for module, content in list(sys.modules.items()) if wanted else ():
        for name, value in list(getattr(content, "__dict__", {}).items()):
            if id(value) in wanted:
                found.setdefault(id(value), (module, name))
    lost = [model_type for place, model_type in wanted.items() if place not in found]
    if lost:
        raise ParityError(
            f"run_matrix: the registered families {lost} are in no module, so other processes cannot import them; "
            "expected a name at the top of a module for each. Give them one, or run with jobs=1.",
            problems=lost,
        )
    return [found[place] for place in wanted]

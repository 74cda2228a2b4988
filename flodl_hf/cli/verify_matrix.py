"""``flodl-hf verify-matrix``: every family with every head against transformers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Literal

import typer

from flodl.errors import FlodlError
from flodl_hf.cli.options import JSON, option, with_parameters
from flodl_hf.cli.shared import emit_json, progress, reporting, say, tell


@reporting
@with_parameters((
    option("families", list[str], "Model types; all by default."),
    option("heads", list[str], "base, seqcls, tokcls, qa, mlm; all by default."),
    option("checks", list[str], "Names of checks; all by default."),
    option("size", Literal["tiny", "real"], "tiny (seconds) or real (base shapes of each family; many minutes).",
           default="tiny"),
    option("live", bool, "Take the pinned Hub checkpoints instead of random ones.", default=False),
    option("jobs", int, "Number of parallel processes.", default=1, min=1),
    option("seed", int, "Seed of weights and batches.", default=0),
    option("markdown", Path, "Also write the page to this file."),
    option("out", Path, "Also write the JSON to this file."), JSON,
))  # fmt: skip
def command(
    families: list[str] | None,
    heads: list[str] | None,
    checks: list[str] | None,
    size: str,
    live: bool,
    markdown: Path | None,
    out: Path | None,
    json_output: bool,
    **run: int,
) -> None:
    """Prove each cell: configuration, names, forward, gradients, training, export, adapters, predictions, precision.

    Lists may be given with commas. Exit status 0 if no cell failed, 1 otherwise, 2 for names that do not exist.
    """
    from flodl_hf.parity.matrix import (
        as_json,
        as_markdown,
        as_text,
        check_names,
        provenance,
        run_matrix,
        select_cells,
    )

    try:
        cells = select_cells(_split(families), _split(heads), size)
        check_names(_split(checks))
    except FlodlError as fault:
        # A name that does not exist is wrong usage, and not a result of the matrix.
        say(f"{type(fault).__name__}: {fault}")
        raise typer.Exit(2) from None
    results = []
    with progress() as bar:
        task = bar.add_task("cells", total=len(cells), note="")
        for result in run_matrix(cells, size=size, checks=_split(checks), live=live, **run):
            results.append(result)
            bar.update(task, advance=1, note=f"{result.cell.name}: {result.status}")
            if bar.disable:
                say(f"{result.cell.name:<28}{result.status:<12}{result.seconds:.1f} s")
    results.sort(key=lambda r: cells.index(r.cell))
    facts = provenance("live" if live else size, " ".join(["flodl-hf", *sys.argv[1:]]))
    if markdown is not None:
        markdown.write_text(as_markdown(results, facts), "utf-8")
    if out is not None:
        out.write_text(json.dumps(as_json(results, facts), indent=2) + "\n", "utf-8")
    if json_output:
        emit_json(as_json(results, facts))
    else:
        tell(as_text(results))
    raise typer.Exit(1 if any(r.status == "fail" for r in results) else 0)


def _split(values: list[str] | None) -> list[str]:
    return [word for value in values or [] for word in value.split(",") if word]

"""``flodl-hf verify-matrix``: every family with every head against transformers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from flodl.errors import FlodlError
from flodl_hf.cli.shared import Json, emit_json, progress, reporting, say, tell


@reporting
def command(
    families: Annotated[list[str] | None, typer.Option("--families", help="Model types; all by default.")] = None,
    heads: Annotated[
        list[str] | None, typer.Option("--heads", help="base, seqcls, tokcls, qa, mlm; all by default.")
    ] = None,
    checks: Annotated[list[str] | None, typer.Option("--checks", help="Names of checks; all by default.")] = None,
    size: Annotated[
        Literal["tiny", "real"], typer.Option(help="tiny (seconds) or real (base shapes of each family; many minutes).")
    ] = "tiny",
    live: Annotated[
        bool, typer.Option("--live", help="Take the pinned Hub checkpoints instead of random ones.")
    ] = False,
    jobs: Annotated[int, typer.Option(help="Number of parallel processes.", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = 0,
    markdown: Annotated[Path | None, typer.Option(help="Also write the page to this file.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")] = None,
    json_output: Json = False,
) -> None:
    """Prove each cell: configuration, names, forward, gradients, training, export, adapters, predictions, precision.

    Lists may be given with commas. Exit status 0 if no cell failed, 1 otherwise, 2 for names that do not exist.
    """
    from flodl_hf.parity.matrix import expect_checks, run_matrix, select_cells
    from flodl_hf.parity.report import as_json, as_markdown, as_text, provenance

    try:
        cells = select_cells(_split(families), _split(heads), size)
        expect_checks(_split(checks))
    except FlodlError as fault:
        # A name that does not exist is wrong usage, and not a result of the matrix.
        say(f"{type(fault).__name__}: {fault}")
        raise typer.Exit(2) from None
    results = []
    with progress() as bar:
        task = bar.add_task("cells", total=len(cells), note="")
        for result in run_matrix(cells, size=size, checks=_split(checks), jobs=jobs, seed=seed, live=live):
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

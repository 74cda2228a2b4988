"""``flodl-hf runs``: the records of runs, shown side by side or as files."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import typer

from flodl_hf.cli.options import JSON, REQUIRED, argument, option, with_parameters
from flodl_hf.cli.shared import emit_json, reporting, say, tell

app = typer.Typer(help="Look at runs and their records.", no_args_is_help=True, pretty_exceptions_enable=False)

FOLDER = argument("folder", Path, "DIR", "A folder of runs, each with its run.jsonl.")


def _folder_of_records(folder: Path) -> Path:
    """Return a folder of runs; for the folder of a model without records, ``<folder>.logs``."""
    logs = Path(f"{folder}.logs")
    return logs if logs.is_dir() and next(folder.rglob("run*.jsonl"), None) is None else folder


@app.callback()
def group() -> None:
    """Look at runs and their records."""


@app.command(name="serve")
@reporting
@with_parameters((FOLDER, option("port", int, "Port of this machine.", "--port", "-p", min=0, max=65535)))
def serve(folder: Path, port: int | None) -> None:
    """Show the runs below DIR on a page of this machine, side by side, until Ctrl-C; runs that grow are followed."""
    from flodl.monitor import RunFolder

    with RunFolder(_folder_of_records(folder)) as runs:
        url = runs.serve(port)
        for path, problem in runs.problems.items():
            say(f"ignored {path}: {problem}", fg="yellow")
        count = len(runs.store.records)
        say(f"{count} run{'s' * (count != 1)} below {folder}")
        tell(url)
        with suppress(KeyboardInterrupt):  # which is how this ends
            runs.wait()


@app.command(name="list")
@reporting
@with_parameters((FOLDER, JSON))
def listed(folder: Path, json_output: bool) -> None:
    """Print the runs below DIR: where they are, how they ended, and their last figures."""
    from flodl.monitor import RunFolder

    with RunFolder(_folder_of_records(folder)) as runs:
        records = sorted(runs.store.records.values(), key=lambda record: record.began)
        rows = [
            {
                "name": record.name,
                "status": record.state.get("status"),
                "step": record.state.get("step"),
                "total": record.state.get("total"),
                "seconds": round(record.t, 1),
                "figures": {
                    name: series.latest
                    for name, series in record.series.items()
                    if name.startswith(("train/loss", "eval/"))
                },
            }
            for record in records
        ]
    if json_output:
        emit_json(rows)
        return
    for row in rows:
        figures = ", ".join(f"{name} {value:.4f}" for name, value in row["figures"].items() if value is not None)
        tell(f"{row['name']:<32} {row['status'] or 'waiting':<10} step {row['step'] or 0:,}  {figures}")
    if not rows:
        say(f"no run below {folder}")


@app.command(name="save")
@reporting
@with_parameters((
    FOLDER, option("out", Path, "File to write: .html, which opens offline.", "--out", "-o", default=REQUIRED),
))  # fmt: skip
def save(folder: Path, out: Path) -> None:
    """Write the page of all runs below DIR as one file that opens offline."""
    from flodl.files import write_atomically
    from flodl.monitor import RunFolder

    with RunFolder(_folder_of_records(folder)) as runs:
        write_atomically(out, [runs.page().encode()])
    tell(f"written to {out}")

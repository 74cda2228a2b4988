"""``flodl-hf new``: a project for fine-tuning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flodl_hf.cli.error_text import command_line
from flodl_hf.cli.shared import Json, emit_json, reporting, say, tell

TASKS = "The task: seqcls, ner, qa, mlm, choice, embedding or rank."


@reporting
def command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    task: Annotated[str, typer.Option("--task", "-t", help=TASKS)] = "seqcls",
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="The start: a folder or a Hub name (default DistilBERT).")
    ] = None,
    json_output: Json = False,
) -> None:
    """Write a project for fine-tuning: a recipe, example data, a test, and a page with the next steps."""
    from flodl_hf.cli.project import new_project

    files = new_project(folder, task=task, model=model)
    if json_output:
        emit_json({"folder": str(folder), "files": [str(path.relative_to(folder)) for path in files]})
        return
    for path in files:
        tell(str(path))
    say(f"next: {command_line('cd', folder)}; flodl-hf finetune --recipe recipe.yaml --dry-run")

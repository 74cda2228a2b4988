"""``flodl-hf new``: a folder to begin a fine-tune from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flodl_hf.cli.shared import Json, emit_json, reporting, say, tell
from flodl_hf.cli.spelling import command_line

TASKS = "What is learned: seqcls, ner, qa, mlm, choice, embedding or rank."


@reporting
def command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where; a folder that is not there yet, or empty.")],
    task: Annotated[str, typer.Option("--task", "-t", help=TASKS)] = "seqcls",
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="What to start from: a folder or a Hub name; else DistilBERT.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Begin a fine-tune: a recipe, a few rows of data to replace, a test, and a page that says how to go on."""
    from flodl_hf.cli.project import new_project

    files = new_project(folder, task=task, model=model)
    if json_output:
        emit_json({"folder": str(folder), "files": [str(path.relative_to(folder)) for path in files]})
        return
    for path in files:
        tell(str(path))
    say(f"next: {command_line('cd', folder)}; flodl-hf finetune --recipe recipe.yaml --dry-run")

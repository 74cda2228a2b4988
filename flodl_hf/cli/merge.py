"""``flodl-hf merge``: a base and an adapter to one folder, which anything loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flodl_hf.cli.error_text import command_line
from flodl_hf.cli.shared import Json, Local, Revision, emit_json, reporting, say, tell


@reporting
def command(
    base: Annotated[str, typer.Argument(metavar="BASE", help="The model below, a local folder or a Hub name.")],
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help="The adapter, a local folder or a Hub name.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write.")],
    head: Annotated[str, typer.Option("--head", help="The task, if the adapter does not specify it.")] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a folder that contains a model.")] = False,
    revision: Revision = None,
    local_files_only: Local = False,
    json_output: Json = False,
) -> None:
    """Write a model with an adapter's sum or scales in its weights, and the adapter's head.

    Each weight is summed in float64 and rounded once. Prompts and prefixes cannot be merged and are refused.
    """
    from flodl_hf.heads.auto import load

    # Unchanged weights stay memory-mapped, so that any size works.
    shown: dict[str, Any] = {"mapped": True, "weights": "memory"}
    model = load(base, head=head, adapter=adapter, revision=revision, local_files_only=local_files_only, **shown)
    model.merge_and_unload().save_pretrained(out, overwrite=overwrite)
    if json_output:
        emit_json({"folder": str(out), "task": model.head})
        return
    tell(str(out))
    say("check it: " + command_line("flodl-hf", "verify-export", out, "--no-source"))

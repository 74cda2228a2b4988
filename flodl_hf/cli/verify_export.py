"""``flodl-hf verify-export``: an exported folder, reopened and compared."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from flodl_hf.cli.options import JSON, LOCAL, argument, option, with_parameters
from flodl_hf.cli.shared import emit_json, reporting, say, tell

MARKS = {"pass": "pass", "fail": "FAIL", "not run": "  - "}


@reporting
@with_parameters((
    argument("folder", Path, "DIR", "The exported folder."),
    option("source", str, "Source of the export: a folder or a Hub name."),
    option("no_source", bool, "There is no source (a fine-tuned model).", default=False),
    option("no_receipt", bool, "Do not write verification.json into the folder.", default=False), LOCAL, JSON,
))  # fmt: skip
def command(
    folder: Path, source: str | None, no_source: bool, no_receipt: bool, local_files_only: bool, json_output: bool
) -> None:
    """Compare names, dtypes and bytes with the source, then keys, token ids and outputs with transformers.

    Writes a receipt (verification.json). Exit status 0 if everything passed, 1 if anything failed.
    """
    if source is not None and no_source:
        say("give --source or --no-source, not both")
        raise typer.Exit(2)
    from flodl_hf.checkpoints.folders import MODEL_FILES
    from flodl_hf.checkpoints.hub.download import resolve_folder
    from flodl_hf.export.verify import RECEIPT, verify_export

    base = None
    if source is not None:
        base, _ = resolve_folder(source, {"local_files_only": local_files_only}, MODEL_FILES)
    elif not no_source:
        say("no --source was given, so the bytes cannot be checked; comparing with transformers alone")
    result = verify_export(folder, source=base, receipt=not no_receipt, command=" ".join(["flodl-hf", *sys.argv[1:]]))
    if json_output:
        emit_json(result.to_dict())
    else:
        for check in result.checks:
            tell(f"{MARKS[check.status]}  {check.name}: {check.detail}")
        tell("passed" if result.passed else "FAILED", fg="green" if result.passed else "red")
        if not no_receipt and folder.is_dir():
            say(f"receipt: {folder / RECEIPT}")
    raise typer.Exit(0 if result.passed else 1)

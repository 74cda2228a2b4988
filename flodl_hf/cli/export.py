"""``flodl-hf export``: a checkpoint read and written back as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flodl_hf.cli.choices import DtypeWord, Head, HeadWord
from flodl_hf.cli.shared import Json, Local, Model, Revision, emit_json, reporting, say, tell

NAME = "export"


@reporting
def command(
    model: Model,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write.")],
    head: Head = HeadWord.auto,
    dtype: Annotated[DtypeWord | None, typer.Option(help="Cast the weights to this.")] = None,
    max_shard_size: Annotated[str | None, typer.Option(help="Cut the weights above this size, e.g. 5GB.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a folder that holds a model.")] = False,
    revision: Revision = None,
    local_files_only: Local = False,
    json_output: Json = False,
) -> None:
    """Write MODEL as a folder: weights, configuration and tokenizer, in one step, compared after writing.

    An unchanged model gives the bytes it was read from.
    """
    from flodl_hf.auto import load

    loaded = load(model, head=head, dtype=dtype, revision=revision, local_files_only=local_files_only)
    report = loaded.load_report
    if report is not None and report.new:
        say(f"note: {len(report.new)} tensors are new and untrained: {', '.join(report.new)}")
    written = loaded.save_pretrained(out, overwrite=force, max_shard_size=max_shard_size)
    files = {p.relative_to(written).as_posix(): p.stat().st_size for p in sorted(written.rglob("*")) if p.is_file()}
    if json_output:
        emit_json({"folder": str(written), "head": loaded.head, "files": files})
        return
    tell(str(written))
    for name, size in files.items():
        tell(f"  {name:<32}{size:>14,} bytes")
    say(f"check it with: flodl-hf verify-export {out} --source {model}")

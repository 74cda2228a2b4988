"""``flodl-hf export``: a checkpoint read and written back as a Hugging Face folder, or a graph's file made one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flodl_hf.cli.choices import DtypeWord, Head, HeadWord
from flodl_hf.cli.shared import Json, Local, Revision, emit_json, reporting, say, tell

NAME = "export"


@reporting
def command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A folder, a Hub name, or a graph's checkpoint: .fdl, .fdl.gz, .safetensors."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write.")],
    like: Annotated[
        str | None, typer.Option(help="For a graph's checkpoint: a folder with its configuration and tokenizer.")
    ] = None,
    labels: Annotated[
        str | None, typer.Option(help="For a graph's checkpoint: names of its classes, as a,b,c.")
    ] = None,
    head: Head = HeadWord.auto,
    dtype: Annotated[DtypeWord | None, typer.Option(help="Cast the weights to this.")] = None,
    max_shard_size: Annotated[str | None, typer.Option(help="Cut the weights above this size, e.g. 5GB.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a folder that holds a model.")] = False,
    revision: Revision = None,
    local_files_only: Local = False,
    json_output: Json = False,
) -> None:
    """Write MODEL as a folder: weights, configuration and tokenizer, in one step, compared after writing.

    An unchanged model gives the bytes it was read from. A graph's checkpoint holds tensors alone: configuration and
    tokenizer come from --like, or from <stem>.config.json beside it; what was written is compared with the file.
    """
    from flodl_hf.export.graph_file import export_graph_file, is_graph_file

    if is_graph_file(model):
        found = export_graph_file(
            model, out, like=like, head=head, labels=None if labels is None else labels.split(","), dtype=dtype,
            max_shard_size=max_shard_size, overwrite=force, revision=revision, local_files_only=local_files_only,
        )  # fmt: skip
        structure = "for this structure" if found.checked else "without saying for which structure"
        say(f"{found.tensors} tensors with names of {'a graph' if found.names == 'ours' else found.names}, {structure}")
        _show(found.folder, found.head, json_output)
        say(f"check it with: flodl-hf verify-export {out} --no-source")
        return
    if like is not None or labels is not None:
        raise typer.BadParameter(f"--like and --labels are for a graph's checkpoint, and {model} is none")
    from flodl_hf.auto import load

    loaded = load(model, head=head, dtype=dtype, revision=revision, local_files_only=local_files_only)
    report = loaded.load_report
    if report is not None and report.new:
        say(f"note: {len(report.new)} tensors are new and untrained: {', '.join(report.new)}")
    written = loaded.save_pretrained(out, overwrite=force, max_shard_size=max_shard_size)
    _show(written, loaded.head, json_output)
    if not json_output:
        say(f"check it with: flodl-hf verify-export {out} --source {model}")


def _show(folder: Path, head: str, json_output: bool) -> None:
    files = {p.relative_to(folder).as_posix(): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
    if json_output:
        emit_json({"folder": str(folder), "head": head, "files": files})
        return
    tell(str(folder))
    for name, size in files.items():
        tell(f"  {name:<32}{size:>14,} bytes")

"""``flodl-hf export``: a model as a Hugging Face folder, from a folder or a graph's file; or for another engine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from flodl_hf.cli.command import command_line
from flodl_hf.cli.options import (
    DTYPES,
    ENGINES,
    HEAD,
    JSON,
    LOCAL,
    OUT,
    REPLACE,
    REVISION,
    argument,
    option,
    with_parameters,
)
from flodl_hf.cli.shared import emit_json, reporting, say, tell

if TYPE_CHECKING:
    from flodl_hf.export.engine import EngineFile


@reporting
@with_parameters((
    argument("model", str, "MODEL", "A folder, a Hub name, or a graph's checkpoint: .fdl, .fdl.gz, .safetensors."), OUT,
    option("format", ENGINES, "safetensors, or for another engine: onnx, torch-export.", default="safetensors"),
    option("opset", int, "Of ONNX: the version of its operators; 18 by default.", min=1),
    option("like", str, "For a graph's checkpoint: a folder with its configuration and tokenizer."),
    option("labels", str, "For a graph's checkpoint: names of its classes, as a,b,c."), HEAD,
    option("dtype", DTYPES, "Cast the weights to this."),
    option("max_shard_size", str, "Cut the weights above this size, e.g. 5GB."), REPLACE, REVISION, LOCAL, JSON,
))  # fmt: skip
def command(
    model: str,
    out: Path,
    format: str,
    opset: int | None,
    like: str | None,
    labels: str | None,
    head: str,
    dtype: Any,
    max_shard_size: str | None,
    overwrite: bool,
    revision: str | None,
    local_files_only: bool,
    json_output: bool,
) -> None:
    """Write MODEL as a folder: weights, configuration and tokenizer, in one step, compared after writing.

    An unchanged model is written with its original bytes. A graph's checkpoint has only tensors: configuration and
    tokenizer are read from --like, or from the sidecar <stem>.config.json; the result is compared with the file.

    With --format onnx or torch-export the model is written in float32 for batches of any shape, and published only if
    that engine's outputs match the model's on edge-case batches; verification.json contains the differences.
    """
    from flodl_hf.export.graph_file import export_graph_file, is_graph_file

    if format != "safetensors":
        _check_engine(model, format, is_graph_file(model), opset, dtype, max_shard_size)
    elif opset is not None:
        raise typer.BadParameter("--opset is for --format onnx")
    elif is_graph_file(model):
        found = export_graph_file(
            model, out, like=like, head=head, labels=None if labels is None else labels.split(","), dtype=dtype,
            max_shard_size=max_shard_size, overwrite=overwrite, revision=revision, local_files_only=local_files_only,
        )  # fmt: skip
        structure = "for this structure" if found.checked else "without a structural hash"
        say(f"{found.tensors} tensors with names of {'a graph' if found.names == 'ours' else found.names}, {structure}")
        _show(found.folder, found.head, json_output)
        say("check it with: " + command_line("flodl-hf", "verify-export", out, "--no-source"))
        return
    if like is not None or labels is not None:
        raise typer.BadParameter(f"--like and --labels are for a graph's checkpoint, and {model} is none")
    from flodl_hf.heads.auto import load

    if format != "safetensors":
        dtype = "float32"
    # Weights that are only rewritten stay memory-mapped, so that any size works.
    shown: dict[str, Any] = {"mapped": True, "weights": "memory"} if format == "safetensors" else {}
    loaded = load(model, head=head, dtype=dtype, revision=revision, local_files_only=local_files_only, **shown)
    if new := loaded.untrained:
        say(f"note: {len(new)} tensors are new and untrained: {', '.join(new)}")
    if format != "safetensors":
        from flodl_hf.export.engine import OPSET, export_onnx, export_program

        line = command_line("flodl-hf", *sys.argv[1:])
        if format == "onnx":
            made = export_onnx(loaded, out, opset=OPSET if opset is None else opset, overwrite=overwrite, command=line)
        else:
            made = export_program(loaded, out, overwrite=overwrite, command=line)
        _show_engine(made, loaded.head, json_output)
        return
    written = loaded.save_pretrained(out, overwrite=overwrite, max_shard_size=max_shard_size)
    _show(written, loaded.head, json_output)
    if not json_output and loaded.active_adapter is not None:
        say("check it with: " + command_line("flodl-hf", "verify", out))
    elif not json_output:
        # A cast changes the compared bytes, so a comparison with the source would only report the cast.
        beside = ["--no-source"] if dtype is not None else ["--source", model]
        say("check it with: " + command_line("flodl-hf", "verify-export", out, *beside))


def _show(folder: Path, head: str, json_output: bool) -> None:
    files = {p.relative_to(folder).as_posix(): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
    if json_output:
        emit_json({"folder": str(folder), "head": head, "files": files})
        return
    tell(str(folder))
    for name, size in files.items():
        tell(f"  {name:<32}{size:>14,} bytes")


def _check_engine(
    model: str, format: str, is_graph: bool, opset: int | None, dtype: str | None, shards: str | None
) -> None:
    """Refuse options that have no meaning for another engine."""
    if is_graph:
        raise typer.BadParameter(
            f"{model} contains tensors alone; write it as a folder first, then that folder as {format}"
        )
    if opset is not None and format != "onnx":
        raise typer.BadParameter("--opset is for --format onnx")
    if shards is not None:
        raise typer.BadParameter("--max-shard-size is for --format safetensors")
    if dtype not in (None, "float32"):
        raise typer.BadParameter(
            f"--format {format} writes float32, in which the engine is compared; leave out --dtype"
        )


def _show_engine(made: EngineFile, head: str, json_output: bool) -> None:
    if json_output:
        emit_json({"folder": str(made.folder), "head": head, **made.receipt.to_dict()})
        return
    for check in made.receipt.checks:
        tell(f"{check.status}  {check.name}: {check.detail}")
    names = [f"{name} ({', '.join(axes)})" for name, axes in (*made.inputs.items(), *made.outputs.items())]
    tell(f"inputs: {', '.join(names[: len(made.inputs)])}")
    tell(f"outputs: {', '.join(names[len(made.inputs) :])}")
    _show(made.folder, head, False)

"""``flodl-hf encode``: a file of texts in, a file of vectors out."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from flodl_hf.cli.choices import FaultChoice
from flodl_hf.cli.options import (
    Device,
    Devices,
    Format,
    PartRows,
    Precision,
    Restart,
    TextColumn,
    Weights,
    Windows,
    file_option,
)
from flodl_hf.cli.shared import Json, Local, Model, Revision, device_said, reporting


class Stored(StrEnum):
    """How the numbers of vectors are kept."""

    float32 = "float32"
    float16 = "float16"
    int8 = "int8"
    uint8 = "uint8"
    binary = "binary"
    ubinary = "ubinary"


@reporting
def command(
    model: Model,
    source: Annotated[
        str,
        file_option(
            "--in",
            "-i",
            says="CSV, TSV, JSON lines, Parquet, Arrow or text file (a row a line); - is standard input.",
        ),
    ],
    out: Annotated[Path, file_option("--out", "-o", says="File to write: .npy, .parquet, .arrow or .jsonl.")],
    text_column: TextColumn = None,
    input_format: Format = None,
    keep: Annotated[
        str | None, file_option("--keep", says="Columns to keep next to the vector: all, none, or a,b; by default all.")
    ] = None,
    store: Annotated[
        Stored, typer.Option("--store", help="How numbers are kept: whole, in half, in a byte or in a bit each.")
    ] = Stored.float32,
    dim: Annotated[int | None, typer.Option("--dim", min=1, help="Truncate embeddings to this dimension.")] = None,
    prompt: Annotated[str, typer.Option("--prompt", help="Put before each text.")] = "",
    prompt_name: Annotated[
        str | None, typer.Option("--prompt-name", help="A prompt of the folder, put before each text.")
    ] = None,
    route: Annotated[
        str | None,
        typer.Option("--route", help="The way of these texts, where the folder has several: query or document."),
    ] = None,
    windows: Windows = False,
    on_error: Annotated[
        FaultChoice,
        file_option("--on-error", says="Rows without a text; null writes no vector and the reason (not to .npy)."),
    ] = FaultChoice.stop,
    part_rows: PartRows = None,
    restart: Restart = False,
    devices: Devices = None,
    precision: Precision = None,
    weights: Weights = None,
    device: Device = "auto",
    revision: Revision = None,
    local_files_only: Local = False,
    json_output: Json = False,
) -> None:
    """Write the vectors of a file's texts, in its order, as sentence-transformers' encode makes them.

    Parquet, Arrow and JSON lines keep the columns of the file next to the vector; .npy has vectors alone. A file may
    have any number of rows; the same command resumes an interrupted run.
    """
    from flodl_hf.checkpoints.hub.folders import expect_tokenizer
    from flodl_hf.checkpoints.weights.prefetch import prefetching
    from flodl_hf.cli.predict import file_to_file
    from flodl_hf.cli.vectors import check_target
    from flodl_hf.inference.vector_files import SUFFIXES
    from flodl_hf.jobs import encode_file

    check_target(out, SUFFIXES)
    expect_tokenizer(model, "encode")
    said: dict[str, Any] = {
        "text_column": text_column, "format": input_format, "keep": keep, "store": str(store), "truncate_dim": dim,
        "prompt": prompt or None, "prompt_name": prompt_name, "route": route, "part_rows": part_rows,
        "devices": devices, "precision": precision, "revision": revision, "weights": weights,
    }  # fmt: skip
    said = {name: value for name, value in said.items() if value is not None}
    said |= {"windows": True} if windows else {}
    said |= {"on_error": on_error, "restart": restart, "local_files_only": local_files_only}
    with prefetching(model, {"device": device if devices is None else None, "weights": weights}):
        if devices is None:
            said["device"] = device_said(device)
        file_to_file(
            encode_file,
            model,
            source,
            out,
            said,
            json_output,
            "encoding",
            empty="they have the vector of an empty text",
        )

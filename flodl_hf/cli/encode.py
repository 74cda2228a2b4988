"""``flodl-hf encode``: a file of texts in, a file of vectors out."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from flodl_hf.cli.choices import FaultWord, FormatWord, PrecisionWord, WeightsWord
from flodl_hf.cli.shared import Json, Local, Model, Revision, device_said, reporting

NAME = "encode"


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
        typer.Option("--in", "-i", help="CSV, TSV, JSON lines, Parquet, Arrow or text file; - is standard input."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write: .npy, .parquet, .arrow or .jsonl.")],
    text_column: Annotated[str | None, typer.Option("--text-column", help="Column of texts.")] = None,
    input_format: Annotated[
        FormatWord | None, typer.Option("--format", help="By default by the suffix of the file.")
    ] = None,
    keep: Annotated[
        str | None, typer.Option("--keep", help="Columns to keep beside the vector: all, none, or a,b; by default all.")
    ] = None,
    store: Annotated[
        Stored, typer.Option("--store", help="How numbers are kept: whole, in half, in a byte or in a bit each.")
    ] = Stored.float32,
    dim: Annotated[int | None, typer.Option("--dim", min=1, help="Keep so many features.")] = None,
    prompt: Annotated[str, typer.Option("--prompt", help="Put before each text.")] = "",
    prompt_name: Annotated[
        str | None, typer.Option("--prompt-name", help="A prompt of the folder, put before each text.")
    ] = None,
    route: Annotated[
        str | None,
        typer.Option("--route", help="The way of these texts, where the folder has several: query or document."),
    ] = None,
    on_error: Annotated[
        FaultWord,
        typer.Option("--on-error", help="Rows without a text; null writes no vector and the reason (not to .npy)."),
    ] = FaultWord.stop,
    part_rows: Annotated[
        int | None, typer.Option("--part-rows", help="Rows in a part; 2,048 on a CPU, 32,768 on CUDA.", min=1)
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Begin anew: throw away parts and output of an earlier run.")
    ] = False,
    devices: Annotated[
        str | None,
        typer.Option("--devices", help="How many processes, or their devices: 2, cuda:0,cuda:1, or auto for all."),
    ] = None,
    precision: Annotated[PrecisionWord | None, typer.Option("--precision", help="Of the arithmetic.")] = None,
    weights: Annotated[
        WeightsWord | None,
        typer.Option(
            "--weights",
            help="disk leaves them in their files and reads layer after layer; by default where memory has no room.",
        ),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", help="cpu, cuda, cuda:1, mps, or auto for the best device there is.")
    ] = "auto",
    revision: Revision = None,
    local_files_only: Local = False,
    json_output: Json = False,
) -> None:
    """Write the vectors of a file's texts, in its order, as sentence-transformers' encode makes them.

    Parquet, Arrow and JSON lines keep the columns of the file beside the vector; .npy holds vectors alone. A file may
    have any number of rows; the same command goes on where it was ended.
    """
    from flodl_hf.bulk import encode_file
    from flodl_hf.cli.predict import file_to_file
    from flodl_hf.cli.vectors import check_target
    from flodl_hf.vectors.files import SUFFIXES
    from flodl_hf.weights.early import beginning

    check_target(out, SUFFIXES)
    said: dict[str, Any] = {
        "text_column": text_column, "format": input_format, "keep": keep, "store": str(store), "truncate_dim": dim,
        "prompt": prompt or None, "prompt_name": prompt_name, "route": route, "part_rows": part_rows,
        "devices": devices, "precision": precision, "revision": revision, "weights": weights,
    }  # fmt: skip
    said = {name: value for name, value in said.items() if value is not None}
    said |= {"on_error": on_error, "restart": restart, "local_files_only": local_files_only}
    with beginning(model, {"device": device if devices is None else None, "weights": weights}):
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

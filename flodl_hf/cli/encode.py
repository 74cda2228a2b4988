"""``flodl-hf encode``: a file of texts in, a file of vectors out."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from flodl_hf.cli.choices import PrecisionWord
from flodl_hf.cli.shared import Json, Local, Model, Revision, emit_json, reporting, tell

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
    source: Annotated[str, typer.Option("--in", "-i", help="CSV, TSV, JSON lines, Parquet, Arrow or text file.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write: .npy, .parquet or .jsonl.")],
    text_column: Annotated[str | None, typer.Option("--text-column", help="Column of texts.")] = None,
    store: Annotated[
        Stored, typer.Option("--store", help="How numbers are kept: whole, in half, in a byte or in a bit each.")
    ] = Stored.float32,
    dim: Annotated[int | None, typer.Option("--dim", min=1, help="Keep so many features.")] = None,
    prompt: Annotated[str, typer.Option("--prompt", help="Put before each text.")] = "",
    precision: Annotated[PrecisionWord | None, typer.Option("--precision", help="Of the arithmetic.")] = None,
    device: Annotated[
        str, typer.Option("--device", help="cpu, cuda, cuda:1, mps, or auto for the best device there is.")
    ] = "auto",
    revision: Revision = None,
    local_files_only: Local = False,
    json_output: Json = False,
) -> None:
    """Write the vectors of a file's texts, in its order, as sentence-transformers' encode makes them.

    Parquet and JSON lines keep the columns of the file beside the vector; .npy holds vectors alone.
    """
    from flodl_hf.cli.vectors import check_target, encoder, texts_of
    from flodl_hf.vectors.files import SUFFIXES, write_vectors
    from flodl_hf.vectors.quantize import quantize_embeddings

    check_target(out, SUFFIXES)
    texts, rows = texts_of(source, text_column)
    encode = encoder(model, revision, local_files_only, device, precision)
    vectors = encode(texts, truncate_dim=dim, prompt=prompt or None)
    kept = quantize_embeddings(vectors, str(store))
    names = list(rows[0])
    write_vectors(out, kept, {name: [row.get(name) for row in rows] for name in names})
    if json_output:
        emit_json({"file": str(out), "vectors": len(kept), "size": kept.shape[1], "store": str(store)})
    else:
        tell(f"{len(kept):,} vectors of {kept.shape[1]} numbers ({store}) in {out}")

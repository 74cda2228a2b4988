"""``flodl-hf encode``: a file of texts in, a file of vectors out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flodl_hf.cli import options as shared
from flodl_hf.cli.options import FILE, ON_ERROR, REQUIRED, STORES, chosen, option, with_parameters
from flodl_hf.cli.shared import reporting

_KEEP = "Columns to keep next to the vector: all, none, or a,b; by default all."
_ROUTE = "The way of these texts, where the folder has several: query or document."
_ON_ERROR = "Rows without a text; null writes no vector and the reason (not to .npy)."
OUT = option("out", Path, "File to write: .npy, .parquet, .arrow or .jsonl.", "--out", "-o", default=REQUIRED,
             panel=FILE)  # fmt: skip
OPTIONS = (
    shared.TEXT_COLUMN,
    shared.FORMAT,
    option("keep", str, _KEEP, panel=FILE),
    option("store", STORES, "How numbers are kept: whole, in half, in a byte or in a bit each.", default="float32"),
    option("truncate_dim", int, "Truncate embeddings to this dimension.", "--dim", min=1),
    option("prompt", str, "Put before each text.", default=""),
    option("prompt_name", str, "A prompt of the folder, put before each text."),
    option("route", str, _ROUTE),
    shared.LONG,
    option("on_error", ON_ERROR, _ON_ERROR, default="stop", panel=FILE),
    shared.PART_ROWS,
    shared.OVERWRITE,
    shared.DEVICES,
    shared.PRECISION,
    shared.BATCH_SIZE,
    shared.WEIGHT,
    shared.REVISION,
    shared.LOCAL,
)
"""Keywords of `flodl_hf.jobs.encode_file`."""


@reporting
@with_parameters((shared.MODEL, shared.SOURCE, OUT, *OPTIONS, shared.DEVICE, shared.JSON))
def command(model: str, source: str, out: Path, device: str, json_output: bool, **values: Any) -> None:
    """Write the vectors of a file's texts, in its order, as sentence-transformers' encode makes them.

    Parquet, Arrow and JSON lines keep the columns of the file next to the vector; .npy has vectors alone. A file may
    have any number of rows; the same command resumes an interrupted run.
    """
    from flodl_hf.checkpoints.folders import expect_tokenizer
    from flodl_hf.cli.predict import process_file
    from flodl_hf.cli.vectors import check_target
    from flodl_hf.inference.vector_files import SUFFIXES

    check_target(out, SUFFIXES)
    expect_tokenizer(model, "encode")
    options, empty = chosen(values, OPTIONS), "they have the vector of an empty text"
    process_file("encode_file", model, source, out, options, device, json_output, doing="encoding", empty=empty)

"""Vectors in files: arrays of numpy, Parquet, Arrow, JSON lines. A file is whole or as it was before."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flodl.errors import DataError
from flodl_hf.tokenization.readers.arrow import need_pyarrow

SUFFIXES = (".npy", ".parquet", ".arrow", ".jsonl")
COLUMN = "vector"


def ranges_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of the ranges of int8 vectors: ``(2, size)``, the minimum and maximum of each feature."""
    return Path(f"{os.fspath(path)}.ranges.npy")


def read_vectors(path: str | os.PathLike[str]) -> NDArray[Any]:
    """Return the vectors of a file, ``(n, size)``.

    Raises:
        DataError: the file contains none, or cannot be read.
    """
    kind = Path(path).suffix.lower()
    if kind not in SUFFIXES:
        raise DataError(f"{path}: the suffix {kind or '(none)'!r} names no format; expected {', '.join(SUFFIXES)}")
    try:
        if kind == ".npy":
            found = np.load(path, allow_pickle=False, mmap_mode="r")  # read as it is asked for
        elif kind == ".jsonl":
            lines = Path(path).read_text("utf-8").splitlines()
            found = np.asarray([json.loads(line)[COLUMN] for line in lines])
            # Whole numbers are bytes; of each feature the least is the least that its kind has.
            kind_of = np.float32 if found.dtype.kind == "f" else np.int8 if found.min(initial=0) < 0 else np.uint8
            found = found.astype(kind_of)
        else:
            arrow = need_pyarrow(str(path))
            if kind == ".parquet":
                column = arrow.parquet.read_table(path, columns=[COLUMN])[COLUMN].combine_chunks()
            else:
                with arrow.memory_map(str(path)) as source:
                    column = arrow.ipc.open_file(source).read_all()[COLUMN].combine_chunks()
            found = column.flatten().to_numpy().reshape(len(column), -1)
    except (ValueError, KeyError, OSError, EOFError) as fault:
        raise DataError(
            f"{path}: contains no vectors that can be read ({fault}); expected a file written by encode"
        ) from None
    if found.ndim != 2:
        raise DataError(f"{path}: found an array of shape {found.shape}; expected vectors (n, size)", found=found.shape)
    return found

"""Rows out of Parquet and Arrow files, and out of data frames, through pyarrow.

pyarrow is an extra; this file and `columnar.py` import it, and only when such data is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flodl.errors import DataError

__all__ = ["is_table", "read_arrow_file", "rows_of_table"]


def is_table(source: Any) -> bool:
    """Return whether ``source`` is a table by columns: it speaks Arrow, and its items are not rows."""
    return hasattr(source, "__arrow_c_stream__") and not hasattr(source, "__getitems__")


def rows_of_table(source: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of anything that speaks the Arrow C stream protocol.

    Raises:
        DataError: pyarrow is not installed.
    """
    pyarrow = _pyarrow(f"a {type(source).__name__}")
    yield from _rows(pyarrow.RecordBatchReader.from_stream(source))


def read_arrow_file(path: Path, kind: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file, an Arrow file or an Arrow stream, one batch in memory at a time.

    Args:
        path: the file.
        kind: ``"parquet"`` or ``"arrow"``.

    Raises:
        DataError: pyarrow is not installed, or the file is damaged.
    """
    pyarrow = _pyarrow(str(path))
    try:
        if kind == "parquet":
            from pyarrow import parquet

            with parquet.ParquetFile(path) as file:
                yield from _rows(file.iter_batches())
            return
        with pyarrow.OSFile(str(path)) as file:
            is_file = file.read(6) == b"ARROW1"
            file.seek(0)
            if is_file:
                reader = pyarrow.ipc.open_file(file)
                yield from _rows(reader.get_batch(k) for k in range(reader.num_record_batches))
            else:
                yield from _rows(pyarrow.ipc.open_stream(file))
    except pyarrow.ArrowException as error:
        raise DataError(
            f"{path}: found a file that pyarrow cannot read ({str(error).splitlines()[0]}), expected {kind}; "
            "copy or download it again, or say format=",
            path=str(path),
            problems=[str(error)],
        ) from None


def _rows(batches: Any) -> Iterator[dict[str, Any]]:
    for batch in batches:
        yield from batch.to_pylist()


def _pyarrow(what: str) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        raise DataError(
            f"{what}: reading it needs pyarrow, which is not installed; pip install 'flodl-hf[data]', or convert the "
            "data to CSV, TSV or JSON lines",
            missing="pyarrow",
        ) from None
    return pyarrow

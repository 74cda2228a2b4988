"""Rows out of Parquet and Arrow files, and out of data frames.

How such a file is read is decided in `columnar`, which imports pyarrow, an extra, when one is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flodl.data.columnar import BATCH_ROWS, BatchRows, need_pyarrow

__all__ = ["is_table", "read_arrow_file", "rows_of_table"]


def is_table(source: Any) -> bool:
    """Return whether ``source`` is a table by columns: it speaks Arrow, and its items are not rows."""
    return hasattr(source, "__arrow_c_stream__") and not hasattr(source, "__getitems__")


def rows_of_table(source: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of anything that speaks the Arrow C stream protocol.

    Raises:
        DataError: pyarrow is not installed.
    """
    arrow = need_pyarrow(f"a {type(source).__name__}")
    for batch in arrow.RecordBatchReader.from_stream(source):
        yield from batch.to_pylist()


def read_arrow_file(path: Path, kind: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file, an Arrow file or an Arrow stream, one batch in memory at a time.

    Args:
        path: the file.
        kind: ``"parquet"`` or ``"arrow"``.

    Raises:
        DataError: pyarrow is not installed, or the file is damaged.
    """
    file = BatchRows(path, kind)
    try:
        while rows := file.take(BATCH_ROWS):
            yield from rows
    finally:
        file.close()

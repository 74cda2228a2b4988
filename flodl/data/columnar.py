"""Parquet and Arrow files read some rows at a time, with rows skipped cheaply, and Parquet files written.

Decides how far a file is read, which Arrow type a column of plain values gets, and how tables become the bytes of one
Parquet file. Which rows and columns are wanted is decided by the caller. pyarrow is an extra, imported when such a
file is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flodl.errors import DataError

__all__ = [
    "BATCH_ROWS",
    "BatchRows",
    "arrow_joined",
    "arrow_type",
    "inferred_type",
    "misfits",
    "need_pyarrow",
    "parquet_bytes",
    "parquet_joined",
    "swapped_column",
]

BATCH_ROWS = 1024
GROUP_ROWS = 1 << 16  # rows of a row group of a joined file, unless its bytes are many
GROUP_BYTES = 1 << 26

Kind = str | list[Any] | dict[str, Any]
"""What a column holds: "text", "float" (32 bits), "int", "vector" (floats), "vector:int8:64" (so many numbers of a
dtype), a list of one kind, or a dict of kinds by name."""


def need_pyarrow(what: str) -> Any:
    """Return the pyarrow module.

    Raises:
        DataError: it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            f"{what}: reading or writing it needs pyarrow, which is not installed; pip install 'flodl-hf[data]', or "
            "take CSV, TSV or JSON lines",
            missing="pyarrow",
        ) from None
    return pyarrow


class BatchRows:
    """The rows of a Parquet or Arrow file from front to back; row groups that are skipped are not read.

    Args:
        path: the file.
        kind: ``"parquet"`` or ``"arrow"``.

    Attributes:
        names: the columns.
        total: rows of the file; None for an Arrow stream.

    Raises:
        DataError: pyarrow is not installed, or the file is damaged.
    """

    def __init__(self, path: Path, kind: str) -> None:
        self._path, self._kind = path, kind
        self._arrow = need_pyarrow(str(path))
        self.columns: list[str] | None = None
        self.total: int | None = None
        self._batch: Any = None
        try:
            self._open()
        except (self._arrow.ArrowException, OSError) as error:
            raise self._damaged(error) from None
        self.names: list[str] = list(self.schema.names)

    def _open(self) -> None:
        arrow = self._arrow
        self._group = 0
        self._batches: Iterator[Any] | None = None
        if self._kind == "parquet":
            self._file = arrow.parquet.ParquetFile(self._path)
            self.schema = self._file.schema_arrow
            self.total = self._file.metadata.num_rows
            return
        source = arrow.OSFile(str(self._path))
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        reader = arrow.ipc.open_file(source) if is_file else arrow.ipc.open_stream(source)
        self._file, self.schema = source, reader.schema
        self._batches = (reader.get_batch(k) for k in range(reader.num_record_batches)) if is_file else iter(reader)

    def types(self) -> dict[str, Any]:
        """Return the Arrow type of each column."""
        return {field.name: field.type for field in self.schema}

    def skip(self, count: int) -> int:
        """Pass over ``count`` rows; returns how many there were."""
        passed = 0
        while passed < count:
            if self._kind == "parquet" and self._batch is None and self._batches is None:
                groups = self._file.metadata
                if self._group < groups.num_row_groups:
                    size = groups.row_group(self._group).num_rows
                    if size <= count - passed:
                        self._group += 1
                        passed += size
                        continue
            found = self.take_batch(count - passed)
            if found is None:
                break
            passed += found.num_rows
        return passed

    def take(self, count: int) -> list[dict[str, Any]]:
        """Return the next ``count`` rows, fewer at the end."""
        rows: list[dict[str, Any]] = []
        while len(rows) < count and (found := self.take_batch(count - len(rows))) is not None:
            rows += found.to_pylist()
        return rows

    def close(self) -> None:
        """Close the file."""
        self._batch = self._batches = None
        self._file.close()

    def take_batch(self, most: int) -> Any:
        """Return at most ``most`` rows as a batch; None at the end."""
        try:
            while self._batch is None:
                batches = self._batches
                if batches is None:
                    if self._kind != "parquet" or self._group >= self._file.metadata.num_row_groups:
                        return None
                    batches = self._file.iter_batches(BATCH_ROWS, row_groups=[self._group], columns=self.columns)
                    self._batches = batches
                    self._group += 1
                batch = next(batches, None)
                if batch is None:
                    if self._kind != "parquet":
                        return None
                    self._batches = None
                elif batch.num_rows:
                    self._batch = batch
        except (self._arrow.ArrowException, OSError) as error:
            raise self._damaged(error) from None
        found = self._batch.slice(0, most)
        self._batch = self._batch.slice(most) if self._batch.num_rows > most else None
        return found

    def _damaged(self, error: Exception) -> DataError:
        return DataError(
            f"{self._path}: found a file that pyarrow cannot read ({str(error).splitlines()[0]}), expected "
            f"{self._kind}; copy or download it again, or say format=",
            path=str(self._path),
            problems=[str(error)],
        )


def arrow_type(kind: Kind) -> Any:
    """Return the Arrow type of a kind of value."""
    arrow = need_pyarrow("output")
    if isinstance(kind, list):
        return arrow.list_(arrow_type(kind[0]))
    if isinstance(kind, dict):
        return arrow.struct([arrow.field(name, arrow_type(inner)) for name, inner in kind.items()])
    if kind.startswith("vector:"):
        _, dtype, size = kind.split(":")
        return arrow.list_(arrow.from_numpy_dtype(np.dtype(dtype)), int(size))
    return {
        "text": arrow.string(),
        "float": arrow.float32(),
        "int": arrow.int32(),
        "vector": arrow.list_(arrow.float32()),
    }[kind]


def inferred_type(values: Sequence[Any]) -> Any:
    """Return the Arrow type that holds all of ``values``: text where there are none; None where no type does."""
    arrow = need_pyarrow("output")
    try:
        found = arrow.array(values).type
    except (arrow.ArrowException, OverflowError):
        return None
    return arrow.string() if arrow.types.is_null(found) else found


def misfits(values: Sequence[Any], kind: Any) -> dict[int, str]:
    """Return the places of values that an Arrow type cannot hold, each with the reason."""
    arrow = need_pyarrow("output")
    refused = (arrow.ArrowException, OverflowError, UnicodeEncodeError)
    try:
        arrow.array(values, type=kind)
        return {}
    except refused:
        pass
    found = {}
    for place, value in enumerate(values):
        try:
            arrow.array([value], type=kind)
        except refused as error:
            found[place] = str(error).splitlines()[0]
    return found


def parquet_bytes(types: Mapping[str, Any], columns: Mapping[str, Sequence[Any]]) -> bytes:
    """Return a Parquet file with these columns.

    Args:
        types: Arrow type of each column, in order.
        columns: the values of each column.
    """
    arrow = need_pyarrow("output")
    return _parquet(arrow, arrow.table({name: _array(arrow, columns[name], kind) for name, kind in types.items()}))


def _parquet(arrow: Any, table: Any) -> bytes:
    sink = arrow.BufferOutputStream()
    arrow.parquet.write_table(table, sink)
    return sink.getvalue().to_pybytes()


def _array(arrow: Any, values: Sequence[Any], kind: Any) -> Any:
    if arrow.types.is_fixed_size_list(kind) and len(values) and all(value is not None for value in values):
        flat = np.stack(values).astype(kind.value_type.to_pandas_dtype(), copy=False).reshape(-1)
        return arrow.FixedSizeListArray.from_arrays(arrow.array(flat), kind.list_size)
    return arrow.array(values, type=kind)


def swapped_column(
    part: bytes, change: Callable[[NDArray[Any]], NDArray[Any]] | None, *, name: str
) -> tuple[bytes, NDArray[Any]]:
    """Return a Parquet file with other vectors in one of its columns, and the vectors that were in it, ``(n, size)``.

    Args:
        part: the file.
        change: from the vectors to those in their place; None to have no file made.
        name: the column, lists of one size. Where there is none in a row, there is none afterwards.
    """
    arrow = need_pyarrow("output")
    table = arrow.parquet.read_table(arrow.BufferReader(part))
    column = table[name].combine_chunks()
    column = column.chunk(0) if isinstance(column, arrow.ChunkedArray) else column
    vectors = column.flatten().to_numpy(zero_copy_only=False).reshape(-1, column.type.list_size)
    if change is None:
        return b"", vectors
    made = change(vectors)
    rows = iter(made)
    values = [next(rows) if there else None for there in column.is_valid().to_pylist()]
    kind = arrow.list_(arrow.from_numpy_dtype(made.dtype), column.type.list_size)
    place = table.schema.get_field_index(name)
    return _parquet(arrow, table.set_column(place, name, _array(arrow, values, kind))), vectors


def arrow_joined(types: Mapping[str, Any], parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the bytes of one Arrow file with the rows of ``parts``, Parquet files, some at a time."""
    arrow = need_pyarrow("output")
    schema = arrow.schema([arrow.field(name, kind) for name, kind in types.items()])
    sink = _Sink()
    with arrow.PythonFile(sink, mode="w") as file, arrow.ipc.new_file(file, schema) as writer:
        for part in parts:
            writer.write_table(arrow.parquet.read_table(arrow.BufferReader(part), schema=schema))
            yield from sink.drained()
    yield from sink.drained()


def parquet_joined(types: Mapping[str, Any], parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the bytes of one Parquet file with the rows of ``parts``, Parquet files themselves, some at a time."""
    arrow = need_pyarrow("output")
    schema = arrow.schema([arrow.field(name, kind) for name, kind in types.items()])
    sink = _Sink()
    waiting: list[Any] = []
    with arrow.PythonFile(sink, mode="w") as file, arrow.parquet.ParquetWriter(file, schema) as writer:
        for part in parts:
            waiting.append(arrow.parquet.read_table(arrow.BufferReader(part), schema=schema))
            rows, size = sum(t.num_rows for t in waiting), sum(t.nbytes for t in waiting)
            if rows >= GROUP_ROWS or size >= GROUP_BYTES:
                writer.write_table(arrow.concat_tables(waiting), row_group_size=max(1, rows))
                waiting = []
                yield from sink.drained()
        if waiting:
            rows = sum(t.num_rows for t in waiting)
            writer.write_table(arrow.concat_tables(waiting), row_group_size=max(1, rows))
            yield from sink.drained()
    yield from sink.drained()


class _Sink:
    """Where a writer puts bytes until they are fetched."""

    closed = False

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._at = 0

    def write(self, data: Any) -> int:
        """Take in bytes."""
        self._parts.append(bytes(data))
        self._at += len(self._parts[-1])
        return len(self._parts[-1])

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self._at

    def flush(self) -> None:
        """Do nothing: bytes are fetched."""

    def close(self) -> None:
        """Do nothing: bytes are fetched."""

    def drained(self) -> list[bytes]:
        """Return what was written since the last call."""
        parts, self._parts = self._parts, []
        return parts

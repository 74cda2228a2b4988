"""Parquet and Arrow files written from columns of values and from parts.

pyarrow is an optional dependency. It is imported when such a file is written.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flodl_hf.tokenization.readers.arrow import need_pyarrow

GROUP_ROWS = 1 << 16
"""Rows of a row group of a joined file, fewer if they have more than ``GROUP_BYTES``."""

GROUP_BYTES = 1 << 26

Kind = str | list[Any] | dict[str, Any]
"""Type of a column: "text", "float" (32 bits), "int", "vector" (floats), "vector:int8:64" (dtype and count), a list of
one kind, or a dict of kinds by name."""


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
    """Return the Arrow type of ``values``: text if there are none; None if no type fits all of them."""
    arrow = need_pyarrow("output")
    try:
        found = arrow.array(values).type
    except (arrow.ArrowException, OverflowError):
        return None
    return arrow.string() if arrow.types.is_null(found) else found


def misfits(values: Sequence[Any], kind: Any) -> dict[int, str]:
    """Return the positions of values that do not fit an Arrow type, each with the reason."""
    arrow = need_pyarrow("output")
    refused = (arrow.ArrowException, OverflowError, UnicodeEncodeError)
    found = {}
    try:
        arrow.array(values, type=kind)
    except refused:
        for position, value in enumerate(values):
            try:
                arrow.array([value], type=kind)
            except refused as error:
                found[position] = str(error).splitlines()[0]
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
    """Return a Parquet file with changed vectors in one column, and the previous vectors, ``(n, size)``.

    Args:
        part: the file.
        change: function from the previous to the new vectors; None to write no file.
        name: the column, lists of one size. A row without a vector stays without one.
    """
    arrow = need_pyarrow("output")
    table = arrow.parquet.read_table(arrow.BufferReader(part))
    column = table[name].combine_chunks()
    column = column.chunk(0) if isinstance(column, arrow.ChunkedArray) else column
    vectors = column.flatten().to_numpy(zero_copy_only=False).reshape(-1, column.type.list_size)
    if change is None:
        return b"", vectors
    changed = change(vectors)
    remaining = iter(changed)
    values = [next(remaining) if valid else None for valid in column.is_valid().to_pylist()]
    kind = arrow.list_(arrow.from_numpy_dtype(changed.dtype), column.type.list_size)
    position = table.schema.get_field_index(name)
    return _parquet(arrow, table.set_column(position, name, _array(arrow, values, kind))), vectors


def joined_tables(format: str, types: Mapping[str, Any], parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the bytes of one Arrow or Parquet file with the rows of ``parts``, which are Parquet files.

    Args:
        format: ``"arrow"`` or ``"parquet"``.
        types: Arrow type of each column, in order.
        parts: the parts, in order.
    """
    arrow = need_pyarrow("output")
    schema = arrow.schema([arrow.field(name, kind) for name, kind in types.items()])
    sink = _Sink()
    with arrow.PythonFile(sink, mode="w") as file:
        if format == "arrow":
            writer, limits = arrow.ipc.new_file(file, schema), (1, 1)
        else:
            writer, limits = arrow.parquet.ParquetWriter(file, schema), (GROUP_ROWS, GROUP_BYTES)
        with writer:
            for table in _grouped(arrow, schema, parts, *limits):
                writer.write_table(table, max(1, table.num_rows))
                yield sink.drained()
    yield sink.drained()


def _grouped(arrow: Any, schema: Any, parts: Iterable[bytes], max_rows: int, max_bytes: int) -> Iterator[Any]:
    """Yield tables of consecutive parts, each table ended when it reaches a limit."""
    waiting: list[Any] = []
    for part in parts:
        waiting.append(arrow.parquet.read_table(arrow.BufferReader(part), schema=schema))
        if sum(t.num_rows for t in waiting) >= max_rows or sum(t.nbytes for t in waiting) >= max_bytes:
            yield arrow.concat_tables(waiting)
            waiting = []
    if waiting:
        yield arrow.concat_tables(waiting)


class _Sink(io.BytesIO):
    """File whose written bytes are fetched piece by piece; positions count all of them."""

    fetched = 0

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self.fetched + super().tell()

    def close(self) -> None:
        """Do nothing: the last bytes are fetched after the writer has ended."""

    def drained(self) -> bytes:
        """Return the bytes written since the last call."""
        data = self.getvalue()
        self.fetched += len(data)
        self.seek(0)
        self.truncate()
        return data

"""Rows of Parquet and Arrow files and of data frames, and the class names that their columns declare.

pyarrow is an optional dependency. It is imported when such a file or table is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from flodl.errors import DataError
from flodl_hf.tokenization.readers.rows import CHUNK_ROWS, Row, Rows

Classes = dict[str, tuple[str, ...]]
"""Class names in the order of their numbers, for each column that declares them."""

MAX_CLASSES = 1000
"""A dictionary column with more values contains texts and not classes."""

CLASS_FIELDS = ("label", "type", "tag")
"""Fields of a record that contain its class."""

STATE, SPLITS, INFO = "state.json", "dataset_dict.json", "dataset_info.json"


def need_pyarrow(what: str) -> Any:
    """Return the pyarrow module.

    Raises:
        DataError: pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            f"{what}: found no pyarrow, which reads and writes this format. Run pip install 'flodl-hf[data]', or use "
            "CSV, TSV or JSON lines.",
            missing="pyarrow",
        ) from None
    return pyarrow


class TableRows(Rows):
    """The rows of a Parquet or Arrow file from start to end. Skipped row groups are not read.

    Args:
        path: the file.
        kind: ``"parquet"`` or ``"arrow"``.

    Attributes:
        total: rows of the file; None for an Arrow file.

    Raises:
        DataError: pyarrow is not installed, or the file is damaged.
    """

    def __init__(self, path: Path, kind: str) -> None:
        self._path, self._kind = path, kind
        self._arrow = arrow = need_pyarrow(str(path))
        self._columns: list[str] | None = None
        self._batch: Any = None
        self._skippable = 0
        with self._reading():
            if kind == "parquet":
                self._file = arrow.parquet.ParquetFile(path)
                self.schema, self.total = self._file.schema_arrow, self._file.metadata.num_rows
                self._batches = self._row_groups()
            else:
                self._file = source = arrow.OSFile(str(path))
                is_file = source.read(6) == b"ARROW1"
                source.seek(0)
                reader = arrow.ipc.open_file(source) if is_file else arrow.ipc.open_stream(source)
                self.schema = reader.schema
                numbers = range(reader.num_record_batches) if is_file else ()
                self._batches = map(reader.get_batch, numbers) if is_file else iter(reader)
        self.types = {field.name: field.type for field in self.schema}
        super().__init__(iter(()), lambda number, values: Row(number, None, values), list(self.schema.names), None)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (self._arrow.ArrowException, OSError) as error:
            raise DataError(
                f"{self._path}: found a file that pyarrow cannot read ({str(error).splitlines()[0]}), expected "
                f"{self._kind}. Copy or download it again, or set format=.",
                path=str(self._path),
                problems=[str(error)],
            ) from None

    def _row_groups(self) -> Iterator[Any]:
        for group in range(self._file.metadata.num_row_groups):
            rows = self._file.metadata.row_group(group).num_rows
            if rows <= self._skippable:
                self._skippable -= rows
                continue
            yield from self._file.iter_batches(CHUNK_ROWS, row_groups=[group], columns=self._columns)

    def want(self, columns: list[str]) -> None:
        """Set the columns to read."""
        self._columns = columns

    def _has_rows(self) -> bool:
        """Read until a batch has rows. Return False at the end."""
        with self._reading():
            while self._batch is None or not self._batch.num_rows:
                self._batch = next(self._batches, None)
                if self._batch is None:
                    return False
        return True

    def take_batch(self, max_rows: int = CHUNK_ROWS) -> Any:
        """Return the next rows as a batch; None at the end."""
        if not self._has_rows():
            return None
        found = self._batch.slice(0, max_rows)
        self._batch = self._batch.slice(found.num_rows)
        return found

    def close(self) -> None:
        """Close the file."""
        self._batch, self._batches = None, iter(())
        self._file.close()

    def _take(self, count: int) -> list[Row]:
        rows: list[Row] = []
        while len(rows) < count and (batch := self.take_batch(count - len(rows))) is not None:
            self._source = iter(batch.to_pylist())
            rows += super()._take(batch.num_rows)
        return rows

    def _skip(self, count: int) -> int:
        self._skippable = count
        while self._skippable and self._has_rows():
            size = min(self._skippable, self._batch.num_rows)
            self._batch = self._batch.slice(size)
            self._skippable -= size
        left, self._skippable = self._skippable, 0
        return count - left


def rows_of_table(source: Any, classes: Classes) -> Iterator[dict[str, Any]]:
    """Yield the rows of any object that supports the Arrow C stream interface.

    Args:
        source: the table.
        classes: receives the names of declared classes.

    Raises:
        DataError: pyarrow is not installed.
    """
    arrow = need_pyarrow(f"a {type(source).__name__}")
    reader = arrow.RecordBatchReader.from_stream(source)
    return _rows(arrow, reader.schema, reader, classes)


def read_arrow_file(path: Path, kind: str, classes: Classes) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file, an Arrow file or an Arrow stream, with one batch in memory at a time.

    Args:
        path: the file.
        kind: ``"parquet"`` or ``"arrow"``.
        classes: receives the names of declared classes.

    Raises:
        DataError: pyarrow is not installed, or the file is damaged.
    """
    file = TableRows(path, kind)
    with closing(file):
        yield from _rows(need_pyarrow(str(path)), file.schema, iter(file.take_batch, None), classes)


def _rows(arrow: Any, schema: Any, batches: Iterable[Any], classes: Classes) -> Iterator[dict[str, Any]]:
    for value in (schema.metadata or {}).values():
        # `datasets` stores the features of a table as JSON.
        if b'"ClassLabel"' in value:
            classes |= names_of_classes((json.loads(value).get("info") or {}).get("features"))
    types = arrow.types
    coded: dict[str, dict[str, None]] = {field.name: {} for field in schema if types.is_dictionary(field.type)}
    texts = {"string", "large_string", "string_view"}
    numeric = [name for name in coded if str(schema.field(name).type.value_type) not in texts]
    for batch in batches:
        for name in list(coded):
            dictionary = batch.column(name).dictionary
            if len(dictionary) > MAX_CLASSES:
                del coded[name]
                classes.pop(name, None)
                continue
            coded[name] |= dict.fromkeys(str(value) for value in dictionary.to_pylist() if value is not None)
            classes[name] = tuple(coded[name])
        rows = batch.to_pylist()
        for name in numeric:
            for row in rows:
                row[name] = None if row[name] is None else str(row[name])
        yield from rows


# --- class names ---------------------------------------------------------------------------------------------


def names_of_classes(features: Any) -> Classes:
    """Return class names by column from features of `datasets`, which are objects or JSON values."""
    if not isinstance(features, Mapping):
        return {}
    return {str(column): names for column, feature in features.items() if (names := _names(feature))}


def _names(feature: Any) -> tuple[str, ...]:
    if isinstance(feature, (list, tuple)):
        return _names(feature[0]) if len(feature) == 1 else ()
    if isinstance(feature, Mapping):
        kind = feature.get("_type")
        names = feature.get("names") if kind == "ClassLabel" else None
        # A record, such as a span of text, contains its class in one of its fields.
        fields = ("feature",) if isinstance(kind, str) else CLASS_FIELDS
        inner = next((feature[name] for name in fields if name in feature), None)
    else:
        names, inner = getattr(feature, "names", None), getattr(feature, "feature", None)
    if isinstance(names, (list, tuple)):
        return tuple(map(str, names))
    return () if inner is None else _names(inner)


# --- folders of `datasets` -----------------------------------------------------------------------------------


def is_saved_dataset(path: Path) -> bool:
    """Return whether ``save_to_disk`` of `datasets` wrote this folder."""
    return any(os.path.isfile(path / name) for name in (STATE, SPLITS))  # Path.is_file raises for a long name


def read_saved_dataset(path: Path, classes: Classes) -> Iterator[dict[str, Any]]:
    """Yield the rows of a data set that ``save_to_disk`` of `datasets` wrote.

    Args:
        path: the folder.
        classes: receives the names of declared classes.

    Raises:
        DataError: the folder contains several splits, or files that cannot be read.
    """
    if (path / SPLITS).is_file():
        splits = list(json.loads((path / SPLITS).read_text()).get("splits") or ())
        raise DataError(
            f"{path}: found a folder with the splits {', '.join(splits)}, expected one data set. Name the folder of a "
            f"split: {path / (splits or ['train'])[0]}",
            path=str(path),
            names=splits,
        )
    for name in saved_files(path):
        yield from read_arrow_file(path / name, "arrow", classes)
    if (path / INFO).is_file():
        classes |= names_of_classes(json.loads((path / INFO).read_text()).get("features"))


def saved_files(path: Path) -> list[str]:
    """Return the names of the data files in a folder that ``save_to_disk`` wrote."""
    return [one["filename"] for one in json.loads((path / STATE).read_text())["_data_files"]]

"""Rows out of Parquet and Arrow files and data frames, and the names of classes that their columns declare.

How such a file is read is decided in `columnar`, which imports pyarrow, an extra, when one is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flodl.data.columnar import BATCH_ROWS, BatchRows, need_pyarrow
from flodl.errors import DataError

__all__ = [
    "CLASS_FIELDS",
    "Classes",
    "is_saved_dataset",
    "is_table",
    "names_of_classes",
    "read_arrow_file",
    "read_saved_dataset",
    "rows_of_table",
    "saved_files",
]

Classes = dict[str, tuple[str, ...]]
"""Names of classes by number, for each column that declares them."""

MOST_CLASSES = 1000
"""A dictionary with more values contains texts rather than classes."""

CLASS_FIELDS = ("label", "type", "tag")
"""Fields of a record that contain its class."""

STATE, SPLITS, INFO = "state.json", "dataset_dict.json", "dataset_info.json"


def is_table(source: Any) -> bool:
    """Return whether ``source`` is a table by columns: it speaks Arrow, and its items are not rows."""
    return hasattr(source, "__arrow_c_stream__") and not hasattr(source, "__getitems__")


def rows_of_table(source: Any, classes: Classes | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of anything that speaks the Arrow C stream protocol.

    Args:
        source: the table.
        classes: receives the names of declared classes.

    Raises:
        DataError: pyarrow is not installed.
    """
    arrow = need_pyarrow(f"a {type(source).__name__}")
    reader = arrow.RecordBatchReader.from_stream(source)
    return _rows(arrow, reader.schema, reader, {} if classes is None else classes)


def read_arrow_file(path: Path, kind: str, classes: Classes | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file, an Arrow file or an Arrow stream, one batch in memory at a time.

    Args:
        path: the file.
        kind: ``"parquet"`` or ``"arrow"``.
        classes: receives the names of declared classes.

    Raises:
        DataError: pyarrow is not installed, or the file is damaged.
    """
    file = BatchRows(path, kind)
    try:
        batches = iter(lambda: file.take_batch(BATCH_ROWS), None)
        yield from _rows(need_pyarrow(str(path)), file.schema, batches, {} if classes is None else classes)
    finally:
        file.close()


def _rows(arrow: Any, schema: Any, batches: Iterable[Any], classes: Classes) -> Iterator[dict[str, Any]]:
    for value in (schema.metadata or {}).values():
        # `datasets` writes the features of a table as JSON.
        if b'"ClassLabel"' in value:
            classes |= names_of_classes((json.loads(value).get("info") or {}).get("features"))
    coded = [field.name for field in schema if arrow.types.is_dictionary(field.type)]
    texts = [name for name in coded if not _is_text(arrow, schema.field(name).type.value_type)]
    found: dict[str, dict[str, None]] = {name: {} for name in coded}
    for batch in batches:
        for name in list(found):
            dictionary = batch.column(name).dictionary
            if len(dictionary) > MOST_CLASSES:
                del found[name]
                classes.pop(name, None)
                continue
            found[name] |= dict.fromkeys(str(value) for value in dictionary.to_pylist() if value is not None)
            classes[name] = tuple(found[name])
        rows = batch.to_pylist()
        for name in texts:
            for row in rows:
                row[name] = None if row[name] is None else str(row[name])
        yield from rows


def _is_text(arrow: Any, kind: Any) -> bool:
    return arrow.types.is_string(kind) or arrow.types.is_large_string(kind) or arrow.types.is_string_view(kind)


# --- names of classes ----------------------------------------------------------------------------------------


def names_of_classes(features: Any) -> Classes:
    """Return the names of classes by column, as features of `datasets` declare them: as objects, or as JSON values."""
    if not isinstance(features, Mapping):
        return {}
    return {str(column): names for column, feature in features.items() if (names := _names(feature))}


def _names(feature: Any) -> tuple[str, ...]:
    if isinstance(feature, (list, tuple)):
        return _names(feature[0]) if len(feature) == 1 else ()
    if isinstance(feature, Mapping):
        kind = feature.get("_type")
        names = feature.get("names") if kind == "ClassLabel" else None
        # A record, such as a span of text, has its class in one of its fields.
        fields = ("feature",) if isinstance(kind, str) else CLASS_FIELDS
        inner = next((feature[name] for name in fields if name in feature), None)
    else:
        names, inner = getattr(feature, "names", None), getattr(feature, "feature", None)
    if isinstance(names, (list, tuple)):
        return tuple(map(str, names))
    return () if inner is None else _names(inner)


# --- folders of `datasets` -----------------------------------------------------------------------------------


def is_saved_dataset(path: Path) -> bool:
    """Return whether a folder was written by ``save_to_disk`` of `datasets`."""
    return any(os.path.isfile(path / name) for name in (STATE, SPLITS))  # Path.is_file raises for a name too long


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

"""Rows out of files: CSV, TSV, JSON lines, JSON, plain text, and by delegation CoNLL, SQuAD and Parquet.

Decides which reader a file gets, what a header is, and what counts as a fault. Text formats are read with
the standard library, so rows and errors are the same wherever the package runs; Parquet, Arrow and data
frames go through pyarrow (``arrow``). What a column means is decided in ``columns``.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, get_args

from flodl.data.arrow import (
    Classes,
    is_saved_dataset,
    is_table,
    names_of_classes,
    read_arrow_file,
    read_saved_dataset,
    rows_of_table,
)
from flodl.data.cells import CellRows, numbered_lines, undecodable
from flodl.data.conll import read_conll
from flodl.data.faults import Faults
from flodl.data.squad import read_squad
from flodl.errors import DataError, nearest, printable
from flodl.files import expect_file

__all__ = ["Format", "Table", "load_rows", "read_rows"]

Format = Literal["csv", "tsv", "jsonl", "json", "text", "conll", "squad", "parquet", "arrow"]

_SUFFIXES: dict[str, Format] = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".tab": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".txt": "text",
    ".conll": "conll",
    ".bio": "conll",
    ".iob": "conll",
    ".iob2": "conll",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}


def read_rows(
    source: Any,
    format: Format | None = None,
    *,
    columns: Sequence[str] | None = None,
    header: bool | None = None,
    delimiter: str | None = None,
    blank_lines: bool = False,
) -> Iterator[dict[str, Any]]:
    """Return the rows of ``source`` one by one, each a dict of column names to values.

    Values of CSV and TSV files are texts; the other formats keep their types. Gzip files (``.gz``) are
    unpacked on the way. CSV fields may be quoted; in TSV files quotes are characters like any other.

    The first line is a header unless ``columns`` names the columns, or a cell of it is a number, longer than 64
    characters, or there twice. Even such a line is a header if a cell is a usual name ("text", "label"), if a word is
    above a column of numbers, or if its cells are the numbers 0, 1, ... above texts. Columns get the names that pandas
    gives them: ``Unnamed: 0`` for an empty name, ``text.1`` for a repeated one. Row numbers without a name in the
    header, as R writes them, are left out.

    Args:
        source: a path; or rows, a dict of columns, a data set of `datasets`, or anything that speaks Arrow,
            such as a polars or pandas data frame.
        format: what the file is; by default its suffix says.
        columns: names of the columns, for CSV, TSV and CoNLL files without a header.
        header: whether the first line is a header; None decides by its cells and those below.
        delimiter: between the cells of CSV and TSV files; by default a tab in TSV files, and in CSV files a comma, or
            the semicolon, tab or bar that divides a header without commas.
        blank_lines: whether empty lines of a text file are rows too, so that rows are lines.

    Raises:
        DataError: the file is absent, of no known format, or faulty; ``path``, ``line`` and ``problems``
            say where. A faulty file is read to its end, so that all faults come at once; rows before the
            first were given.
    """
    return _read(source, format, {}, columns=columns, header=header, delimiter=delimiter, blank_lines=blank_lines)


def _read(
    source: Any,
    format: Format | None,
    classes: Classes,
    *,
    columns: Sequence[str] | None = None,
    header: bool | None = None,
    delimiter: str | None = None,
    blank_lines: bool = False,
) -> Iterator[dict[str, Any]]:
    """Return the rows of ``source`` as `read_rows` does; ``classes`` receives the names of declared classes."""
    if not isinstance(source, (str, os.PathLike)):
        return _rows_of_object(source, classes)
    path = Path(source)
    if is_saved_dataset(path):
        return read_saved_dataset(path, classes)
    expect_file(path)
    kind = format or _format_of(path)
    if kind not in get_args(Format):
        raise DataError(
            f"{path}: format is {kind!r}{nearest(kind, get_args(Format))}; expected one of {list(get_args(Format))}",
            path=str(path),
            format=kind,
        )
    if kind in ("csv", "tsv"):
        sign = delimiter or ("" if kind == "csv" else "\t")
        return _read_cells(path, quoted=kind == "csv", delimiter=sign, columns=columns, header=header)
    if kind == "conll":
        return _closing(path, lambda lines: read_conll(lines, path, columns=columns))
    if kind == "jsonl":
        return _closing(path, lambda lines: _read_json_lines(lines, path))
    if kind == "text":
        return _closing(path, lambda lines: _plain_rows(lines, blank_lines))
    if kind in ("json", "squad"):
        return _read_json(path, kind)
    return read_arrow_file(path, kind, classes)


def _plain_rows(lines: Iterator[tuple[int, str]], blank_lines: bool) -> Iterator[dict[str, Any]]:
    return ({"text": text.rstrip("\r\n")} for _, text in lines if blank_lines or text.strip())


class Table(list[dict[str, Any]]):
    """Rows of a table.

    Args:
        rows: the rows.
        classes: names of classes by number, for each column whose source declares them: features of `datasets`, also
            in the metadata of Parquet and Arrow files, and dictionary types of Arrow, such as pandas' categories.
    """

    def __init__(self, rows: Iterable[dict[str, Any]] = (), classes: Classes | None = None) -> None:
        self.classes: Classes = {} if classes is None else classes
        super().__init__(rows)


def load_rows(source: Any, format: Format | None = None, **options: Any) -> Table:
    """Return all rows of ``source`` as a list, with declared classes; see `read_rows` for the arguments and errors.

    Raises:
        DataError: also if there are no rows.
    """
    classes: Classes = {}
    rows = Table(_read(source, format, classes, **options), classes)
    if not rows:
        raise DataError(f"{source if isinstance(source, (str, os.PathLike)) else 'data'}: no rows", rows=0)
    return rows


def _format_of(path: Path) -> Format:
    suffixes = [s.lower() for s in path.suffixes]
    if suffixes and suffixes[-1] == ".gz":
        suffixes.pop()
    kind = _SUFFIXES.get(suffixes[-1]) if suffixes else None
    if kind is None:
        raise DataError(
            f"{path}: the suffix {''.join(suffixes) or '(none)'!r} names no format; known suffixes are "
            f"{sorted(_SUFFIXES)}; rename it, or say format=",
            path=str(path),
        )
    return kind


# ------------------------------------------------------------------------------------------------- lines


def _open(path: Path) -> IO[bytes]:
    # typed as a plain binary file, which a gzip file is for every use made of it here
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else open(path, "rb")  # type: ignore[return-value]


def _raw_lines(file: IO[bytes], faults: Faults) -> Iterator[tuple[int, bytes]]:
    """Yield numbered lines; the rest of a file that cannot be read is a fault."""
    number = 0
    try:
        for number, raw in numbered_lines(file):
            yield number, raw
    except (gzip.BadGzipFile, EOFError, OSError) as error:
        faults.add(f"unreadable data ({error})", "a whole file", line=number + 1)


def _lines(file: IO[bytes], faults: Faults) -> Iterator[tuple[int, str]]:
    """Yield numbered lines; a line that is not UTF-8 is a fault and left out."""
    for number, raw in _raw_lines(file, faults):
        try:
            # Spreadsheet programs mark UTF-8 files with a byte order mark.
            yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            faults.add(undecodable(raw, error), "UTF-8 text", line=number)


def _closing(path: Path, parse: Any) -> Iterator[dict[str, Any]]:
    faults = Faults(path)
    with _open(path) as file:
        yield from parse(_lines(file, faults))
    faults.check("save the file as UTF-8")


# ------------------------------------------------------------------------------------------------- cells


def _read_cells(path: Path, **how: Any) -> Iterator[dict[str, Any]]:
    faults = Faults(path)
    with _open(path) as file:
        rows = CellRows(_raw_lines(file, faults), **how)
        if rows.fault is not None:
            line, (found, expected) = rows.fault
            faults.add(found, expected, line=line)
        for line, cells in rows:
            if isinstance(cells, tuple):
                faults.add(*cells, line=line)
            elif not faults.count:
                yield dict(zip(rows.names, cells, strict=True))
    faults.check(
        "correct these lines, or read a file with another layout (no header, another delimiter) with "
        "flodl.data.load_rows"
    )


# -------------------------------------------------------------------------------------------------- JSON


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nesting too deep") from None


def _read_json_lines(lines: Iterable[tuple[int, str]], path: Path) -> Iterator[dict[str, Any]]:
    faults = Faults(path)
    for number, text in lines:
        if not text.strip():
            continue
        try:
            row = _parse_json(text)
        except ValueError as error:
            faults.add(f"{error}: {printable(text.strip(), 60)}", "a JSON object", line=number)
            continue
        if not isinstance(row, dict):
            faults.add(f"{type(row).__name__}: {printable(text.strip(), 60)}", "a JSON object", line=number)
        elif not faults.count:
            yield row
    faults.check("expected one JSON object on each line")


def _read_json(path: Path, kind: str) -> Iterator[dict[str, Any]]:
    faults = Faults(path)
    with _open(path) as file:
        numbered = list(_lines(file, faults))
    faults.check("save the file as UTF-8")
    try:
        content = _parse_json("".join(text for _, text in numbered))
    except ValueError as error:
        if kind == "json" and "Extra data" in str(error):
            # several objects in one file: lines under the wrong suffix
            yield from _read_json_lines(numbered, path)
            return
        line = getattr(error, "lineno", None)
        raise faults.fail(str(error), "one JSON value", "mend the file", line=line) from None
    is_squad = isinstance(content, dict) and isinstance(content.get("data"), list)
    if kind == "squad" or (is_squad and any("paragraphs" in a for a in content["data"] if isinstance(a, dict))):
        yield from read_squad(content, path)
        return
    if isinstance(content, dict) and is_squad:
        content = content["data"]
    elif isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        raise faults.fail(type(content).__name__, "a list of objects", "write one object for each row")
    for number, row in enumerate(content):
        if not isinstance(row, dict):
            faults.add(f"{type(row).__name__} as item {number}", "an object")
        elif not faults.count:
            yield row
    faults.check("expected a list of objects, one for each row")


# ----------------------------------------------------------------------------------------------- objects


def _rows_of_object(source: Any, classes: Classes) -> Iterator[dict[str, Any]]:
    if isinstance(source, Mapping):
        return _rows_of_columns(source, classes)
    classes |= names_of_classes(getattr(source, "features", None))
    if hasattr(source, "__getitem__") and hasattr(source, "__len__") and not is_table(source):
        return _rows_of_sequence(source)
    if is_table(source):
        return rows_of_table(source, classes)
    if isinstance(source, Iterable):
        return _rows_of_sequence(source)
    raise DataError(
        f"data: {type(source).__name__} is neither a path, nor rows, nor a table; expected a file, a list of dicts, a "
        "dict of columns, a data set of `datasets`, or a data frame",
        kind=type(source).__name__,
    )


def _rows_of_sequence(source: Any) -> Iterator[dict[str, Any]]:
    rows = source if isinstance(source, Iterable) else (source[i] for i in range(len(source)))
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(
                f"data: row {number} is {type(row).__name__}; expected a dict of column names to values", row=number
            )
        yield {name if type(name) is str else str(name): _plain(value) for name, value in row.items()}


def _rows_of_columns(source: Mapping[str, Any], classes: Classes) -> Iterator[dict[str, Any]]:
    sizes = {name: len(column) if hasattr(column, "__len__") else -1 for name, column in source.items()}
    if len(set(sizes.values())) != 1 or -1 in sizes.values() or any(isinstance(c, str) for c in source.values()):
        raise DataError(
            f"data: columns have lengths {sizes}; expected lists of one length (several data sets are named apart: "
            "pass one of them)",
            sizes=sizes,
        )
    names = [str(name) for name in source]
    for name, column in source.items():
        # A pandas column has its categories in an accessor, a pandas array itself.
        categories = getattr(getattr(column, "cat", column), "categories", None)
        if categories is not None:
            classes[str(name)] = tuple(map(str, categories))
    columns = [
        [None if _is_missing(v) else str(v) for v in column] if str(name) in classes else column
        for name, column in source.items()
    ]
    for values in zip(*columns, strict=True):
        yield {name: _plain(value) for name, value in zip(names, values, strict=True)}


def _is_missing(value: Any) -> bool:
    return value is None or value != value


_PLAIN = frozenset({str, int, float, bool, type(None), dict})


def _plain(value: Any) -> Any:
    """Return a value of numpy or torch as Python has it: numbers, texts, and lists of them."""
    if type(value) in _PLAIN:
        return value
    if type(value) in (list, tuple):
        return value if all(type(item) in _PLAIN for item in value) else [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value

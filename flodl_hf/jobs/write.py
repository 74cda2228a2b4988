"""Rows with results as JSON lines, CSV, TSV, Parquet and Arrow: in parts, and joined.

Scores are the shortest text of their 32-bit number; nested results are JSON in cells and lists of structs in Parquet;
line ends are "\\n". `parts` writes the bytes to disk.
"""

from __future__ import annotations

import datetime
import json
import math
import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from json.encoder import encode_basestring
from pathlib import Path
from typing import Any

import numpy as np

from flodl.errors import DataError, nearest, printable
from flodl_hf.jobs.tables import Kind, arrow_type, inferred_type, joined_tables, misfits, parquet_bytes
from flodl_hf.tokenization.readers.rows import Row, RowFault

OUTPUTS = ("jsonl", "csv", "tsv", "parquet", "arrow", "npy")
_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv", ".tab": "tsv"}
_SUFFIXES |= {".parquet": "parquet", ".arrow": "arrow", ".npy": "npy"}
ERROR = "error"


def output_format(target: Path) -> str:
    """Return the format of a file name.

    Raises:
        DataError: its suffix is not supported.
    """
    found = _SUFFIXES.get(target.suffix.lower())
    if found is None:
        raise DataError(
            f"{target}: found the suffix {target.suffix or '(none)'!r}"
            f"{nearest(target.suffix, _SUFFIXES)}, expected one of {', '.join(sorted(_SUFFIXES))}",
            path=str(target),
        )
    return found


class Pieces:
    """Finished parts in order, each as blocks of bytes; can be iterated repeatedly.

    Args:
        parts: function that returns the parts from the first one.
        size: total bytes.
    """

    def __init__(self, parts: Callable[[], Iterable[Iterable[bytes]]], size: int = 0) -> None:
        self._parts, self.size = parts, size

    def __iter__(self) -> Iterator[Iterable[bytes]]:
        return iter(self._parts())


class Writer:
    """Writer of one format and the columns of one job."""

    def keep(self, row: Row | None) -> Any:
        """Return the formatted cells of a row's kept columns; empty ones without a row or values.

        Raises:
            RowFault: the format does not support a value.
        """

    def misfits(self, rows: Sequence[Row]) -> dict[int, str]:
        """Return the indices of rows whose kept cells do not have the type of their columns."""
        return {}

    def missing(self, leading: Any, error: str) -> Any:
        """Return input of `part` for a row without a result."""
        raise NotImplementedError

    def lines(self, leading: Sequence[Any], answers: Sequence[tuple[Any, ...]]) -> Iterable[Any]:
        """Return input of `part` for several rows; the bytes do not depend on how rows are divided into calls.

        Raises:
            RowFault: the format does not support a result.
        """
        raise NotImplementedError

    def part(self, lines: Iterable[Any]) -> Iterator[bytes]:
        """Yield the bytes of a part."""
        yield from lines

    def joined(self, parts: Pieces) -> Iterator[bytes]:
        """Yield the bytes of the complete file."""
        for part in parts:
            yield from part


def writer_for(
    format: str,
    keep: tuple[str, ...] | None,
    answer: Mapping[str, Kind],
    *,
    with_errors: bool,
    lead: str | None,
    names: Sequence[str],
    types: Mapping[str, Any] | None,
    first: Sequence[Row],
) -> Writer:
    """Return the writer of a job.

    Args:
        format: one of `OUTPUTS` except "npy".
        keep: columns of the input that are kept; None for all columns of each row.
        answer: result columns.
        with_errors: add a column with the error of rows without a result.
        lead: the first column, if all columns of a row are kept.
        names: columns of the first rows of the input.
        types: Arrow types of the input's columns, if it has any.
        first: the first rows; their values determine types if nothing else does.

    Raises:
        DataError: a kept column has the name of a result column.
    """
    added = {**answer, **({ERROR: "text"} if with_errors else {})}
    taken = [name for name in (names if keep is None else keep) if name in added]
    if taken:
        rest = [name for name in names if name not in added]
        raise DataError(
            f"columns: both the result and the input have {', '.join(map(repr, taken))}, expected distinct "
            f"names. Keep other columns (keep={','.join(rest) or 'none'}), or rename these.",
            problems=taken,
        )
    if format == "jsonl":
        return _JsonLines(keep, answer, added, lead)
    columns = tuple(sorted(names, key=lambda name: name != lead)) if keep is None else keep
    if format in ("parquet", "arrow"):
        return _Tables(columns, answer, added, keep is None, types, first, format)
    return _Cells(columns, answer, added, keep is None, "," if format == "csv" else "\t")


# ---- values --------------------------------------------------------------------------------------------

_encode = json.JSONEncoder(ensure_ascii=False, default=lambda value: _as_text(value)).encode


def _json(value: Any) -> str:
    return encode_basestring(value) if type(value) is str else _encode(value)


def _as_text(value: Any) -> Any:
    """Return values without a JSON form as text."""
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, bytes):
        raise RowFault("bytes cannot be written as text. Keep other columns, or write Parquet.")
    return str(value)


def _short(value: float | None) -> str:
    """Return the shortest text of a 32-bit number."""
    if value is None:
        return "null"
    if not math.isfinite(value):
        raise RowFault(f"the score is {value}, expected a number")
    return str(np.float32(value))


def _text(value: str | None) -> str:
    return "null" if value is None else encode_basestring(value)


def _vector(value: Any) -> str:
    if not np.isfinite(value).all():
        raise RowFault("the embedding contains values that are not finite")
    # float16 numbers are written as 32-bit numbers, so that all readers get the same values.
    return "[" + ", ".join((value.astype(np.float32) if value.dtype.kind == "f" else value).astype(str)) + "]"


def _packed(value: Any) -> str:
    if not np.isfinite(value).all():
        _vector(value)
    return f'"{b64encode(value.tobytes()).decode()}"'


def _shorts(values: Sequence[float | None]) -> Sequence[str]:
    if None in values:
        return [*map(_short, values)]
    numbers = np.array(values, np.float32)
    if not np.isfinite(numbers).all():
        return [*map(_short, values)]
    return [*map(str, numbers)]


def _column(kind: Kind) -> Callable[[Sequence[Any]], Sequence[str]]:
    """Return the function from many values of a kind to JSON."""
    if kind == "float":
        return _shorts
    write = json_of(kind)
    return lambda values: [*map(write, values)]


def json_of(kind: Kind) -> Callable[[Any], str]:
    """Return the function from a value of a kind to JSON."""
    if isinstance(kind, list):
        inner = json_of(kind[0])
        return lambda value: "[" + ", ".join(map(inner, value)) + "]"
    if isinstance(kind, dict):
        parts = [(name, f'"{name}": ', json_of(part)) for name, part in kind.items()]
        return lambda value: "{" + ", ".join(lead + part(value[name]) for name, lead, part in parts) + "}"
    plain: dict[str, Callable[[Any], str]] = {"text": _text, "float": _short, "int": _encode, "vector": _vector}
    plain["packed"] = _packed
    return _vector if kind.startswith("vector:") else plain[kind]


def _finite(kind: Kind, value: Any) -> None:
    """Raise for scores that are not finite."""
    if value is None:
        return
    if kind == "float":
        _short(value)
    elif isinstance(kind, str) and kind.startswith("vector"):
        if not np.isfinite(value).all():
            _vector(value)
    elif isinstance(kind, list):
        for item in value:
            _finite(kind[0], item)
    elif isinstance(kind, dict):
        for name, part in kind.items():
            _finite(part, value[name])


def _bytes(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise RowFault("found a lone surrogate, expected valid Unicode") from None


def _values(row: Row | None, columns: Sequence[str] | None) -> Mapping[str, Any] | None:
    """Return the values of a row, if any; with ``columns``, a row with further columns raises an error."""
    values = None if row is None else row.values
    if values and columns is not None and (stray := [name for name in values if name not in columns]):
        raise RowFault(
            f"columns {stray[:5]} were in none of the first rows. Select columns with keep, or write JSON lines."
        )
    return values


# ---- JSON lines ----------------------------------------------------------------------------------------


class _JsonLines(Writer):
    """Writer of one JSON object for each line."""

    def __init__(
        self, keep: tuple[str, ...] | None, answer: Mapping[str, Kind], added: Mapping[str, Kind], lead: str | None
    ) -> None:
        self._keep = None if keep is None else [(name, f"{_encode(name)}: ") for name in keep]
        self._added, self._lead = frozenset(added), lead
        self._nothing = dict.fromkeys(answer)
        self._columns = [_column(kind) for kind in answer.values()]
        ends = [f'"{name}": %s' for name in answer] + [f'"{ERROR}": null'] * (ERROR in added)
        self._form = "{%s" + ", ".join(ends) + "}\n"

    def keep(self, row: Row | None) -> str:
        values = None if row is None else row.values
        if self._keep is not None:
            cells = [lead + ("null" if values is None else _json(values.get(name))) for name, lead in self._keep]
            text = ", ".join(cells)
        elif row is None or values is None:
            return ""
        else:
            if not self._added.isdisjoint(values):
                again = [name for name in values if name in self._added]
                raise RowFault(f"the row has a column {again[0]!r}, like the result. Select columns with keep.")
            if row.text is not None and self._lead not in values:
                return row.text[1:-1].strip()  # the original text of the object, without its braces
            if self._lead is not None and self._lead in values:
                values = {self._lead: values[self._lead], **values}
            text = _encode(values)[1:-1]
        _bytes(text)
        return text

    def missing(self, leading: str, error: str) -> bytes:
        return _bytes("{" + (leading and f"{leading}, ") + _encode({**self._nothing, ERROR: error})[1:] + "\n")

    def lines(self, leading: Sequence[str], answers: Sequence[tuple[Any, ...]]) -> list[bytes]:
        columns = [write(values) for write, values in zip(self._columns, zip(*answers, strict=True), strict=True)]
        leads = [cells and f"{cells}, " for cells in leading]
        return [_bytes("".join(map(self._form.__mod__, zip(leads, *columns, strict=True))))]


# ---- cells ---------------------------------------------------------------------------------------------


def _quoted(text: str) -> bool:
    # Four searches for single characters take a tenth of the time of one regular expression.
    return "," in text or '"' in text or "\n" in text or "\r" in text


_UNFIT = re.compile("[\\t\\r\\n]").search


class _Cells(Writer):
    """Writer of CSV or TSV with a header."""

    def __init__(
        self, keep: tuple[str, ...], answer: Mapping[str, Kind], added: Mapping[str, Kind], own: bool, delimiter: str
    ) -> None:
        self._keep, self._own, self._delimiter = keep, own, delimiter
        self._columns = [self._column_of(kind) for kind in answer.values()]
        self._nothing = [""] * len(answer)
        self._with_errors = ERROR in added
        self._header = _bytes(delimiter.join(map(self._cell, (*keep, *added))) + "\n")

    def _column_of(self, kind: Kind) -> Callable[[Sequence[Any]], Sequence[str]]:
        write = str if kind == "text" else json_of(kind)
        cell = str if kind in ("float", "int") else self._cell  # numbers need no quotation marks

        def column(values: Sequence[Any]) -> Sequence[str]:
            if kind == "float" and None not in values:
                return _shorts(values)
            return ["" if value is None else cell(write(value)) for value in values]

        return column

    def _cell(self, text: str) -> str:
        if self._delimiter == ",":
            return '"' + text.replace('"', '""') + '"' if _quoted(text) else text
        if _UNFIT(text):
            raise RowFault(
                f"a tab or line end in {printable(text, 40)}, which TSV does not support. Write CSV or JSON lines."
            )
        return text

    def keep(self, row: Row | None) -> list[str]:
        values = _values(row, self._keep if self._own else None)
        if values is None:
            return [""] * len(self._keep)
        cells = []
        for name in self._keep:
            value = values.get(name)
            cells.append("" if value is None else self._cell(value if isinstance(value, str) else self._plain(value)))
        _bytes("".join(cells))
        return cells

    @staticmethod
    def _plain(value: Any) -> str:
        return _encode(value) if isinstance(value, (bool, list, dict, float, int)) else str(_as_text(value))

    def missing(self, leading: list[str], error: str) -> bytes:
        cells = [*leading, *self._nothing, self._cell(" ".join(error.split()))]
        return _bytes(self._delimiter.join(cells) + "\n")

    def lines(self, leading: Sequence[list[str]], answers: Sequence[tuple[Any, ...]]) -> list[bytes]:
        columns = [write(values) for write, values in zip(self._columns, zip(*answers, strict=True), strict=True)]
        end = self._delimiter + "\n" if self._with_errors else "\n"
        join = self._delimiter.join
        texts = [join((*cells, *answer)) for cells, answer in zip(leading, zip(*columns, strict=True), strict=True)]
        if end == "\n" and not all(texts):
            texts = [text or '""' for text in texts]  # readers would ignore an empty line
        return [_bytes(end.join(texts) + end)]

    def joined(self, parts: Pieces) -> Iterator[bytes]:
        yield self._header
        yield from super().joined(parts)


# ---- Parquet -------------------------------------------------------------------------------------------


class _Tables(Writer):
    """Writer of Parquet or Arrow: types are those of the input, otherwise of the first rows."""

    def __init__(
        self,
        keep: tuple[str, ...],
        answer: Mapping[str, Kind],
        added: Mapping[str, Kind],
        own: bool,
        types: Mapping[str, Any] | None,
        first: Sequence[Row],
        format: str,
    ) -> None:
        self._format = format
        self._keep, self._own, self._answer, self._with_errors = keep, own, answer, ERROR in added
        self._checked = types is None and bool(first)
        self._as_json: set[str] = set()
        self._types: dict[str, Any] = {}
        for name in keep:
            if types is not None:
                self._types[name] = types[name]
                continue
            found = inferred_type([row.values.get(name) for row in first if row.values is not None])
            if found is None:
                # Values of several types come from JSON, and are written as JSON.
                self._as_json.add(name)
            self._types[name] = arrow_type("text") if found is None else found
        self._types |= {name: arrow_type(kind) for name, kind in added.items()}

    def keep(self, row: Row | None) -> list[Any]:
        values = _values(row, self._keep if self._own else None) or {}
        return [self._value(name, values.get(name)) for name in self._keep]

    def _value(self, name: str, value: Any) -> Any:
        return _encode(value) if name in self._as_json and value is not None else value

    def misfits(self, rows: Sequence[Row]) -> dict[int, str]:
        found: dict[int, str] = {}
        for name in self._keep if self._checked else ():
            values = [None if row.values is None else self._value(name, row.values.get(name)) for row in rows]
            for place, reason in misfits(values, self._types[name]).items():
                kind = self._types[name]
                found.setdefault(
                    place,
                    f"column {name!r}: {reason}; the first rows have {kind}. Keep other columns, or write JSON lines.",
                )
        return found

    def missing(self, leading: list[Any], error: str) -> list[Any]:
        return [*leading, *([None] * len(self._answer)), error]

    def lines(self, leading: Sequence[list[Any]], answers: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
        for answer in answers:
            for kind, value in zip(self._answer.values(), answer, strict=True):
                _finite(kind, value)
        no_error = [None] * self._with_errors
        return [[*cells, *answer, *no_error] for cells, answer in zip(leading, answers, strict=True)]

    def part(self, lines: Iterable[list[Any]]) -> Iterator[bytes]:
        rows = list(lines)
        columns = list(zip(*rows, strict=True)) or [()] * len(self._types)
        yield parquet_bytes(self._types, dict(zip(self._types, columns, strict=True)))

    def joined(self, parts: Pieces) -> Iterator[bytes]:
        # Damaged bytes must not reach the Parquet parser, so each part is read completely.
        yield from joined_tables(self._format, self._types, map(b"".join, parts))

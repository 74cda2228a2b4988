"""The rows of an input file by number: taken some at a time, or passed over without being parsed.

Decides what a row is in each format, which number it has, and what makes it faulty. A faulty row is a row with its
fault, so that the rows after it keep their numbers; what becomes of it is decided in `run`. Which column means what is
decided in `columns`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, get_args

from flodl.data.cells import CellRows, numbered_lines, undecodable
from flodl.data.columnar import BatchRows
from flodl.data.files import Format, _format_of, _open
from flodl.errors import DataError, nearest, printable
from flodl.files import expect_file

__all__ = ["FORMATS", "Row", "RowFault", "Rows", "format_of", "open_rows"]

MOST_LINE = 1 << 26
"""Bytes of a line."""

FORMATS = ("csv", "tsv", "jsonl", "text", "parquet", "arrow")
STDIN = "-"
_DECODE = json.JSONDecoder().decode
_SCAN: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


class RowFault(Exception):
    """What is wrong with one row, in words; handled by row, never seen by a caller."""


@dataclass(slots=True)
class Row:
    """One row.

    Attributes:
        number: which row it is, from 1; a header and empty lines are no rows, but for those of plain text.
        line: the line of the file that it begins on, from 1; None where a file has no lines.
        values: its cells by column; None where they cannot be told.
        fault: what is wrong with it, or None.
        text: a JSON object as it was written, without what stands around it; None in other formats.
    """

    number: int
    line: int | None
    values: dict[str, Any] | None
    fault: str | None = None
    text: str | None = None

    @property
    def place(self) -> str:
        """Where the row is, in words."""
        return f"row {self.number}" + ("" if self.line is None else f" (line {self.line})")


class Rows:
    """The rows of one file, from front to back.

    Attributes:
        names: the columns; None where each row has its own.
        types: Arrow types of the columns; None where values are texts or JSON.
        digest: of everything read so far; None where the file itself can be looked at again.
        has_header: whether the first line is a header.
        header_by_looks: whether the first line was taken for a header because nobody said what it is.
    """

    names: list[str] | None = None
    has_header: bool = False
    header_by_looks: bool = False
    types: dict[str, Any] | None = None
    total: int | None = None
    digest: str | None = None

    def __init__(self) -> None:
        self.number = 0
        self._back: list[Row] = []

    def peek(self, count: int) -> list[Row]:
        """Return the next ``count`` rows, which `take` will return again."""
        self._back = self.take(count)
        return self._back

    def take(self, count: int) -> list[Row]:
        """Return the next ``count`` rows, fewer at the end."""
        found, self._back = self._back[:count], self._back[count:]
        return found + self._take(count - len(found)) if len(found) < count else found

    def skip(self, count: int) -> int:
        """Pass over ``count`` rows; returns how many there were."""
        found, self._back = min(count, len(self._back)), self._back[count:]
        return found + self._skip(count - found) if found < count else found

    def want(self, columns: list[str]) -> None:
        """Say which columns will be asked for, where that saves reading the others."""

    def position(self) -> tuple[int, int | None]:
        """Return how far the file is read, and how far it goes, both in bytes or both in rows."""
        return self.number, self.total

    def close(self) -> None:
        """Close the file."""

    def _take(self, count: int) -> list[Row]:
        raise NotImplementedError

    def _skip(self, count: int) -> int:
        raise NotImplementedError


def format_of(source: str | os.PathLike[str], format: str | None = None) -> str:
    """Return the format of a file: as given, else by its suffix; standard input is text."""
    return format or ("text" if os.fspath(source) == STDIN else _format_of(Path(source)))


def open_rows(source: str | os.PathLike[str], format: str | None = None, header: bool | None = None) -> Rows:
    """Return the rows of a file, or of standard input for ``"-"``.

    Args:
        source: the path; a ``.gz`` file is unpacked on the way.
        format: one of `FORMATS`; by default the suffix says, and standard input is text.
        header: whether the first line of a CSV or TSV file is a header; None decides by its looks.

    Raises:
        DataError: no such file, or a format that cannot be read row by row.
    """
    is_stdin = os.fspath(source) == STDIN
    path = Path(source)
    if not is_stdin:
        expect_file(path)
    kind = format_of(source, format)
    if kind not in FORMATS or (is_stdin and kind in ("parquet", "arrow")):
        known = FORMATS[:4] if is_stdin else FORMATS
        advice = "write one JSON object a line (jsonl)" if kind in get_args(Format) else "say which it is"
        raise DataError(
            f"{path}: format is {kind!r}{nearest(kind, known)}; expected one of {', '.join(known)}, which are read "
            f"row by row; {advice}",
            path=str(path),
            format=kind,
        )
    if kind in ("parquet", "arrow"):
        return _TableRows(path, kind)
    file = sys.stdin.buffer if is_stdin else _open(path)
    size = None if is_stdin else path.stat().st_size
    if kind in ("csv", "tsv"):
        try:
            return _CellRows(file, str(path), size, is_stdin, kind == "csv", header)
        except BaseException:
            if not is_stdin:
                file.close()
            raise
    return _LineRows(file, str(path), size, is_stdin, kind == "jsonl")


class _TextRows(Rows):
    """What formats of lines share: numbered lines, and how far they are read."""

    def __init__(self, file: IO[bytes], name: str, size: int | None, hashed: bool) -> None:
        super().__init__()
        self._file, self._name, self._size = file, name, size
        self._hash = hashlib.blake2b(digest_size=16) if hashed else None
        self._lines = self._numbered()

    def _numbered(self) -> Iterator[tuple[int, bytes]]:
        """Yield the lines with their numbers, from 1."""
        number = 0
        try:
            for number, raw in numbered_lines(iter(partial(self._file.readline, MOST_LINE + 1), b"")):
                if len(raw) > MOST_LINE:
                    raise DataError(
                        f"{self._name}: line {number} has more than {MOST_LINE:,} bytes; expected a row on each line; "
                        "split it, or check what the file is",
                        path=self._name,
                        line=number,
                    )
                if self._hash is not None:
                    self._hash.update(raw)
                yield number, raw
        except (EOFError, OSError, zlib.error) as error:
            raise DataError(
                f"{self._name}: unreadable after line {number} ({error}); expected a whole file; copy it again",
                path=self._name,
                line=number + 1,
            ) from None

    @property
    def digest(self) -> str | None:  # type: ignore[override]
        """The digest of all lines read so far, where the input cannot be read twice."""
        return None if self._hash is None else self._hash.hexdigest()

    def position(self) -> tuple[int, int | None]:
        """Return bytes read and bytes there are; of a packed file, packed ones."""
        if self._size is None:
            return self.number, None
        raw = getattr(self._file, "fileobj", None)  # the file below a gzip file
        return (raw or self._file).tell() if raw is not None or not self._file.closed else self._size, self._size

    def close(self) -> None:
        """Close the file."""
        if self._file is not sys.stdin.buffer:
            self._file.close()


class _LineRows(_TextRows):
    """A JSON object, or a text, on each line.

    Each line of plain text is a row, so that answers are lines of the file; empty lines of JSON are no rows.
    """

    def __init__(self, file: IO[bytes], name: str, size: int | None, hashed: bool, is_json: bool) -> None:
        super().__init__(file, name, size, hashed)
        self._json = is_json
        if not is_json:
            self.names = ["text"]

    def _skip(self, count: int) -> int:
        passed = 0
        while passed < count:
            for _, raw in self._lines:
                if not (self._json and raw.isspace()):
                    break
            else:
                break
            passed += 1
        self.number += passed
        return passed

    def _take(self, count: int) -> list[Row]:
        rows: list[Row] = []
        while len(rows) < count and (found := next(self._lines, None)) is not None:
            line, raw = found
            if not (self._json and raw.isspace()):
                self.number += 1
                rows.append(self._row(line, raw))
        return rows

    def _row(self, line: int, raw: bytes) -> Row:
        try:
            text = _decoded(raw, line)
            if not self._json:
                return Row(self.number, line, {"text": text.rstrip("\r\n")})
            text = text.strip()
            values = _parsed(text)
        except RowFault as fault:
            return Row(self.number, line, None, str(fault))
        except (ValueError, RecursionError) as error:
            return Row(
                self.number, line, None,
                f"invalid JSON ({error}), expected an object; correct the line: "
                f"{printable(raw[:400].decode('utf-8', 'replace'), 60)}",
            )  # fmt: skip
        if not isinstance(values, dict):
            return Row(self.number, line, None, f"found {type(values).__name__}, expected a JSON object")
        return Row(self.number, line, values, None, text)


class _CellRows(_TextRows):
    """Rows of cells under a header; see `flodl.data.cells`."""

    def __init__(
        self, file: IO[bytes], name: str, size: int | None, hashed: bool, quoted: bool, header: bool | None
    ) -> None:
        super().__init__(file, name, size, hashed)
        cells = CellRows(self._lines, quoted=quoted, delimiter="" if quoted else "\t", header=header)
        if cells.fault is not None:
            line, (found, expected) = cells.fault
            raise DataError(f"{name}: line {line}, the first with cells: found {found}, expected {expected}", line=line)
        self.names, self.has_header, self.header_by_looks = cells.names, cells.has_header, cells.found_header
        self._cells = iter(cells)

    def _skip(self, count: int) -> int:
        passed = sum(1 for _ in islice(self._cells, count))
        self.number += passed
        return passed

    def _take(self, count: int) -> list[Row]:
        rows: list[Row] = []
        assert self.names is not None
        for line, cells in islice(self._cells, count):
            self.number += 1
            if isinstance(cells, tuple):
                rows.append(Row(self.number, line, None, f"found {cells[0]}, expected {cells[1]}"))
            else:
                rows.append(Row(self.number, line, dict(zip(self.names, cells, strict=True))))
        return rows


class _TableRows(Rows):
    """The rows of a Parquet or Arrow file."""

    def __init__(self, path: Path, kind: str) -> None:
        super().__init__()
        self._batches = BatchRows(path, kind)
        self.names, self.types, self.total = self._batches.names, self._batches.types(), self._batches.total

    def want(self, columns: list[str]) -> None:
        """Read these columns only."""
        self._batches.columns = columns

    def close(self) -> None:
        """Close the file."""
        self._batches.close()

    def _skip(self, count: int) -> int:
        passed = self._batches.skip(count)
        self.number += passed
        return passed

    def _take(self, count: int) -> list[Row]:
        found = self._batches.take(count)
        first = self.number + 1
        self.number += len(found)
        return [Row(first + k, None, values) for k, values in enumerate(found)]


def _parsed(text: str) -> Any:
    """Return the value of a JSON text that nothing stands around."""
    try:
        values, end = _SCAN(text, 0)
        if end == len(text):
            return values
    except StopIteration:
        pass
    return _DECODE(text)  # says what is wrong


def _decoded(raw: bytes, line: int) -> str:
    try:
        # spreadsheet programs mark UTF-8 files with a sign at the very start
        return raw.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise RowFault(f"{undecodable(raw, error)}, expected UTF-8 text") from None

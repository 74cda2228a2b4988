"""Rows of an input file in order: read some at a time, or skipped without parsing.

An invalid row is a row with a fault, so that the following rows keep their numbers. The caller decides whether a fault
ends the reading.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal, get_args

from flodl.errors import DataError, nearest, printable
from flodl_hf.readers.arrow import BatchRows
from flodl_hf.readers.cells import Cells
from flodl_hf.readers.path_checks import expect_file

__all__ = ["FORMATS", "STDIN", "Format", "Row", "RowFault", "Rows", "format_of", "numbered_texts", "open_rows"]

Format = Literal["csv", "tsv", "jsonl", "json", "text", "conll", "squad", "parquet", "arrow"]
FORMATS = ("csv", "tsv", "jsonl", "text", "parquet", "arrow")
"""Formats that are read row by row."""

SUFFIXES: dict[str, Format] = {
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
MAX_LINE_BYTES = 1 << 26
STDIN = "-"
_DECODE = json.JSONDecoder().decode
_SCAN: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


class RowFault(Exception):
    """Fault of one row. The reader or writer of the row handles it."""


@dataclass(slots=True)
class Row:
    """One row.

    Attributes:
        number: number of the row, from 1. Headers and empty lines have no number, except empty lines of plain text.
        line: first line of the row in the file, from 1; None for formats without lines.
        values: cells by column; None for an invalid row.
        fault: the fault, as "found ..., expected ...", or None.
        text: a JSON object as written in the file, without surrounding blanks; None for other formats.
    """

    number: int
    line: int | None
    values: dict[str, Any] | None
    fault: str | None = None
    text: str | None = None

    @property
    def place(self) -> str:
        """Row and line number, as text."""
        return f"row {self.number}" + ("" if self.line is None else f" (line {self.line})")


class Rows:
    """The rows of one file, from start to end.

    Attributes:
        names: the columns; None if each row has its own columns.
        types: Arrow types of the columns; None if values are texts or JSON.
        digest: hash of all bytes read so far; None if the file can be read again.
        has_header: whether the first line is a header.
        guessed_header: whether the header was recognised by its cells and not requested.
    """

    names: list[str] | None = None
    has_header: bool = False
    guessed_header: bool = False
    types: dict[str, Any] | None = None
    total: int | None = None
    digest: str | None = None

    def __init__(self) -> None:
        self.number = 0
        self._peeked: list[Row] = []

    def peek(self, count: int) -> list[Row]:
        """Return the next ``count`` rows. `take` returns them again."""
        self._peeked = self.take(count)
        return self._peeked

    def take(self, count: int) -> list[Row]:
        """Return the next ``count`` rows, fewer at the end."""
        found, self._peeked = self._peeked[:count], self._peeked[count:]
        return found + self._take(count - len(found)) if len(found) < count else found

    def skip(self, count: int) -> int:
        """Skip ``count`` rows. Return the number of skipped rows, which is smaller at the end."""
        found, self._peeked = min(count, len(self._peeked)), self._peeked[count:]
        return found + self._skip(count - found) if found < count else found

    def want(self, columns: list[str]) -> None:
        """Set the columns to read, if the format can leave out the others."""

    def position(self) -> tuple[int, int | None]:
        """Return the amount read and the total amount, both in bytes or both in rows."""
        return self.number, self.total

    def close(self) -> None:
        """Close the file."""

    def _take(self, count: int) -> list[Row]:
        raise NotImplementedError

    def _skip(self, count: int) -> int:
        raise NotImplementedError


def format_of(source: str | os.PathLike[str], format: str | None = None) -> str:
    """Return ``format`` if it is given, else the format of the suffix. Standard input is text.

    Raises:
        DataError: the suffix is not known.
    """
    if format or os.fspath(source) == STDIN:
        return format or "text"
    suffixes = [suffix.lower() for suffix in Path(source).suffixes]
    if suffixes and suffixes[-1] == ".gz":
        suffixes.pop()
    kind = SUFFIXES.get(suffixes[-1]) if suffixes else None
    if kind is None:
        raise DataError(
            f"{source}: found the suffix {''.join(suffixes) or '(none)'!r}, expected one of {sorted(SUFFIXES)}. "
            "Rename the file, or set format=.",
            path=str(source),
        )
    return kind


def open_rows(
    source: str | os.PathLike[str],
    format: str | None = None,
    header: bool | None = None,
    *,
    columns: Sequence[str] | None = None,
    delimiter: str | None = None,
) -> Rows:
    """Return the rows of a file, or of standard input for ``"-"``.

    Args:
        source: the path; a ``.gz`` file is decompressed.
        format: one of `FORMATS`; by default the suffix determines it, and standard input is text.
        header: whether the first line of a CSV or TSV file is a header; None decides by its cells.
        columns: names of the columns of a CSV or TSV file without a header.
        delimiter: delimiter of a CSV or TSV file; None decides by the format and the header.

    Raises:
        DataError: the file does not exist, or its format cannot be read row by row.
    """
    is_stdin = os.fspath(source) == STDIN
    path = Path(source)
    if not is_stdin:
        expect_file(path)
    kind = format_of(source, format)
    if kind not in FORMATS or (is_stdin and kind in ("parquet", "arrow")):
        known = FORMATS[:4] if is_stdin else FORMATS
        advice = "Convert the data to JSON lines (jsonl)." if kind in get_args(Format) else "Set format=."
        raise DataError(
            f"{path}: found format {kind!r}{nearest(kind, known)}, expected one of {', '.join(known)}, which are read "
            f"row by row. {advice}",
            path=str(path),
            format=kind,
        )
    if kind in ("parquet", "arrow"):
        return _TableRows(path, kind)
    lines = _Lines(sys.stdin.buffer, STDIN, None) if is_stdin else _lines_of(path)
    if kind not in ("csv", "tsv"):
        return _LineRows(lines, kind == "jsonl")
    try:
        delimiter = delimiter or ("" if kind == "csv" else "\t")
        return _CellRows(lines, kind == "csv", delimiter, columns, header)
    except BaseException:
        lines.close()
        raise


# ---- lines ---------------------------------------------------------------------------------------------


def open_binary(path: Path) -> IO[bytes]:
    """Open a file for reading. A ``.gz`` file is decompressed."""
    # A gzip file has all methods of a binary file that the readers use.
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else open(path, "rb")  # type: ignore[return-value]


class _Lines:
    r"""Numbered lines of a file, from 1. Lines end at ``\n``, ``\r\n`` or ``\r``.

    Args:
        file: the file, open for reading.
        name: name of the file in errors.
        size: bytes of the file; None for standard input, of which a hash is computed instead.
    """

    def __init__(self, file: IO[bytes], name: str, size: int | None) -> None:
        self.file, self.name, self.size = file, name, size
        self.hash = hashlib.blake2b(digest_size=16) if size is None else None
        self.numbered = self._read()

    def _read(self) -> Iterator[tuple[int, bytes]]:
        number = 0
        try:
            for number, raw in _split(iter(partial(self.file.readline, MAX_LINE_BYTES + 1), b"")):
                if len(raw) > MAX_LINE_BYTES:
                    raise self._fault(
                        number, f"a line with more than {MAX_LINE_BYTES:,} bytes", "one row on each line. Split the "
                        "line, or check the format of the file.",
                    )  # fmt: skip
                if self.hash is not None:
                    self.hash.update(raw)
                yield number, raw
        except (EOFError, OSError, zlib.error) as error:
            raise self._fault(number + 1, f"unreadable data ({error})", "a complete file. Copy it again.") from None

    def _fault(self, line: int, found: str, expected: str) -> DataError:
        problem = f"line {line}: found {found}, expected {expected}"
        return DataError(f"{self.name}: {problem}", path=self.name, line=line, problems=[problem])

    def position(self, number: int) -> tuple[int, int | None]:
        """Return the bytes read and the size of the file, compressed bytes for a compressed file."""
        if self.size is None:
            return number, None
        raw = getattr(self.file, "fileobj", None)  # the compressed file
        if raw is None and self.file.closed:
            return self.size, self.size
        return (raw or self.file).tell(), self.size

    def close(self) -> None:
        """Close the file."""
        if self.size is not None:
            self.file.close()


def _lines_of(path: Path) -> _Lines:
    return _Lines(open_binary(path), str(path), path.stat().st_size)


def _split(chunks: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    r"""Yield numbered lines of chunks that end after each ``\n``."""
    number, rest = 0, b""
    for chunk in chunks:
        whole = rest + chunk if rest else chunk
        rest = b""
        if whole.find(b"\r", 0, max(0, len(whole) - 2)) < 0:
            number += 1
            yield number, whole
            continue
        lines = whole.splitlines(keepends=True)
        if not lines[-1].endswith(b"\n"):
            rest = lines.pop()
        for line in lines:
            number += 1
            yield number, line
    if rest:
        yield number + 1, rest


def _decoded(raw: bytes, line: int) -> str:
    try:
        # Spreadsheet programs start UTF-8 files with a byte order mark.
        return raw.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        found = f"byte 0x{raw[error.start]:02x} at position {error.start + 1}"
        if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
            found += " (UTF-16 starts like this; iconv -f UTF-16 -t UTF-8 converts it)"
        raise RowFault(f"found {found}, expected UTF-8 text") from None


def numbered_texts(path: Path) -> Iterator[tuple[int, str | RowFault]]:
    """Yield the numbered lines of a text file. A line that is not UTF-8 is a `RowFault`."""
    lines = _lines_of(path)
    try:
        for number, raw in lines.numbered:
            try:
                yield number, _decoded(raw, number)
            except RowFault as fault:
                yield number, fault
    finally:
        lines.close()


class _TextRows(Rows):
    """Rows of a file with lines."""

    def __init__(self, lines: _Lines) -> None:
        super().__init__()
        self._lines = lines

    @property
    def digest(self) -> str | None:  # type: ignore[override]
        """Hash of all lines read so far, for input that cannot be read twice."""
        return None if self._lines.hash is None else self._lines.hash.hexdigest()

    def position(self) -> tuple[int, int | None]:
        """Return the bytes read and the total bytes, compressed bytes for a compressed file."""
        return self._lines.position(self.number)

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


class _LineRows(_TextRows):
    """A JSON object, or a text, on each line.

    Each line of plain text is a row, so that answers have the numbers of lines. Empty lines of JSON are skipped.
    """

    def __init__(self, lines: _Lines, is_json: bool) -> None:
        super().__init__(lines)
        self._json = is_json
        if not is_json:
            self.names = ["text"]

    def _next(self) -> tuple[int, bytes] | None:
        for line, raw in self._lines.numbered:
            if not (self._json and raw.isspace()):
                return line, raw
        return None

    def _skip(self, count: int) -> int:
        skipped = 0
        while skipped < count and self._next() is not None:
            skipped += 1
        self.number += skipped
        return skipped

    def _take(self, count: int) -> list[Row]:
        rows: list[Row] = []
        while len(rows) < count and (found := self._next()) is not None:
            self.number += 1
            rows.append(self._row(*found))
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
            shown = printable(raw[:400].decode("utf-8", "replace").strip(), 60)
            return Row(self.number, line, None, f"found invalid JSON ({error}): {shown}, expected a JSON object")
        if not isinstance(values, dict):
            found = f"{type(values).__name__}: {printable(text, 60)}"
            return Row(self.number, line, None, f"found {found}, expected a JSON object")
        return Row(self.number, line, values, None, text)


def _parsed(text: str) -> Any:
    """Return the value of a JSON text without surrounding blanks."""
    try:
        values, end = _SCAN(text, 0)
        if end == len(text):
            return values
    except StopIteration:
        pass
    return _DECODE(text)  # raises the error


class _CellRows(_TextRows):
    """Rows of cells of a CSV or TSV file."""

    def __init__(
        self, lines: _Lines, quoted: bool, delimiter: str, columns: Sequence[str] | None, header: bool | None
    ) -> None:
        super().__init__(lines)
        self._damaged: dict[int, str] = {}
        cells = Cells(self._texts(), self._damaged, quoted=quoted, delimiter=delimiter, columns=columns, header=header)
        if cells.fault is not None:
            line, fault = cells.fault
            problem = f"line {line}: {fault}"
            raise DataError(f"{lines.name}: {problem}", path=lines.name, line=line, problems=[problem])
        self.names, self.has_header, self.guessed_header = cells.names, cells.has_header, cells.guessed_header
        self._cells = iter(cells)

    def _texts(self) -> Iterator[str]:
        for number, raw in self._lines.numbered:
            try:
                yield _decoded(raw, number)
            except RowFault as fault:
                self._damaged[number] = str(fault)
                yield raw.decode("utf-8", "replace")

    def _skip(self, count: int) -> int:
        skipped = sum(1 for _ in islice(self._cells, count))
        self.number += skipped
        return skipped

    def _take(self, count: int) -> list[Row]:
        rows: list[Row] = []
        assert self.names is not None
        for line, cells in islice(self._cells, count):
            self.number += 1
            if isinstance(cells, str):
                rows.append(Row(self.number, line, None, cells))
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
        """Set the columns to read."""
        self._batches.columns = columns

    def close(self) -> None:
        """Close the file."""
        self._batches.close()

    def _skip(self, count: int) -> int:
        skipped = self._batches.skip(count)
        self.number += skipped
        return skipped

    def _take(self, count: int) -> list[Row]:
        rows: list[Row] = []
        while len(rows) < count and (batch := self._batches.take_batch(count - len(rows))) is not None:
            rows += [Row(self.number + k, None, values) for k, values in enumerate(batch.to_pylist(), 1)]
            self.number += batch.num_rows
        return rows

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
from flodl_hf.checkpoints.folders import expect_file
from flodl_hf.tokenization.readers.arrow import BatchRows
from flodl_hf.tokenization.readers.cells import Cells

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

    Args:
        source: an item for each row; the following items are read when needed.
        make: makes a row of an item and the number of the row.

    Attributes:
        names: the columns; None if each row has its own columns.
        types: Arrow types of the columns; None if values are texts or JSON.
        total: number of rows; None if it is not known.
        has_header: whether the first line is a header.
        guessed_header: whether the header was recognised by its cells and not requested.
        digest: hash of all bytes read so far; None if the file can be read again.
    """

    has_header = guessed_header = False
    types: dict[str, Any] | None = None
    total: int | None = None

    def __init__(
        self, source: Iterator[Any], make: Callable[[int, Any], Row], names: list[str] | None, lines: Lines | None
    ) -> None:
        self.names = names
        self.number = 0
        self._source, self._make, self._lines = source, make, lines
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
        peeked, self._peeked = min(count, len(self._peeked)), self._peeked[count:]
        skipped = self._skip(count - peeked) if peeked < count else 0
        self.number += skipped
        return peeked + skipped

    @property
    def digest(self) -> str | None:
        """Hash of all lines read so far, for input that cannot be read twice."""
        return None if self._lines is None else self._lines.digest()

    def want(self, columns: list[str]) -> None:
        """Set the columns to read, if the format can leave out the others."""

    def position(self) -> tuple[int, int | None]:
        """Return the amount read and the total amount, both in bytes or both in rows."""
        return (self.number, self.total) if self._lines is None else self._lines.position(self.number)

    def close(self) -> None:
        """Close the file."""
        if self._lines is not None:
            self._lines.close()

    def _take(self, count: int) -> list[Row]:
        first = self.number + 1
        rows = [self._make(number, item) for number, item in enumerate(islice(self._source, count), first)]
        self.number += len(rows)
        return rows

    def _skip(self, count: int) -> int:
        return sum(1 for _ in islice(self._source, count))


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
    lines = Lines(None if is_stdin else path)
    if kind == "text":
        return Rows(lines.numbered, _text_row, ["text"], lines)
    if kind == "jsonl":
        return Rows((item for item in lines.numbered if not item[1].isspace()), _json_row, None, lines)
    try:
        return _cell_rows(lines, kind == "csv", delimiter or ("" if kind == "csv" else "\t"), columns, header)
    except BaseException:
        lines.close()
        raise


# ---- lines ---------------------------------------------------------------------------------------------


def open_binary(path: Path) -> IO[bytes]:
    """Open a file for reading. A ``.gz`` file is decompressed."""
    # A gzip file has all methods of a binary file that the readers use.
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else open(path, "rb")  # type: ignore[return-value]


class Lines:
    r"""Numbered lines of a file, from 1. Lines end at ``\n``, ``\r\n`` or ``\r``.

    Args:
        path: the file; None for standard input, of which a hash is computed.
    """

    def __init__(self, path: Path | None) -> None:
        self.name = STDIN if path is None else str(path)
        self._file = sys.stdin.buffer if path is None else open_binary(path)
        self._size = None if path is None else path.stat().st_size
        self._hash = hashlib.blake2b(digest_size=16) if path is None else None
        self.numbered = self._read()

    def _read(self) -> Iterator[tuple[int, bytes]]:
        number = 0
        try:
            for number, raw in _split(iter(partial(self._file.readline, MAX_LINE_BYTES + 1), b"")):
                if len(raw) > MAX_LINE_BYTES:
                    raise self.error(
                        number, f"found a line with more than {MAX_LINE_BYTES:,} bytes, expected one row on each line. "
                        "Split the line, or check the format of the file.",
                    )  # fmt: skip
                if self._hash is not None:
                    self._hash.update(raw)
                yield number, raw
        except (EOFError, OSError, zlib.error) as error:
            fault = f"found unreadable data ({error}), expected a complete file. Copy it again."
            raise self.error(number + 1, fault) from None

    def texts(self) -> Iterator[tuple[int, str | RowFault]]:
        """Yield the numbered lines as texts and close the file. A line that is not UTF-8 is a `RowFault`."""
        try:
            for number, raw in self.numbered:
                try:
                    yield number, _decoded(raw, number)
                except RowFault as fault:
                    yield number, fault
        finally:
            self.close()

    def error(self, line: int, fault: str) -> DataError:
        """Return the error for a fault that ends the reading."""
        problem = f"line {line}: {fault}"
        return DataError(f"{self.name}: {problem}", path=self.name, line=line, problems=[problem])

    def digest(self) -> str | None:
        """Return the hash of all lines read so far; None for a file."""
        return None if self._hash is None else self._hash.hexdigest()

    def position(self, number: int) -> tuple[int, int | None]:
        """Return the bytes read and the size of the file, compressed bytes for a compressed file."""
        if self._size is None:
            return number, None
        raw = getattr(self._file, "fileobj", None)  # the compressed file
        if raw is None and self._file.closed:
            return self._size, self._size
        return (raw or self._file).tell(), self._size

    def close(self) -> None:
        """Close the file."""
        if self._size is not None:
            self._file.close()


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


# ---- rows ----------------------------------------------------------------------------------------------


def _text_row(number: int, item: tuple[int, bytes]) -> Row:
    line, raw = item
    try:
        return Row(number, line, {"text": _decoded(raw, line).rstrip("\r\n")})
    except RowFault as fault:
        return Row(number, line, None, str(fault))


def _json_row(number: int, item: tuple[int, bytes]) -> Row:
    line, raw = item
    try:
        text = _decoded(raw, line).strip()
        values = _parsed(text)
    except RowFault as fault:
        return Row(number, line, None, str(fault))
    except (ValueError, RecursionError) as error:
        shown = printable(raw[:400].decode("utf-8", "replace").strip(), 60)
        return Row(number, line, None, f"found invalid JSON ({error}): {shown}, expected a JSON object")
    if not isinstance(values, dict):
        shown = f"{type(values).__name__}: {printable(text, 60)}"
        return Row(number, line, None, f"found {shown}, expected a JSON object")
    return Row(number, line, values, None, text)


def _parsed(text: str) -> Any:
    """Return the value of a JSON text without surrounding blanks."""
    try:
        values, end = _SCAN(text, 0)
        if end == len(text):
            return values
    except StopIteration:
        pass
    return _DECODE(text)  # raises the error


def _cell_rows(lines: Lines, quoted: bool, delimiter: str, columns: Sequence[str] | None, header: bool | None) -> Rows:
    """Return the rows of cells of a CSV or TSV file."""
    damaged: dict[int, str] = {}

    def texts() -> Iterator[str]:
        for number, raw in lines.numbered:
            try:
                yield _decoded(raw, number)
            except RowFault as fault:
                damaged[number] = str(fault)
                yield raw.decode("utf-8", "replace")

    cells = Cells(texts(), damaged, quoted=quoted, delimiter=delimiter, columns=columns, header=header)
    if cells.fault is not None:
        raise lines.error(*cells.fault)

    def make(number: int, item: tuple[int, list[str] | str]) -> Row:
        line, found = item
        if isinstance(found, str):
            return Row(number, line, None, found)
        return Row(number, line, dict(zip(cells.names, found, strict=True)))

    rows = Rows(iter(cells), make, cells.names, lines)
    rows.has_header, rows.guessed_header = cells.has_header, cells.guessed_header
    return rows


class _TableRows(Rows):
    """The rows of a Parquet or Arrow file."""

    def __init__(self, path: Path, kind: str) -> None:
        self._batches = BatchRows(path, kind)
        super().__init__(iter(()), lambda number, values: Row(number, None, values), self._batches.names, None)
        self.types, self.total = self._batches.types(), self._batches.total

    def want(self, columns: list[str]) -> None:
        """Set the columns to read."""
        self._batches.columns = columns

    def close(self) -> None:
        """Close the file."""
        self._batches.close()

    def _take(self, count: int) -> list[Row]:
        rows: list[Row] = []
        while len(rows) < count and (batch := self._batches.take_batch(count - len(rows))) is not None:
            self._source = iter(batch.to_pylist())
            rows += super()._take(batch.num_rows)
        return rows

    def _skip(self, count: int) -> int:
        return self._batches.skip(count)

"""Rows of a file of lines in order, read some at a time, or skipped without parsing; cells of CSV and TSV files.

An invalid row is a row with a fault, so that the following rows keep their numbers. The caller decides whether a fault
ends the reading. Column names of CSV files equal pandas': an empty name becomes ``Unnamed: 0``, a repeated name
``text.1``.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from flodl.errors import DataError, printable

MAX_LINE_BYTES = 1 << 26
MAX_FIELD_BYTES = 1 << 27
"""Longest field of a CSV file. The default of the csv module, 131,072, is less than a long document."""

HEADER_SAMPLE_ROWS = 20
"""Rows below the first line that are read to decide whether it is a header."""

CHUNK_ROWS = 1024
MAX_NAME_LENGTH = 64
DELIMITERS = (";", "\t", "|")
UNNAMED = "Unnamed: "

COLUMN_WORDS = frozenset(
    (
        *("text", "texts", "sentence", "sentence1", "sentence2", "label", "labels", "target", "class", "category"),
        *("id", "idx", "index", "guid", "title", "question", "question1", "question2", "context", "answer", "answers"),
        *("premise", "hypothesis", "query", "passage", "document", "anchor", "positive", "negative", "words", "tags"),
        *("text1", "text2", "text_pair", "review", "content", "comment", "comment_text", "tweet", "body", "score"),
    )
)
"""Usual names of columns of text data. A line with numbers is a header if it contains one of them."""

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

    def __iter__(self) -> Iterator[Row]:
        """Yield all rows, then close the file."""
        try:
            while found := self.take(CHUNK_ROWS):
                yield from found
        finally:
            self.close()

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
        """Hash of all lines read so far, for input that cannot be read twice; None for a file."""
        return None if self._lines is None or self._lines.hash is None else self._lines.hash.hexdigest()

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
        self.hash = hashlib.blake2b(digest_size=16) if path is None else None
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
                if self.hash is not None:
                    self.hash.update(raw)
                yield number, raw
        except (EOFError, OSError, zlib.error) as error:
            fault = f"found unreadable data ({error}), expected a complete file. Copy it again."
            raise self.error(number + 1, fault) from None

    def error(self, line: int, fault: str) -> DataError:
        """Return the error for a fault that ends the reading."""
        problem = f"line {line}: {fault}"
        return DataError(f"{self.name}: {problem}", path=self.name, line=line, problems=[problem])

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


def text_row(number: int, item: tuple[int, bytes]) -> Row:
    """Return a numbered line as a row."""
    line, raw = item
    try:
        return Row(number, line, {"text": _decoded(raw, line).rstrip("\r\n")})
    except RowFault as fault:
        return Row(number, line, None, str(fault))


def json_row(number: int, item: tuple[int, bytes]) -> Row:
    """Return a numbered line with a JSON object as a row."""
    line, raw = item
    try:
        text = _decoded(raw, line).strip()
        values = _parsed(text)
    except RowFault as fault:
        return Row(number, line, None, str(fault))
    except (ValueError, RecursionError) as error:
        shown = printable(raw[:400].decode("utf-8", "replace").strip(), 60)
        return Row(number, line, None, f"found invalid JSON ({error}): {shown}, expected a JSON object; correct it")
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


def cell_rows(lines: Lines, quoted: bool, delimiter: str, columns: Sequence[str] | None, header: bool | None) -> Rows:
    """Return the rows of a CSV or TSV file.

    Args:
        lines: the lines.
        quoted: whether quotes enclose cells, as in CSV files.
        delimiter: delimiter of cells; if empty, a comma, or the delimiter of a header without commas.
        columns: names of the columns, for files without a header.
        header: whether the first line is a header; None decides by its cells and those below.

    Raises:
        DataError: the first line cannot be read.
    """
    csv.field_size_limit(max(MAX_FIELD_BYTES, csv.field_size_limit()))
    damaged: dict[int, str] = {}
    texts = _texts(lines, damaged)
    if not delimiter:
        delimiter, texts = _separated(texts) if columns is None and header is not False else (",", texts)
    quoting = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
    items = _cells(csv.reader(texts, delimiter=delimiter, quoting=quoting, strict=True), damaged)
    ahead = list(islice(items, 1 + HEADER_SAMPLE_ROWS))
    names, below = list(columns or ()), [cells for _, cells in ahead[1:] if isinstance(cells, list)]
    is_header = has_row_names = False
    if ahead:
        line, cells = ahead[0]
        if isinstance(cells, str):
            raise lines.error(line, cells)
        is_header = (columns is None and _is_header(cells, below)) if header is None else header
        if columns is None:
            names = _column_names(cells) if is_header else _default_names(cells)
        has_row_names = is_header and _has_row_names(len(names), below)

    def make(number: int, item: tuple[int, list[str] | str]) -> Row:
        line, cells = item
        if isinstance(cells, str):
            return Row(number, line, None, cells)
        if has_row_names:
            cells = cells[1:]
        if len(cells) != len(names):
            # Empty cells after the last column are dropped.
            if any(cells[len(names) :]) or not all(name.startswith(UNNAMED) for name in names[len(cells) :]):
                fault = f"found {len(cells)} cells: {printable(delimiter.join(cells), 60)}, expected {len(names)}"
                return Row(number, line, None, fault)
            cells = [*cells[: len(names)], *[""] * (len(names) - len(cells))]
        return Row(number, line, dict(zip(names, cells, strict=True)))

    rows = Rows(chain(ahead[is_header:], items), make, names, lines)
    rows.has_header, rows.guessed_header = is_header, is_header and header is None
    return rows


def _texts(lines: Lines, damaged: dict[int, str]) -> Iterator[str]:
    """Yield the lines of a file as texts; ``damaged`` receives the faults of lines, by number."""
    for number, raw in lines.numbered:
        try:
            yield _decoded(raw, number)
        except RowFault as fault:
            damaged[number] = str(fault)
            yield raw.decode("utf-8", "replace")


def _cells(reader: Any, damaged: dict[int, str]) -> Iterator[tuple[int, list[str] | str]]:
    """Yield the first line of each row with its cells or its fault. Empty lines are skipped."""
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield line, f"found {error}, expected valid CSV"
            continue
        read = range(line, reader.line_num + 1) if damaged else ()
        found = [damaged.pop(number) for number in read if number in damaged]
        if found or (cells and not (len(cells) == 1 and not cells[0].strip())):
            yield line, found[0] if found else cells


def _separated(texts: Iterator[str]) -> tuple[str, Iterator[str]]:
    """Return the delimiter of a CSV file according to its header, and all its lines.

    The delimiter is a comma. If the header contains none, as in files of spreadsheet programs in countries with a
    decimal comma, it is the semicolon, tab or bar that divides the header into several names.
    """
    first = []
    for text in texts:
        first.append(text)
        if text.strip():
            break
    header = first[-1].strip("\r\n") if first else ""
    found = []
    for sign in DELIMITERS:
        cells = next(csv.reader([header], delimiter=sign), [])
        # Several names; an empty first name belongs to row numbers.
        named = sum(bool(cell.strip()) for cell in cells)
        if (named > 1 or (named == 1 and not cells[0].strip())) and _is_header(cells, ()):
            found.append(sign)
    has_comma = len(next(csv.reader([header]), [])) != 1
    return "," if has_comma or len(found) != 1 else found[0], chain(first, texts)


def _is_header(cells: Sequence[str], below: Sequence[Sequence[str]]) -> bool:
    """Return whether a first line contains column names, according to its cells and the rows below."""
    names = {at: cell.strip() for at, cell in enumerate(cells) if cell.strip()}
    numbers = [name for name in names.values() if _is_number(name)]
    is_unique = len({*names.values()}) == len(names)
    if names and not numbers and is_unique and all(len(name) <= MAX_NAME_LENGTH for name in names.values()):
        return True
    columns = {at: [row[at].strip() for row in below if at < len(row) and row[at].strip()] for at in names}
    if any(name.lower() in COLUMN_WORDS and name not in columns[at] for at, name in names.items()):
        return True
    is_numeric = {at: len(column) > 1 and all(map(_is_number, column)) for at, column in columns.items()}
    if any(is_numeric[at] and not _is_number(name) and len(name.split()) == 1 for at, name in names.items()):
        return True
    # Data frames number columns that have no names.
    counted = [str(k) for k in range(len(numbers))]
    return bool(below) and len(numbers) == len(names) > 0 and numbers == counted and not all(is_numeric.values())


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _column_names(cells: Sequence[str]) -> list[str]:
    """Return a unique name for each column, equal to pandas'."""
    names = [cell.strip() or f"{UNNAMED}{at}" for at, cell in enumerate(cells)]
    counts: Counter[str] = Counter()
    # Named columns keep their names before columns without a name.
    for at in sorted(range(len(names)), key=lambda at: not cells[at].strip()):
        name = names[at]
        while (count := counts[name]) > 0:
            counts[name] += 1
            numbered = f"{name}.{count}"
            if numbered not in names:
                name = numbered
        names[at] = name
        counts[name] += 1
    return names


def _has_row_names(width: int, below: Sequence[Sequence[str]]) -> bool:
    """Return whether each row starts with an additional integer, which R and pandas read as the row's name."""
    long = [row for row in below if len(row) == width + 1]
    if not long or len(long) < len(below) or not any(row[-1] for row in long):
        return False
    return all(re.fullmatch(r"\d+", row[0], re.ASCII) for row in long)


def _default_names(cells: Sequence[str]) -> list[str]:
    """Return column names for a file without a header: texts with labels, or pairs with labels."""
    known = {1: ["text"], 2: ["text", "label"], 3: ["text", "text_pair", "label"]}
    names = known.get(len(cells))
    if names and _is_number(cells[0]) and not all(map(_is_number, cells)):
        names = None
    return names or [f"column_{k}" for k in range(len(cells))]

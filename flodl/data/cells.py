"""The cells of CSV and TSV files: delimiter, header, column names, and rows as wide as the header.

Column names are those that pandas gives: an empty name becomes ``Unnamed: 0``, a repeated one ``text.1``.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

from flodl.errors import printable

__all__ = ["CellRows", "numbered_lines", "undecodable"]

FIELD_BYTES = 1 << 27
"""The longest field of a CSV file; the limit of the csv module, 131,072, is less than a long document."""

LOOKED_AT = 20
"""Rows below the first line that are read to decide whether it is a header."""

NAME_LENGTH = 64
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
"""Words that name columns of text data; one of them makes a header of a line that also contains numbers."""

_INTEGER = re.compile(r"\d+", re.ASCII)

Fault = tuple[str, str]
"""What was found in a row, and what was expected."""


def numbered_lines(chunks: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    r"""Yield lines with their numbers, from 1. Lines end at ``\n``, ``\r\n`` or ``\r``.

    Args:
        chunks: the file, cut behind each ``\n`` and anywhere else.
    """
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


def undecodable(raw: bytes, error: UnicodeDecodeError) -> str:
    """Return the description of a line that is not UTF-8."""
    what = f"byte 0x{raw[error.start]:02x} at position {error.start + 1}"
    is_wide = raw[:2] in (b"\xff\xfe", b"\xfe\xff")
    return f"{what} (this is how UTF-16 begins; iconv -f UTF-16 -t UTF-8 converts it)" if is_wide else what


class CellRows:
    """The rows of a CSV or TSV file; iteration yields the first line of each with its cells, or with its fault.

    Args:
        lines: numbered lines.
        quoted: whether quotes enclose cells, as in CSV files.
        delimiter: between cells; empty: a comma, or the delimiter of a header without commas.
        columns: names of the columns, for files without a header.
        header: whether the first line is a header; None decides by its cells and those below.

    Attributes:
        names: names of the columns.
        has_header: whether the first line is a header.
        found_header: whether the first line was taken for a header because ``header`` is None.
        fault: the first line and its fault, if the first line cannot be read; there are no names then.
    """

    def __init__(
        self,
        lines: Iterator[tuple[int, bytes]],
        *,
        quoted: bool,
        delimiter: str = "",
        columns: Sequence[str] | None = None,
        header: bool | None = None,
    ) -> None:
        if csv.field_size_limit() < FIELD_BYTES:
            csv.field_size_limit(FIELD_BYTES)
        self._damaged: dict[int, str] = {}
        texts = self._decoded(lines)
        if not delimiter:
            delimiter, texts = _separated(texts) if columns is None and header is not False else (",", texts)
        self._delimiter = delimiter
        self._reader = csv.reader(
            texts, delimiter=delimiter, quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE, strict=True
        )
        rows = self._read()
        first = next(rows, None)
        self.names = list(columns or ())
        self.has_header = self.found_header = False
        self.fault: tuple[int, Fault] | None = None
        self._index = False
        self._rows: Iterator[tuple[int, list[str] | Fault]] = iter(())
        if first is None:
            return
        line, cells = first
        if isinstance(cells, tuple):
            self.fault = line, cells
            return
        ahead = list(islice(rows, LOOKED_AT))
        below = [row for _, row in ahead if isinstance(row, list)]
        is_header = (columns is None and _is_header(cells, below)) if header is None else header
        self.has_header, self.found_header = is_header, is_header and header is None
        if columns is None:
            self.names = _column_names(cells) if is_header else _unnamed(cells)
        self._index = is_header and _has_row_names(len(self.names), below)
        self._rows = chain(ahead if is_header else [first, *ahead], rows)

    def __iter__(self) -> Iterator[tuple[int, list[str] | Fault]]:
        width = len(self.names)
        for line, cells in self._rows:
            if self._index and isinstance(cells, list):
                cells = cells[1:]
            yield line, cells if isinstance(cells, tuple) or len(cells) == width else self._fitted(cells)

    def _fitted(self, cells: list[str]) -> list[str] | Fault:
        """Return cells as many as the columns; empty cells behind the last column are dropped."""
        width = len(self.names)
        if not any(cells[width:]) and all(name.startswith(UNNAMED) for name in self.names[len(cells) :]):
            return [*cells[:width], *[""] * (width - len(cells))]
        return f"{len(cells)} cells: {printable(self._delimiter.join(cells), 60)}", f"{width}"

    def _decoded(self, lines: Iterator[tuple[int, bytes]]) -> Iterator[str]:
        for number, raw in lines:
            try:
                # Spreadsheet programs mark UTF-8 files with a byte order mark.
                yield raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                self._damaged[number] = undecodable(raw, error)
                yield raw.decode("utf-8", "replace")

    def _read(self) -> Iterator[tuple[int, list[str] | Fault]]:
        """Yield the first line of each row with its cells or its fault; empty lines are no rows."""
        while True:
            line = self._reader.line_num + 1
            try:
                cells = next(self._reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield line, (str(error), "cells that can be told apart")
                continue
            if self._damaged:
                read = range(line, self._reader.line_num + 1)
                if found := [self._damaged.pop(number) for number in read if number in self._damaged]:
                    yield line, (found[0], "UTF-8 text")
                    continue
            if cells and not (len(cells) == 1 and not cells[0].strip()):
                yield line, cells


def _separated(texts: Iterator[str]) -> tuple[str, Iterator[str]]:
    """Return the delimiter of a CSV file by its header, and all its lines.

    That is a comma. If the header has none, as in files of spreadsheet programs in countries with a decimal comma, it
    is the semicolon, tab or bar that makes several names of the header.
    """
    first = []
    for text in texts:
        first.append(text)
        if text.strip():
            break
    header = first[-1].strip("\r\n") if first else ""
    cells = {sign: next(csv.reader([header], delimiter=sign), []) for sign in (",", *DELIMITERS)}
    found = [sign for sign in DELIMITERS if _names_several(cells[sign])]
    return found[0] if len(cells[","]) == 1 and len(found) == 1 else ",", chain(first, texts)


def _names_several(cells: Sequence[str]) -> bool:
    """Return whether these are several names of columns; an empty first one is that of row numbers."""
    named = sum(bool(cell.strip()) for cell in cells)
    return (named > 1 or (named == 1 and not cells[0].strip())) and _is_header(cells, ())


def _is_header(cells: Sequence[str], below: Sequence[Sequence[str]]) -> bool:
    """Return whether a first line contains names of columns, by its cells and by the rows below."""
    names = {at: cell.strip() for at, cell in enumerate(cells) if cell.strip()}
    numbers = [name for name in names.values() if _is_number(name)]
    is_unique = len({*names.values()}) == len(names)
    if names and not numbers and is_unique and all(len(name) <= NAME_LENGTH for name in names.values()):
        return True
    columns = {at: [row[at].strip() for row in below if at < len(row) and row[at].strip()] for at in names}
    if any(name.lower() in COLUMN_WORDS and name not in columns[at] for at, name in names.items()):
        return True
    is_numeric = {at: len(column) > 1 and all(map(_is_number, column)) for at, column in columns.items()}
    if any(is_numeric[at] and not _is_number(name) and len(name.split()) == 1 for at, name in names.items()):
        return True
    # Data frames without names number their columns.
    counted = [str(k) for k in range(len(numbers))]
    return bool(below) and len(numbers) == len(names) > 0 and numbers == counted and not all(is_numeric.values())


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _column_names(cells: Sequence[str]) -> list[str]:
    """Return a name of its own for each column, as pandas names them."""
    names = [cell.strip() or f"{UNNAMED}{at}" for at, cell in enumerate(cells)]
    counts: Counter[str] = Counter()
    # Columns with a name keep it before columns without one.
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
    """Return whether rows have an integer before the first column, which R and pandas read as the row's name."""
    long = [row for row in below if len(row) == width + 1]
    if not long or len(long) < len(below) or not any(row[-1] for row in long):
        return False
    return all(_INTEGER.fullmatch(row[0]) for row in long)


def _unnamed(cells: Sequence[str]) -> list[str]:
    """Return names for the columns of a file without a header: sentences with labels, or pairs with labels."""
    known = {1: ["text"], 2: ["text", "label"], 3: ["text", "text_pair", "label"]}
    names = known.get(len(cells))
    if names and _is_number(cells[0]) and not all(map(_is_number, cells)):
        names = None
    return names or [f"column_{k}" for k in range(len(cells))]

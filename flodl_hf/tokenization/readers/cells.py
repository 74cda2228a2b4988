"""The cells of CSV and TSV files: delimiter, header, column names, and rows as wide as the header.

Column names equal pandas': an empty name becomes ``Unnamed: 0``, a repeated name ``text.1``.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, islice

from flodl.errors import printable

MAX_FIELD_BYTES = 1 << 27
"""Longest field of a CSV file. The default of the csv module, 131,072, is less than a long document."""

HEADER_SAMPLE_ROWS = 20
"""Rows below the first line that are read to decide whether it is a header."""

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

_INTEGER = re.compile(r"\d+", re.ASCII)


class Cells:
    """The rows of a CSV or TSV file. Iteration yields the first line of each row, and its cells or its fault.

    Args:
        texts: the lines.
        damaged: faults of lines, by number; an entry must be present before its line is read.
        quoted: whether quotes enclose cells, as in CSV files.
        delimiter: delimiter of cells; if empty, a comma, or the delimiter of a header without commas.
        columns: names of the columns, for files without a header.
        header: whether the first line is a header; None decides by its cells and those below.

    Attributes:
        names: names of the columns.
        has_header: whether the first line is a header.
        guessed_header: whether the header was recognised by its cells and not requested.
        fault: first line and its fault if it cannot be read; ``names`` is then empty.
    """

    def __init__(
        self,
        texts: Iterator[str],
        damaged: dict[int, str],
        *,
        quoted: bool,
        delimiter: str = "",
        columns: Sequence[str] | None = None,
        header: bool | None = None,
    ) -> None:
        if csv.field_size_limit() < MAX_FIELD_BYTES:
            csv.field_size_limit(MAX_FIELD_BYTES)
        self._damaged = damaged
        if not delimiter:
            delimiter, texts = _separated(texts) if columns is None and header is not False else (",", texts)
        self._delimiter = delimiter
        self._reader = csv.reader(
            texts, delimiter=delimiter, quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE, strict=True
        )
        self.names = list(columns or ())
        self.has_header = self.guessed_header = False
        self.fault: tuple[int, str] | None = None
        self._row_names = False
        self._rows = rows = self._read()
        first = next(rows, None)
        if first is None:
            return
        line, cells = first
        if isinstance(cells, str):
            self.fault = line, cells
            return
        ahead = list(islice(rows, HEADER_SAMPLE_ROWS))
        below = [row for _, row in ahead if isinstance(row, list)]
        is_header = (columns is None and _is_header(cells, below)) if header is None else header
        self.has_header, self.guessed_header = is_header, is_header and header is None
        if columns is None:
            self.names = _column_names(cells) if is_header else _default_names(cells)
        self._row_names = is_header and _has_row_names(len(self.names), below)
        self._rows = chain(ahead if is_header else [first, *ahead], rows)

    def __iter__(self) -> Iterator[tuple[int, list[str] | str]]:
        width = len(self.names)
        for line, cells in self._rows:
            if self._row_names and isinstance(cells, list):
                cells = cells[1:]
            yield line, cells if isinstance(cells, str) or len(cells) == width else self._fitted(cells)

    def _fitted(self, cells: list[str]) -> list[str] | str:
        """Return as many cells as columns. Empty cells after the last column are dropped."""
        width = len(self.names)
        if not any(cells[width:]) and all(name.startswith(UNNAMED) for name in self.names[len(cells) :]):
            return [*cells[:width], *[""] * (width - len(cells))]
        return f"found {len(cells)} cells: {printable(self._delimiter.join(cells), 60)}, expected {width}"

    def _read(self) -> Iterator[tuple[int, list[str] | str]]:
        """Yield the first line of each row with its cells or its fault. Empty lines are skipped."""
        while True:
            line = self._reader.line_num + 1
            try:
                cells = next(self._reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield line, f"found {error}, expected valid CSV"
                continue
            if self._damaged:
                read = range(line, self._reader.line_num + 1)
                if found := [self._damaged.pop(number) for number in read if number in self._damaged]:
                    yield line, found[0]
                    continue
            if cells and not (len(cells) == 1 and not cells[0].strip()):
                yield line, cells


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
    cells = {sign: next(csv.reader([header], delimiter=sign), []) for sign in (",", *DELIMITERS)}
    found = [sign for sign in DELIMITERS if _names_several(cells[sign])]
    return found[0] if len(cells[","]) == 1 and len(found) == 1 else ",", chain(first, texts)


def _names_several(cells: Sequence[str]) -> bool:
    """Return whether these are several column names. An empty first name belongs to row numbers."""
    named = sum(bool(cell.strip()) for cell in cells)
    return (named > 1 or (named == 1 and not cells[0].strip())) and _is_header(cells, ())


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
    return all(_INTEGER.fullmatch(row[0]) for row in long)


def _default_names(cells: Sequence[str]) -> list[str]:
    """Return column names for a file without a header: texts with labels, or pairs with labels."""
    known = {1: ["text"], 2: ["text", "label"], 3: ["text", "text_pair", "label"]}
    names = known.get(len(cells))
    if names and _is_number(cells[0]) and not all(map(_is_number, cells)):
        names = None
    return names or [f"column_{k}" for k in range(len(cells))]

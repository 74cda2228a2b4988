"""Rows of files and of objects in memory, read whole or one by one, with all faults in one error; formats of files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from flodl.errors import DataError, capped, nearest, printable
from flodl_hf.checkpoints.folders import expect_file
from flodl_hf.tokenization.readers.arrow import (
    Classes,
    TableRows,
    is_saved_dataset,
    names_of_classes,
    read_arrow_file,
    read_saved_dataset,
    rows_of_table,
)
from flodl_hf.tokenization.readers.rows import STDIN, Lines, Rows, cell_rows, json_row, open_binary, text_row

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


def format_of(
    source: str | os.PathLike[str], format: str | None = None, known: Sequence[str] = get_args(Format)
) -> str:
    """Return ``format`` if it is given, else the format of the suffix. Standard input is text.

    Raises:
        DataError: the suffix is not known, or the format is not one of ``known``.
    """
    kind = format or ("text" if os.fspath(source) == STDIN else None)
    if kind is None:
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
    if kind not in known:
        raise DataError(
            f"{source}: found format {kind!r}{nearest(kind, known)}, expected one of {', '.join(known)}. Set format=, "
            "or convert the data to JSON lines (jsonl).",
            path=str(source),
            format=kind,
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
    kind = format_of(path, format, FORMATS[:4] if is_stdin else FORMATS)
    if kind in ("parquet", "arrow"):
        return TableRows(path, kind)
    lines = Lines(None if is_stdin else path)
    if kind == "text":
        return Rows(lines.numbered, text_row, ["text"], lines)
    if kind == "jsonl":
        return Rows((item for item in lines.numbered if not item[1].isspace()), json_row, None, lines)
    try:
        return cell_rows(lines, kind == "csv", delimiter or ("" if kind == "csv" else "\t"), columns, header)
    except BaseException:
        lines.close()
        raise


def read_rows(
    source: Any,
    format: Format | None = None,
    *,
    columns: Sequence[str] | None = None,
    header: bool | None = None,
    delimiter: str | None = None,
    blank_lines: bool = False,
    classes: Classes | None = None,
) -> Iterator[dict[str, Any]]:
    """Return the rows of ``source`` one by one, each a dict of column names to values.

    Values of CSV and TSV files are texts; other formats keep their types. Gzip files (``.gz``) are decompressed. CSV
    fields may be quoted; in TSV files quotes have no special meaning.

    The first line is a header unless ``columns`` names the columns, or a cell of it is a number, longer than 64
    characters, or repeated. Even such a line is a header if a cell is a usual name ("text", "label"), if a word is
    above a column of numbers, or if its cells are the numbers 0, 1, ... above texts. Column names equal
    pandas': ``Unnamed: 0`` for an empty name, ``text.1`` for a repeated one. Row numbers without a name in the header,
    as R writes them, are left out.

    Args:
        source: a path; or rows, a dict of columns, a data set of `datasets`, or an object with the Arrow C stream
            interface, such as a polars or pandas data frame.
        format: format of the file; by default the suffix determines it.
        columns: names of the columns, for CSV, TSV and CoNLL files without a header.
        header: whether the first line is a header; None decides by its cells and those below.
        delimiter: delimiter of CSV and TSV files; by default a tab in TSV files, and in CSV files a comma, or the
            semicolon, tab or bar that divides a header without commas.
        blank_lines: whether empty lines of a text file are rows too, so that rows are lines.
        classes: receives the names of declared classes.

    Raises:
        DataError: the file does not exist, has an unknown format, or is invalid, with ``path``, ``line`` and
            ``problems``. A file with invalid rows is read to its end, so that one error lists all of them; rows before
            the first have been returned.
    """
    classes = {} if classes is None else classes
    if not isinstance(source, (str, os.PathLike)):
        return _rows_of_object(source, classes)
    path = Path(source)
    if is_saved_dataset(path):
        return read_saved_dataset(path, classes)
    expect_file(path)
    kind = format_of(path, format)
    if kind == "conll":
        return read_conll(path, columns)
    if kind in ("json", "squad"):
        return _read_json(path, kind)
    if kind in ("parquet", "arrow"):
        return read_arrow_file(path, kind, classes)
    rows = _checked(path, kind, columns=columns, header=header, delimiter=delimiter)
    return (row for row in rows if row["text"].strip()) if kind == "text" and not blank_lines else rows


class Table(list[dict[str, Any]]):
    """Rows of a table.

    Args:
        rows: the rows.
        classes: class names in the order of their numbers, for each column that declares them: features of `datasets`,
            also in the metadata of Parquet and Arrow files, and dictionary types of Arrow, such as pandas' categories.
    """

    def __init__(self, rows: Iterable[dict[str, Any]] = (), classes: Classes | None = None) -> None:
        self.classes: Classes = {} if classes is None else classes
        super().__init__(rows)


def load_rows(source: Any, format: Format | None = None, **options: Any) -> Table:
    """Return all rows of ``source`` as a list, with declared classes. See `read_rows` for the arguments and errors.

    Raises:
        DataError: also if there are no rows.
    """
    classes: Classes = {}
    rows = Table(read_rows(source, format, classes=classes, **options), classes)
    if not rows:
        name = source if isinstance(source, (str, os.PathLike)) else "data"
        raise DataError(f"{name}: found no rows, expected at least one", rows=0)
    return rows


MAX_PROBLEMS = 1000
"""A file with a fault on every line must not fill the memory."""


class Faults:
    """The faults of one file, raised as one error so that all of them can be corrected together.

    Args:
        path: the file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self.first_line: int | None = None
        self.problems: list[str] = []
        self.count = 0

    def add(self, fault: str, *, line: int | None = None, location: str = "file") -> None:
        """Add a fault.

        Args:
            fault: "found ..., expected ...".
            line: line of the fault.
            location: place of a fault that has no line.
        """
        self.count += 1
        if self.count == 1:
            self.first_line = line
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(f"{location if line is None else f'line {line}'}: {fault}")

    def check(self, advice: str) -> None:
        """Raise an error if there are faults.

        Raises:
            DataError: with ``path``, ``line`` (of the first fault), ``problems`` and ``count``.
        """
        if self.count:
            raise DataError(
                f"{self.path}: {self.count} fault{'s' * (self.count > 1)}\n{capped(self.problems)}\n{advice}",
                path=self.path,
                line=self.first_line,
                problems=self.problems,
                count=self.count,
            )


def _checked(path: Path, kind: str, **options: Any) -> Iterator[dict[str, Any]]:
    """Yield the values of rows until the first fault, then raise all faults."""
    faults = Faults(path)
    for row in open_rows(path, kind, **options):
        if row.values is None:
            faults.add(str(row.fault), line=row.line)
        elif not faults.count:
            yield row.values
    faults.check(
        "Correct these lines, or read a file of another layout (no header, another delimiter) with "
        "flodl_hf.tokenization.readers.load_rows."
    )


# -------------------------------------------------------------------------------------------------- JSON


def _read_json(path: Path, kind: str) -> Iterator[dict[str, Any]]:
    faults = Faults(path)
    with open_binary(path) as file:
        raw = file.read()
    content: Any = None
    try:
        content = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        faults.add(f"found byte 0x{raw[error.start]:02x}, expected UTF-8 text", line=line)
    except (ValueError, RecursionError) as error:
        if kind == "json" and "Extra data" in str(error):
            # The file contains several objects: JSON lines with another suffix.
            yield from _checked(path, "jsonl")
            return
        faults.add(f"found invalid JSON ({error}), expected one JSON value", line=getattr(error, "lineno", None))
    faults.check("Correct the file, and save it as UTF-8.")
    articles = content.get("data") if isinstance(content, dict) else content
    is_list = isinstance(articles, list)
    is_squad = is_list and articles is not content and any("paragraphs" in a for a in articles if isinstance(a, dict))
    if kind == "squad" or is_squad:
        yield from read_squad(content, path)
        return
    for number, row in enumerate(articles if is_list else [content]):
        if not isinstance(row, dict):
            faults.add(f"found {type(row).__name__}, expected an object", location=f"item {number}")
        elif not faults.count:
            yield row
    faults.check("The file needs a list of objects, one for each row.")


# ----------------------------------------------------------------------------------------------- objects


def _rows_of_object(source: Any, classes: Classes) -> Iterator[dict[str, Any]]:
    if isinstance(source, Mapping):
        return _rows_of_columns(source, classes)
    classes |= names_of_classes(getattr(source, "features", None))
    # Arrow data by columns; items of a data set of `datasets` are rows.
    if hasattr(source, "__arrow_c_stream__") and not hasattr(source, "__getitems__"):
        return rows_of_table(source, classes)
    if isinstance(source, Iterable) or (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
        return _rows_of_sequence(source)
    raise DataError(
        f"data: found {type(source).__name__}, expected a file, a list of dicts, a dict of columns, a data set of "
        "`datasets`, or a data frame",
        kind=type(source).__name__,
    )


def _rows_of_sequence(source: Any) -> Iterator[dict[str, Any]]:
    rows = source if isinstance(source, Iterable) else (source[i] for i in range(len(source)))
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(
                f"data: found {type(row).__name__} as row {number}, expected a dict of column names to values",
                row=number,
            )
        yield {name if type(name) is str else str(name): _plain(value) for name, value in row.items()}


def _rows_of_columns(source: Mapping[str, Any], classes: Classes) -> Iterator[dict[str, Any]]:
    sizes = {name: len(column) if hasattr(column, "__len__") else -1 for name, column in source.items()}
    if len(set(sizes.values())) != 1 or -1 in sizes.values() or any(isinstance(c, str) for c in source.values()):
        raise DataError(
            f"data: found columns of the lengths {sizes}, expected lists of equal length. If this is a dict of several "
            "data sets, pass one of them.",
            sizes=sizes,
        )
    for name, column in source.items():
        # A pandas column has its categories in an accessor, a pandas array has them itself.
        categories = getattr(getattr(column, "cat", column), "categories", None)
        if categories is not None:
            classes[str(name)] = tuple(map(str, categories))
    columns = {
        str(name): [None if v is None or v != v else str(v) for v in column] if str(name) in classes else column
        for name, column in source.items()
    }
    for values in zip(*columns.values(), strict=True):
        yield {name: _plain(value) for name, value in zip(columns, values, strict=True)}


_PLAIN = frozenset({str, int, float, bool, type(None), dict})


def _plain(value: Any) -> Any:
    """Return a value of numpy or torch as Python numbers, texts, and lists of them."""
    if type(value) in _PLAIN:
        return value
    if type(value) in (list, tuple):
        return value if all(type(item) in _PLAIN for item in value) else [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def read_squad(content: Any, path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield ``{"id", "title", "question", "context", "answers", "is_impossible"}`` for each question.

    ``answers`` is ``{"text": [...], "answer_start": [...]}`` with character offsets into the context. Both lists are
    empty for a question without an answer.

    Args:
        content: the parsed file.
        path: name of the file in errors.

    Raises:
        DataError: a value is missing or of the wrong type, an answer is not at its place in the context, or an id is
            repeated. All faults are reported before a row is returned.
    """
    faults = Faults(path)
    rows: list[dict[str, Any]] = []
    ids: set[str] = set()
    for article, where in _items(content, "data", "", faults):
        for paragraph, spot in _items(article, "paragraphs", where, faults):
            context = _text(paragraph, "context", spot, faults)
            for question, here in _items(paragraph, "qas", spot, faults):
                text = _text(question, "question", here, faults)
                if context is None or text is None:
                    continue
                name = str(question.get("id", here))
                if name in ids:
                    faults.add(f"found the id {printable(name)} again, expected a unique id", location=here)
                ids.add(name)
                is_impossible = bool(question.get("is_impossible", False))
                answers = _answers({} if is_impossible else question, context, here, faults)
                rows.append(
                    {
                        "id": name,
                        "title": str(article.get("title", "")),
                        "question": text,
                        "context": context,
                        "answers": answers,
                        "is_impossible": is_impossible,
                    }
                )
    faults.check("Use the layout of SQuAD 1.1 or 2.0, with answer_start counted in characters.")
    yield from rows


def _answers(question: dict[str, Any], context: str, location: str, faults: Faults) -> dict[str, list[Any]]:
    texts: list[str] = []
    starts: list[int] = []
    for answer, here in _items(question, "answers", location, faults, required=False):
        if (text := _text(answer, "text", here, faults)) is None:
            continue
        if type(start := answer.get("answer_start")) is not int:
            faults.add(f"found answer_start {start!r}, expected an integer", location=here)
        elif start < 0 or context[start : start + len(text)] != text:
            found = printable(context[max(start, 0) : max(start, 0) + len(text)], 40)
            faults.add(f"found {found} at character {start}, expected {printable(text, 40)}", location=here)
        else:
            texts.append(text)
            starts.append(start)
    return {"text": texts, "answer_start": starts}


def _items(
    record: Any, name: str, location: str, faults: Faults, *, required: bool = True
) -> Iterator[tuple[Any, str]]:
    """Yield the items of the list ``record[name]``, each with its location."""
    value = record.get(name) if isinstance(record, dict) else None
    path = f"{location}.{name}" if location else name
    if isinstance(value, list):
        yield from ((item, f"{path}[{k}]") for k, item in enumerate(value))
    elif required or value is not None:
        faults.add(f"found {type(value).__name__}, expected a list", location=path)


def _text(record: Any, name: str, location: str, faults: Faults) -> str | None:
    value = record.get(name) if isinstance(record, dict) else None
    if isinstance(value, str):
        return value
    faults.add(f"found {type(value).__name__}, expected a text", location=f"{location}.{name}")
    return None


def read_conll(path: Path, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield ``{"words": [...], "tags": [...]}`` for each sentence.

    A line with a tab is divided at tabs, so that words may contain spaces; other lines are divided at blanks. The first
    column is the word, the last the tag. With ``columns`` each column becomes a list with its own name. Lines that
    start with ``-DOCSTART-`` are skipped, and so are comments, which start with ``#`` and have fewer columns than
    tokens.

    Args:
        path: the file.
        columns: names of all columns, in order; ``"_"`` for a column to leave out.

    Raises:
        DataError: a line has another number of columns than the first, or only one.
    """
    faults = Faults(path)
    width = len(columns) if columns else 0
    sentence: list[list[str]] = []
    undecided: list[list[str]] = []
    for row in open_rows(path, "text"):
        number = row.line
        if row.values is None:
            faults.add(str(row.fault), line=number)
            continue
        line: str = row.values["text"]
        if not line.strip():
            if sentence and not faults.count:
                yield _sentence(sentence, columns)
            sentence, undecided = [], []
            continue
        if line.startswith("-DOCSTART-"):
            continue
        cells = line.split("\t") if "\t" in line else line.split()
        may_be_comment = line == "#" or line.startswith("# ")
        if may_be_comment and not width:
            # The number of columns decides whether this is a token "#". It is known after the next line.
            undecided.append(cells)
            continue
        if may_be_comment and len(cells) != width:
            continue
        if not width and len(cells) > 1:
            width = len(cells)
            sentence += [row for row in undecided if len(row) == width]
        shown = printable(line, 60)
        if not width:
            faults.add(f"found 1 column: {shown}, expected a word and its tag", line=number)
        elif len(cells) != width:
            faults.add(f"found {len(cells)} columns: {shown}, expected {width}", line=number)
        elif not cells[0].strip() or not cells[-1].strip():
            faults.add(f"found an empty cell: {shown}, expected a word and its tag", line=number)
        else:
            sentence.append(cells)
    if sentence and not faults.count:
        yield _sentence(sentence, columns)
    faults.check("Each line needs as many columns as the first, separated by tabs or by spaces, in UTF-8.")


def _sentence(rows: list[list[str]], columns: Sequence[str] | None) -> dict[str, Any]:
    if columns is None:
        return {"words": [row[0] for row in rows], "tags": [row[-1] for row in rows]}
    return {name: [row[k] for row in rows] for k, name in enumerate(columns) if name != "_"}

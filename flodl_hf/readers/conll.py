"""Sentences of CoNLL files: one token on each line, in columns, and a blank line between sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flodl.errors import printable
from flodl_hf.readers.faults import Faults
from flodl_hf.readers.rows import Lines, RowFault


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
    for number, line in Lines(path).texts():
        if isinstance(line, RowFault):
            faults.add(str(line), line=number)
            continue
        if not line.strip():
            if sentence and not faults.count:
                yield _sentence(sentence, columns)
            sentence, undecided = [], []
            continue
        line = line.strip("\r\n")
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

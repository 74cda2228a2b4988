"""Sentences out of CoNLL files: one token a line, columns, a blank line between sentences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from flodl.data.faults import Faults
from flodl.errors import printable

__all__ = ["read_conll"]


def read_conll(
    lines: Iterable[tuple[int, str]], path: str | Path, *, columns: Sequence[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield ``{"words": [...], "tags": [...]}`` for each sentence.

    Columns are separated by a tab where a line has one, else by white space; words may then hold spaces.
    The first column is the word, the last the tag; with ``columns`` each becomes a list of its own name.
    Lines that begin with ``-DOCSTART-`` are left out, and so are comments, which begin with ``#`` and have
    fewer columns than tokens do.

    Args:
        lines: numbered lines.
        path: what to call the file in errors.
        columns: names of all columns, in order; ``"_"`` for one to leave out.

    Raises:
        DataError: a line has another number of columns than the first, or only one.
    """
    faults = Faults(path)
    width = len(columns) if columns else 0
    held: list[list[str]] = []
    early: list[list[str]] = []
    for number, text in lines:
        line = text.strip("\r\n")
        if not line.strip():
            if held and not faults.count:
                yield _sentence(held, columns)
            held, early = [], []
            continue
        if line.startswith("-DOCSTART-"):
            continue
        cells = line.split("\t") if "\t" in line else line.split()
        may_be_comment = line == "#" or line.startswith("# ")
        if may_be_comment and not width:
            # whether it is a token "#" is known once a line shows how many columns there are
            early.append(cells)
            continue
        if may_be_comment and len(cells) != width:
            continue
        if not width:
            if len(cells) < 2:
                faults.add(f"1 column: {printable(line, 60)}", "a word and its tag", line=number)
                continue
            width = len(cells)
            held += [line_cells for line_cells in early if len(line_cells) == width]
        if len(cells) != width:
            faults.add(f"{len(cells)} columns: {printable(line, 60)}", f"{width}", line=number)
        elif not cells[0].strip() or not cells[-1].strip():
            faults.add(f"an empty cell: {printable(line, 60)}", "a word and its tag", line=number)
        else:
            held.append(cells)
    if held and not faults.count:
        yield _sentence(held, columns)
    faults.check("expected as many columns on each line as on the first, separated by tabs or by spaces")


def _sentence(rows: list[list[str]], columns: Sequence[str] | None) -> dict[str, Any]:
    if columns is None:
        return {"words": [row[0] for row in rows], "tags": [row[-1] for row in rows]}
    return {name: [row[k] for row in rows] for k, name in enumerate(columns) if name != "_"}

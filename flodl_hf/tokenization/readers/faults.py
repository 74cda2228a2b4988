"""Faults of a data file or of rows, raised as one error, so that all of them can be corrected together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flodl.errors import DataError, capped

MAX_PROBLEMS = 1000
"""A file with a fault on every line must not fill the memory."""


class Faults:
    """The faults of one file.

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
            raise self.error(advice)

    def error(self, advice: str) -> DataError:
        """Return the error with all faults."""
        return DataError(
            f"{self.path}: {self.count} fault{'s' * (self.count > 1)}\n{capped(self.problems)}\n{advice}",
            path=self.path,
            line=self.first_line,
            problems=self.problems,
            count=self.count,
        )


def check_texts(rows: Sequence[Mapping[str, Any]], column: str, source: str) -> None:
    """Refuse a column with values that are no texts.

    Raises:
        DataError: some are not; ``problems`` lists them.
    """
    wrong = [
        f"row {i}: {type(row.get(column)).__name__}"
        for i, row in enumerate(rows)
        if not isinstance(row.get(column), str)
    ]
    refuse_rows(source, f"column {column!r} has values that are no texts", wrong, "a text in each", column=column)


def refuse_rows(source: str, what: str, wrong: Sequence[str], expected: str, **details: Any) -> None:
    """Raise an error if some rows are wrong.

    Args:
        source: what the rows are, such as "train".
        what: the fault.
        wrong: rows with their values; empty for no fault.
        expected: the right values.
        **details: further attributes of the error.

    Raises:
        DataError: with ``wrong`` as ``problems``.
    """
    if wrong:
        text = f"{source}: {what}:\n{capped(wrong, 5)}\nexpected {expected}"
        raise DataError(text, problems=list(wrong), **details)

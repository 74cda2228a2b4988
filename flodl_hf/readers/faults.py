"""Faults of a data file, collected and raised as one error, so that all of them can be corrected together."""

from __future__ import annotations

from pathlib import Path

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

    def add(self, fault: str, *, line: int | None = None, place: str = "file") -> None:
        """Add a fault.

        Args:
            fault: "found ..., expected ...".
            line: line of the fault.
            place: place of a fault that has no line.
        """
        self.count += 1
        if self.count == 1:
            self.first_line = line
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(f"{place if line is None else f'line {line}'}: {fault}")

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

"""What is wrong with a data file, collected and raised once.

Every fault says the line, the column, what was found and what was expected, so that a file can be mended in
one go.
"""

from __future__ import annotations

from pathlib import Path

from flodl.errors import DataError, capped

__all__ = ["Faults"]


class Faults:
    """The faults of one file.

    Args:
        path: the file, as the caller named it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self.first_line: int | None = None
        self.problems: list[str] = []
        self.count = 0

    def add(self, found: str, expected: str, *, line: int | None = None, column: str | None = None) -> None:
        """Note a fault."""
        place = [f"line {line}"] if line is not None else []
        place += [f"column {column}"] if column is not None else []
        self.count += 1
        if self.count == 1:
            self.first_line = line
        # a file that is wrong on every line must not fill the memory
        if len(self.problems) < 1000:
            self.problems.append(f"{', '.join(place) or 'file'}: found {found}, expected {expected}")

    def check(self, advice: str) -> None:
        """Raise if there are faults.

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

    def fail(self, found: str, expected: str, advice: str, *, line: int | None = None) -> DataError:
        """Return the error for a fault after which reading cannot go on."""
        self.add(found, expected, line=line)
        try:
            self.check(advice)
        except DataError as error:
            return error
        raise AssertionError("a fault was added")

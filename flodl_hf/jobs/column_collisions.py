"""Input columns with the name of a result column, which are written as ``input_NAME``."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from flodl_hf.readers.rows import Row

__all__ = ["colliding_columns", "renamed"]


def colliding_columns(names: Sequence[str], taken: Iterable[str]) -> dict[str, str]:
    """Return the new name of each column that collides, and warn about it.

    Args:
        names: columns of the input.
        taken: names of the result columns.
    """
    results = set(taken)
    found: dict[str, str] = {}
    for name in names:
        if name in results:
            new = f"input_{name}"
            while new in results or new in names:
                new += "_"
            found[name] = new
    if found:
        changes = ", ".join(f"{old!r} is written as {new!r}" for old, new in found.items())
        warnings.warn(f"columns of the input: {changes}, because the result has a column of that name", stacklevel=2)
    return found


def renamed(row: Row, names: Mapping[str, str]) -> Row:
    """Return a row with its columns renamed."""
    if row.values is None or names.keys().isdisjoint(row.values):
        return row
    return replace(row, values={names.get(name, name): value for name, value in row.values.items()}, text=None)

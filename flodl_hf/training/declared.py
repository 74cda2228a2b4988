"""Labels that the source of a table declares: numbering of evaluation classes, and rows without a label."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from flodl.errors import DataError
from flodl_hf.readers import Table, as_numbers, is_missing
from flodl_hf.readers.arrow import CLASS_FIELDS

__all__ = ["aligned", "classes_used", "drop_unlabelled", "numbered_as", "with_named_records"]

UNLABELLED = -1
"""The number that data sets give to an example without a gold label."""


def with_named_records(rows: Table) -> Table:
    """Return rows in which records, such as spans of text, contain the names of declared classes, not their numbers."""
    columns = {
        column: names
        for column, names in rows.classes.items()
        if isinstance(next((cell for row in rows if (cell := _first(row.get(column))) is not None), None), Mapping)
    }
    if not columns:
        return rows

    def named(cell: Any, names: Sequence[str]) -> Any:
        if isinstance(cell, (list, tuple)):
            return [named(item, names) for item in cell]
        if not isinstance(cell, Mapping):
            return cell
        return {key: _written(value, names, ()) if key in CLASS_FIELDS else value for key, value in cell.items()}

    made = [
        {name: named(cell, columns[name]) if name in columns else cell for name, cell in row.items()} for row in rows
    ]
    return Table(made, {name: names for name, names in rows.classes.items() if name not in columns})


def aligned(rows: Table, train: Table) -> Table:
    """Return evaluation rows with the classes of declared columns written as in the training rows.

    Two files may number the same classes differently, or one may contain names and the other numbers.

    Args:
        rows: evaluation rows.
        train: training rows.
    """
    changed = {}
    for column in {**rows.classes, **train.classes}:
        own, wanted = rows.classes.get(column, ()), train.classes.get(column, ())
        sample = next((cell for row in train if (cell := _first(row.get(column))) is not None), None)
        is_number = isinstance(sample, (int, float))
        if sample is not None and (wanted or not (is_number or isinstance(as_numbers([sample])[0], int))):
            changed[column] = (own, wanted if is_number else ())
    if not changed:
        return rows
    made = [
        {name: _written(cell, *changed[name]) if name in changed else cell for name, cell in row.items()}
        for row in rows
    ]
    return Table(made, {**rows.classes, **train.classes})


def numbered_as(rows: Table, names: Sequence[str]) -> Table:
    """Return rows with declared classes numbered as in ``names``; columns with other classes are unchanged.

    Args:
        rows: a table.
        names: label names of a model by number.
    """
    changed = {column: own for column, own in rows.classes.items() if set(classes_used(rows, column)) <= set(names)}
    made = [
        {name: _written(cell, changed[name], names) if name in changed else cell for name, cell in row.items()}
        for row in rows
    ]
    return Table(made, {**rows.classes, **dict.fromkeys(changed, tuple(names))}) if changed else rows


def classes_used(rows: Table, column: str) -> list[str]:
    """Return the names of the declared classes that occur in a column, sorted."""
    own, found, cells = rows.classes.get(column, ()), set(), [row.get(column) for row in rows]
    while cells:
        cell = cells.pop()
        if isinstance(cell, (list, tuple)):
            cells += cell
        else:
            found.add(_written(cell, own, ()))
    return sorted(found & set(own))


def _first(cell: Any) -> Any:
    """Return a cell, or the first item of a list; None for a missing one."""
    while isinstance(cell, (list, tuple)):
        cell = cell[0] if cell else None
    return None if is_missing(cell) else cell


def _written(cell: Any, own: Sequence[str], wanted: Sequence[str]) -> Any:
    """Return the name of a class, or its number among the wanted ones; other cells unchanged."""
    if isinstance(cell, (list, tuple)):
        return [_written(item, own, wanted) for item in cell]
    is_class = isinstance(cell, (int, float)) and not isinstance(cell, bool) and cell in range(len(own))
    name = own[int(cell)] if is_class else cell
    return wanted.index(name) if name in wanted else name


def drop_unlabelled(
    tables: Mapping[str, list[dict[str, Any]]], column: str | None, labels: Sequence[str] | None = None
) -> None:
    """Remove rows with the label -1, which marks a missing label, and warn with their number.

    The label -1 is a class if the caller names it among the labels, or if the column has no declared classes and its
    other labels are not 0, 1 and further integers.

    Args:
        tables: mapping of names to rows, changed in place.
        column: of the labels.
        labels: names of labels as the caller gave them.

    Raises:
        DataError: no row of a table has a label.
    """
    if column is None or str(UNLABELLED) in (labels or ()):
        return
    # One table may have two names, where a model is evaluated and not trained.
    tables = dict({id(rows): (name, rows) for name, rows in tables.items()}.values())
    cells = {name: as_numbers([row.get(column) for row in rows]) for name, rows in tables.items()}
    known = {cell for part in cells.values() for cell in part if not isinstance(cell, (list, tuple, dict))}
    is_declared = any(column in getattr(rows, "classes", {}) for rows in tables.values())
    if UNLABELLED not in known or not (is_declared or _are_numbered(known)):
        return
    counts = []
    for name, rows in tables.items():
        kept = [row for row, cell in zip(rows, cells[name], strict=True) if cell != UNLABELLED]
        if not kept:
            raise DataError(
                f"{name}: column {column!r} has the label -1 in each row, which means no label; expected some labels",
                column=column,
            )
        if len(kept) < len(rows):
            counts.append(f"{len(rows) - len(kept):,} of {len(rows):,} rows of {name}")
            rows[:] = kept
    warnings.warn(
        f"column {column!r}: {' and '.join(counts)} have the label -1, which means no label, and are skipped; "
        "labels=['-1', '0', ...] makes it a class",
        stacklevel=2,
    )


def _are_numbered(known: set[Any]) -> bool:
    """Return whether labels are -1, 0, 1 and perhaps further integers."""
    whole = all(isinstance(cell, (int, float)) and cell == int(cell) for cell in known)
    return whole and min(known) == UNLABELLED and known >= {0, 1}

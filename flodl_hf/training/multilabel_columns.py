"""Labels in separate columns: ``columns={"label": "toxic+insult"}`` combines them into one column of lists.

A column contains 1 where a text has the label, else 0; for regression it contains a number for each text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flodl.errors import DataError, capped, nearest
from flodl_hf.readers import Table, as_numbers
from flodl_hf.readers.columns import flag_of
from flodl_hf.training.data import Tables
from flodl_hf.training.options import Options

__all__ = ["list_multilabel_columns"]


def list_multilabel_columns(tables: Tables, options: Options) -> tuple[Tables, Options]:
    """Return tables with one column of lists for several label columns, and options with their names.

    Raises:
        DataError: a column is absent, or contains something other than 0 and 1, or for regression no number.
    """
    label = (options.columns or {}).get("label", "")
    names = label.split("+")
    rows = tables.train
    if len(names) < 2 or tables.parts or not rows or label in rows[0]:
        return tables, options
    is_regression = options.problem_type == "regression"
    made = replace(
        tables,
        train=_listed(rows, label, names, "train", is_regression),
        evals={
            name: _listed(held_out, label, names, f"eval {name}".strip(), is_regression)
            for name, held_out in tables.evals.items()
        },
    )
    if options.problem_type is None:
        options = replace(options, problem_type="multi_label_classification")
    return made, options if options.labels else replace(options, labels=names)


def _listed(rows: Table, label: str, names: Sequence[str], where: str, is_regression: bool) -> Table:
    found = list(dict.fromkeys(name for row in rows[:1] for name in row))
    absent = [name for name in names if name not in found]
    if absent:
        raise DataError(
            f"{where}: no column {', '.join(map(repr, absent))}{nearest(absent[0], found)}; it has {found}",
            names=absent,
        )
    numbers = {name: as_numbers([row.get(name) for row in rows]) for name in names}
    made, wrong = [], []
    for i, row in enumerate(rows):
        cells = [numbers[name][i] for name in names]
        read = cells if is_regression else [flag_of(cell) for cell in cells]
        wrong += [
            f"row {i}: {name} is {row.get(name)!r}"
            for name, cell in zip(names, read, strict=True)
            if cell is None or isinstance(cell, str)
        ]
        named = [name for name, flag in zip(names, read, strict=True) if flag]
        made.append({**row, label: cells if is_regression else named})
    if wrong:
        expected = "a number in each" if is_regression else "1 where a text has the label, else 0"
        raise DataError(
            f"{where}: columns of labels with other values:\n{capped(wrong, 5)}\nexpected {expected}", problems=wrong
        )
    return Table(made, rows.classes)

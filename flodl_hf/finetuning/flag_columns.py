"""Labels that stand in a column each, 1 where a text has it: ``columns={"label": "toxic+insult"}`` makes lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flodl.errors import DataError, capped, nearest
from flodl_hf.columns import column_names, flag_of
from flodl_hf.finetuning.data import Tables
from flodl_hf.finetuning.options import Options

__all__ = ["with_listed_flags"]


def with_listed_flags(tables: Tables, options: Options) -> tuple[Tables, Options]:
    """Return tables with a column of lists of labels where the label was named as several columns, and their names.

    Raises:
        DataError: a column is absent, or holds something other than 0 and 1.
    """
    label = (options.columns or {}).get("label", "")
    names = label.split("+")
    rows = tables.train
    if len(names) < 2 or tables.parts or not rows or label in rows[0]:
        return tables, options
    evals = {name: _listed(held_out, label, names, f"eval {name}".strip()) for name, held_out in tables.evals.items()}
    made = replace(tables, train=_listed(rows, label, names, "train"), evals=evals)
    if options.problem_type is None:
        options = replace(options, problem_type="multi_label_classification")
    return made, options if options.labels else replace(options, labels=names)


def _listed(rows: Sequence[Mapping[str, Any]], label: str, names: Sequence[str], where: str) -> list[dict[str, Any]]:
    found = column_names(rows[:1])
    absent = [name for name in names if name not in found]
    if absent:
        raise DataError(
            f"{where}: no column {', '.join(map(repr, absent))}{nearest(absent[0], found)}; it has {found}",
            names=absent,
        )
    made, wrong = [], []
    for i, row in enumerate(rows):
        flags = [flag_of(row.get(name)) for name in names]
        wrong += [
            f"row {i}: {name} is {row.get(name)!r}" for name, flag in zip(names, flags, strict=True) if flag is None
        ]
        made.append({**row, label: [name for name, flag in zip(names, flags, strict=True) if flag]})
    if wrong:
        raise DataError(
            f"{where}: columns of labels that hold neither 0 nor 1:\n{capped(wrong, 5)}\nexpected 1 where a text has "
            "the label, else 0",
            problems=wrong,
        )
    return made

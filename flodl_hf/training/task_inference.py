"""Notes about the inferred task, and errors for tables that may have been meant for another task.

A text column alone trains a masked language model. A table whose labels were lost looks the same: cells divided by
another sign, labels before the text, a column that some rows have. Such tables raise an error unless the task is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

from flodl.errors import ConfigError, DataError, printable
from flodl_hf.readers import as_numbers, is_missing
from flodl_hf.readers.columns import NAMES, Columns, column_names, flag_of
from flodl_hf.training.rows import EncodedRows
from flodl_hf.training.task import Task, name_of

__all__ = [
    "alike_labels",
    "float_classes",
    "guessed_columns",
    "refuse_lost_labels",
    "task_line",
    "unlearned_labels",
    "unused_texts",
]

LOOKED_AT = 200
NAMED = 8  # labels that a line names
SIGNS = {"\t": "tabs", "|": "'|'", ";": "semicolons", ",": "commas"}
PREFIX = "__label__"  # how fastText marks labels in lines of text
TRAINED = ("sequence_classification", "token_classification", "question_answering", "multiple_choice")
MEANT = "; or set task='masked_lm' to train on masked words"


def refuse_lost_labels(columns: Columns, rows: Sequence[Mapping[str, Any]], head: str | None) -> None:
    """Raise for a table of texts alone that may have had labels, if the task is inferred.

    Args:
        columns: the inferred columns.
        rows: the table.
        head: of the starting model.

    Raises:
        ConfigError: the starting model is a classifier.
        DataError: some rows have further columns, or the texts contain possible labels.
    """
    text = columns.text
    if columns.task != "masked-lm" or text is None:
        return
    if head in TRAINED:
        raise ConfigError(
            f"train: found only the texts of {text!r} for a model with the head {head}; expected labels "
            f"in another column{MEANT}",
            problems=["task"],
        )
    further = [name for name in column_names(rows) if name != text]
    if further:
        counts = [f"{name!r} ({sum(name in row for row in rows):,} of {len(rows):,} rows)" for name in further[:8]]
        raise DataError(
            f"train: found the texts of {text!r} alone in the first {min(len(rows), LOOKED_AT)} rows, and further on "
            f"other columns: {', '.join(counts)}; expected the same columns in each row{MEANT}",
            names=further,
        )
    seen = [row[text] for row in rows[:LOOKED_AT] if isinstance(row.get(text), str)]
    signs = [sign for sign in SIGNS if sign in text and len(text.split()) == 1]
    if not signs and len(seen) > 1 and all("\t" in line for line in seen):
        signs = ["\t"]
    if signs:
        raise DataError(
            f"train: the only column, {text!r}, looks like several, divided by {SIGNS[signs[0]]}; expected commas in a "
            f".csv file and tabs in a .tsv file{MEANT}",
            names=[text],
        )
    if seen and all(line.startswith(PREFIX) for line in seen):
        raise DataError(
            f"train: each text of {text!r} begins with {PREFIX}, as labels do for fastText; expected labels in a "
            f"separate column{MEANT}",
            names=[text],
        )


def guessed_columns(columns: Columns, role_columns: Mapping[str, str] | None) -> list[str]:
    """Return, as notes, columns whose role was inferred from their values instead of their names.

    Args:
        columns: the inferred columns.
        role_columns: columns that the caller named, by role.
    """
    roles = {role: getattr(columns, role) for role in NAMES}
    guessed = {
        role: name
        for role, name in roles.items()
        if name is not None and role not in (role_columns or {}) and name.lower() not in NAMES[role]
    }
    if not guessed:
        return []
    read = " and ".join(f"{name!r} as the {role}" for role, name in guessed.items())
    return [f"column roles were inferred from values: {read} (columns={guessed!r} sets them)"]


def alike_labels(names: Sequence[str]) -> list[str]:
    """Return, as notes, labels that differ by case or spaces alone, and so are learned as several."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(" ".join(name.lower().split()), []).append(name)
    several = [", ".join(map(repr, group)) for group in groups.values() if len(group) > 1]
    if not several:
        return []
    return [f"labels that differ by case or spaces alone are several labels: {'; '.join(several[:NAMED])}"]


def float_classes(task: Task, rows: Sequence[Mapping[str, Any]], problem_type: str | None) -> list[str]:
    """Return, as notes, a column of whole floats (ratings from 1.0 to 5.0) that is used as classes.

    Args:
        task: the inferred task.
        rows: the training rows.
        problem_type: the option, which makes the note unnecessary.
    """
    label = getattr(getattr(task, "columns", None), "label", None)
    if task.kind != "single_label" or problem_type is not None or label is None:
        return []
    cells = [row[label] for row in rows if not is_missing(row.get(label))]
    floats = [cell for cell in cells if _is_float(cell) and flag_of(cell) is None]
    if not floats:
        return []
    values = sorted({float(cell) for cell in floats})
    shown = ", ".join(map(str, values[:NAMED])) + (", ..." if len(values) > NAMED else "")
    return [
        f"column {label!r} contains floats ({shown}), which are used as {len(task.labels or ())} classes; "
        "problem_type='regression' trains on them as numbers"
    ]


def _is_float(cell: Any) -> bool:
    if isinstance(cell, str):
        return "." in cell and not isinstance(as_numbers([cell])[0], str)
    return isinstance(cell, Real) and not isinstance(cell, Integral)


def unused_texts(used: Sequence[str | None], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return, as notes, text columns that the task does not use, such as a title.

    Args:
        used: the columns that the task uses.
        rows: the training rows.
    """
    found, seen = [], rows[:LOOKED_AT]
    for name in column_names(seen):
        cells = [row[name] for row in seen if not is_missing(row.get(name))]
        are_texts = bool(cells) and all(isinstance(cell, str) for cell in cells)
        if name not in used and are_texts and any(isinstance(number, str) for number in as_numbers(cells)):
            found.append(repr(name))
    if not found:
        return []
    read = ", ".join(repr(name) for name in used if name is not None)
    return [f"columns of texts that are not used: {', '.join(found)}; used are {read} (columns= selects others)"]


def unlearned_labels(task: Task, rows: EncodedRows) -> list[str]:
    """Return, as notes, labels that occur in no training row, for example because the split removed them."""
    counts = (task.label_counts(rows) if task.head == "sequence_classification" else None) or ()
    absent = [printable(name, 40) for name, count in zip(task.labels or (), counts, strict=False) if not count]
    if not absent:
        return []
    return [f"no training row has the label {', '.join(absent[:NAMED])}, of which nothing is learned"]


def task_line(task: Task, rows: Sequence[Any], asked: str | None) -> str:
    """Return one line that describes the task, its columns, and how to select another task.

    Args:
        task: the inferred task.
        rows: the training rows.
        asked: the task that the caller named.
    """
    columns: Any = task.columns  # type: ignore[attr-defined]
    found = {f.name: getattr(columns, f.name) for f in fields(columns) if f.name != "task"}
    roles = [f"{role.replace('_', ' ')} {_named(name)}" for role, name in found.items() if name]
    parts = [f"task {name_of(task)} from {', '.join(roles)}"]
    if task.labels is not None and task.kind != "regression":
        names = [printable(name, 40)[1:-1] for name in task.labels[:NAMED]]
        more = f", and {len(task.labels) - NAMED} more" if len(task.labels) > NAMED else ""
        several = ", any number of them a text" if task.kind == "multi_label" else ""
        parts.append(f"{len(task.labels)} labels{several}: {', '.join(names)}{more}")
    elif task.kind == "regression":
        count = len(task.labels or ())
        parts.append("a number for each text" if count < 2 else f"{count} numbers for each text")
    elif task.head == "masked_lm":
        parts.append("the words behind masks are learned, no label")
    parts.append(f"{len(rows):,} row{'s' * (len(rows) != 1)}")
    line = "; ".join(parts)
    return line if asked else f"{line} (inferred from the columns; task= selects another)"


def _named(name: Any) -> str:
    return ", ".join(map(repr, name)) if isinstance(name, tuple) else repr(name)

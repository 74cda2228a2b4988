"""Task of a run, from its columns, labels and options, with notes about what was inferred.

A text column alone trains a masked language model. A table whose labels were lost looks the same: cells divided by
another sign, labels before the text, a column that some rows have. Such tables raise an error unless the task is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from numbers import Integral, Real
from typing import Any

from flodl.errors import ConfigError, DataError, nearest, printable
from flodl_hf.families.schema.tasks import task_named
from flodl_hf.tokenization.readers.columns import NAMES, Columns, column_names, flag_of, infer_columns
from flodl_hf.tokenization.readers.targets import as_numbers, is_missing
from flodl_hf.training.choices import choice_columns
from flodl_hf.training.data import Tables
from flodl_hf.training.losses import is_named
from flodl_hf.training.options import Options
from flodl_hf.training.rows import EncodedRows
from flodl_hf.training.task import Known, Source, Task, name_of
from flodl_hf.training.vectors.auxiliary import AuxiliaryTask, needs_layer
from flodl_hf.training.vectors.tables import are_pairs, read_table, table_columns
from flodl_hf.training.vectors.task import EmbeddingTask, plan_embedding
from flodl_hf.training.vectors.tsdae import DENOISES, DenoisingTask

LOOKED_AT = 200
NAMED = 8  # labels that a line names
SIGNS = {"\t": "tabs", "|": "'|'", ";": "semicolons", ",": "commas"}
PREFIX = "__label__"  # how fastText marks labels in lines of text
LABELLED_HEADS = ("sequence_classification", "token_classification", "question_answering", "multiple_choice")
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
    if head in LABELLED_HEADS:
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


def unused_texts(task: Task, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return, as notes, columns of texts that the task does not use, such as a title."""
    used: Sequence[str | None] = column_names(rows)  # tasks that read groups of columns use all
    if isinstance(task, EmbeddingTask):
        texts, label = table_columns(rows)
        used = [*texts, label]
    elif task.headed:
        columns: Any = vars(task)["columns"]
        used = [getattr(columns, role) for role in NAMES]
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


def doubtful_labels(task: Task, rows: EncodedRows | None) -> list[str]:
    """Return, as notes, labels that differ by case or spaces alone, and labels that no training row has.

    Args:
        task: the task.
        rows: training rows that evaluation rows were split off; None without a split.
    """
    groups: dict[str, list[str]] = {}
    for name in task.labels or ():
        groups.setdefault(" ".join(name.lower().split()), []).append(name)
    alike = [", ".join(printable(name, 40) for name in group) for group in groups.values() if len(group) > 1][:NAMED]
    counts = task.label_counts(rows) if rows is not None and task.head == "sequence_classification" else None
    absent = [printable(name, 40) for name, n in zip(task.labels or (), counts or (), strict=False) if not n][:NAMED]
    return [
        *([f"labels that differ by case or spaces alone are several labels: {'; '.join(alike)}"] if alike else []),
        *([f"no training row has the label {', '.join(absent)}, of which nothing is learned"] if absent else []),
    ]


def task_line(task: Task, rows: Sequence[Any], requested: str | None) -> str:
    """Return one line that describes the task, its columns, and how to select another task.

    Args:
        task: the inferred task.
        rows: the training rows.
        requested: the task that the caller named.
    """
    columns: Any = task.columns  # type: ignore[attr-defined]
    found = {f.name: getattr(columns, f.name) for f in fields(columns) if f.name != "task"}
    roles = [
        f"{role.replace('_', ' ')} {', '.join(map(repr, name if isinstance(name, tuple) else (name,)))}"
        for role, name in found.items()
        if name
    ]
    parts = [f"task {name_of(task)} from {', '.join(roles)}"]
    if isinstance(task, EmbeddingTask):
        forms = {table.form: ", ".join(map(repr, table.sources[0])) for table in task.tables.values()}
        parts.append("; ".join(f"{form.replace('_', ' ')} of {names}" for form, names in forms.items()))
    elif name_of(task) == "rank":
        parts.append("a score for each pair of texts")
    elif task.labels is not None and task.kind != "regression":
        names = [printable(name, 40)[1:-1] for name in task.labels[:NAMED]]
        more = f", and {len(task.labels) - NAMED} more" if len(task.labels) > NAMED else ""
        several = ", any number per text" if task.kind == "multi_label" else ""
        parts.append(f"{len(task.labels)} label{'s' * (len(task.labels) != 1)}{several}: {', '.join(names)}{more}")
    elif task.kind == "regression":
        count = len(task.labels or ())
        parts.append("a number for each text" if count < 2 else f"{count} numbers for each text")
    elif task.head == "masked_lm":
        parts.append("the words behind masks are learned, no label")
    parts.append(f"{len(rows):,} row{'s' * (len(rows) != 1)}")
    line = "; ".join(parts)
    return line if requested else f"{line} (inferred from the columns; task= selects another)"


def choose_task(tables: Tables, options: Options, known: Known, own: Any = None) -> tuple[Task, Options]:
    """Return the task, and the options with inferred values.

    The columns of the data decide, unless the caller named the task.

    Args:
        own: a loss of the user's own, which vectors can have.

    Raises:
        ConfigError: the task does not fit the columns, or an option does not fit the task.
        DataError: the columns or labels cannot be understood.
    """
    wanted = task_named(options.task, "task") if options.task else None
    named = wanted and wanted.training
    if wanted and wanted.problem_type and options.problem_type is None:
        options = replace(options, problem_type=wanted.problem_type)
    if options.generator is not None:
        named = named or "replaced_tokens"
        if named != "replaced_tokens":
            raise ConfigError(
                f"generator: {named} has none; expected task='replaced', or no generator", problems=["generator"]
            )
    pairs = are_pairs(list(tables.train[0])) and not options.columns
    if named is None and (pairs or tables.parts or is_named(options.vector_loss, *DENOISES)):
        named = "embedding"
    kind = None if named is None else task_named(named).trained
    is_vectors = isinstance(kind, type) and issubclass(kind, EmbeddingTask)
    if is_vectors or (named == "rank" and tables.train.classes):
        tables.drop_unlabelled(_class_column(tables, options))
    if kind is EmbeddingTask and not tables.parts:
        if is_named(options.vector_loss, *DENOISES):
            kind, options = DenoisingTask, replace(options, vector_loss="DenoisingAutoEncoderLoss")
        elif options.task and own is None:
            by_form = options.vector_loss is None and read_table(tables.train, options.columns).form == "pair_classes"
            if by_form or needs_layer(options.vector_loss, options.loss_options):
                kind = AuxiliaryTask
    if kind is not None and is_vectors:
        return plan_embedding(tables.parts or {"": tables.train}, options, own, kind)
    if tables.parts:
        raise ConfigError(
            f"train: found {len(tables.parts)} tables for {named}; expected one, or task='embedding', which "
            "mixes several",
            problems=["train"],
        )
    if named is None and not options.columns and len(tables.train[0]) > 2 and choice_columns(tables.train[0]):
        named = "multiple_choice"
    columns = None
    if named is None or task_named(named).trained.headed:
        columns = _head_columns(tables, options, known, named)
        named = named or columns.task.replace("-", "_")
    task = task_named(named).trained.plan(Source(tables, options, known, named, columns))
    if own is not None and (options.generator is not None or task.kind in ("choices", "pairs")):
        raise ConfigError(f"loss: {task.head} has no other loss than its own; leave the option out", problems=["loss"])
    return task, options


def _class_column(tables: Tables, options: Options) -> str | None:
    """Return the column of classes that vectors are learned from; None if there is none, or one of scores."""
    classes = is_named(options.vector_loss, "softmax")
    for rows in [*tables.parts.values()] or [tables.train]:
        texts, label = table_columns(rows, options.columns)
        if label in rows.classes or (label is not None and (len(texts) == 1 or classes)):
            return label
    return None


def _head_columns(tables: Tables, options: Options, known: Known, named: str | None) -> Columns:
    """Return the columns of a model with a head."""
    columns = infer_columns(tables.train[:LOOKED_AT], named, **dict(options.columns or {}))
    if named is None:
        refuse_lost_labels(columns, tables.train, known.head)
    elif named != columns.task.replace("-", "_"):
        columns = _columns_for(named, columns, tables.train[0])
    for name, held_out in tables.evals.items():
        _same_columns(columns, held_out, f"eval {name}".strip())
    return columns


def _columns_for(named: str, columns: Columns, row: Mapping[str, Any]) -> Columns:
    """Return the columns for a task other than the one they look like."""
    if named == "sequence_classification" and columns.question and columns.context:
        label = next((name for name in row if name.lower() in ("label", "labels")), None)
        if label:
            return Columns(
                task="sequence-classification", text=columns.question, text_pair=columns.context, label=label
            )
    raise ConfigError(
        f"task: found {named}, and the columns {list(row)} are for {columns.task}; expected columns for {named}. Name "
        "them with columns={'text': ..., 'label': ...}, or select another task",
        problems=["task"],
    )


def _same_columns(columns: Columns, rows: Sequence[Mapping[str, Any]], source: str) -> None:
    wanted = [getattr(columns, role) for role in columns.__dataclass_fields__ if role != "task"]
    names = column_names(rows[:LOOKED_AT])
    absent = [name for name in wanted if name is not None and not any(name in row for row in rows[:LOOKED_AT])]
    if absent:
        near = nearest(absent[0], names)
        raise DataError(
            f"{source}: no column {', '.join(map(repr, absent))}{near}; it has {names}. Expected the columns of the "
            "training data",
            names=absent,
        )

"""Rows of a run from files or objects: streams, declared labels, label columns, and splits."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from flodl.errors import ConfigError, DataError, nearest
from flodl_hf.tokenization.readers import Table, load_rows
from flodl_hf.tokenization.readers.arrow import CLASS_FIELDS, Classes, is_saved_dataset, names_of_classes, saved_files
from flodl_hf.tokenization.readers.columns import flag_of, refuse_rows
from flodl_hf.tokenization.readers.targets import as_numbers, is_missing
from flodl_hf.training.options import BATCH_SIZE, Options

MANY = 1_000_000
"""Number of rows after which a warning is logged."""


def stream_part(source: Any, options: Options, share: float | None) -> Any:
    """Return ``source``, or, if it has no length, an iterator over the rows of ``max_steps`` steps.

    Args:
        source: data; a function is called for them.
        options: the choices of the run; without ``max_steps`` a stream is read to its end.
        share: evaluation rows to split off, a share below 1 or a number; None for none.

    Raises:
        ConfigError: with an option, the number of required rows is unknown.
    """
    if callable(source) and not isinstance(source, (os.PathLike, Sized, Iterable)):
        source = source()
    if isinstance(source, (str, os.PathLike, Sized)) or not isinstance(source, Iterable):
        return source
    if options.max_steps is None:
        return _counted(source)
    for name in ("tokens_per_batch", "concatenate"):
        if getattr(options, name):
            raise ConfigError(
                f"{name}: found training data without a length, and batches of an unknown number of its rows; expected "
                "batches of batch_size rows, or the rows in a list",
                problems=[name],
            )
    own = options.ranks if options.policy in ("cadence", "async") else 1  # batches of each rank
    rows = options.max_steps * options.accumulate * (options.batch_size or BATCH_SIZE) * own
    if share is not None:
        rows = rows + int(share) if share >= 1 else math.ceil(rows / max(1 - share, 1e-9)) + 1
    return itertools.islice(source, rows)


def _counted(source: Iterable[Any]) -> Iterator[Any]:
    for number, row in enumerate(source, start=1):
        yield row
        if number == MANY:
            warnings.warn(
                f"train: {MANY:,} rows are read, and the stream has not ended; one without an end needs max_steps=, "
                "which limits the number of rows",
                stacklevel=2,
            )


UNLABELLED = -1
"""The number that data sets give to an example without a gold label."""


def with_named_records(rows: Table) -> Table:
    """Return rows in which records, such as spans of text, contain the names of declared classes, not their numbers."""

    def named(cell: Any, names: Sequence[str]) -> Any:
        if isinstance(cell, (list, tuple)):
            return [named(item, names) for item in cell]
        if not isinstance(cell, Mapping):
            return cell
        return {key: _written(value, names, ()) if key in CLASS_FIELDS else value for key, value in cell.items()}

    changes = {
        column: partial(named, names=names)
        for column, names in rows.classes.items()
        if isinstance(_sample(rows, column), Mapping)
    }
    return _rewritten(rows, changes, {name: names for name, names in rows.classes.items() if name not in changes})


def aligned(rows: Table, train: Table) -> Table:
    """Return evaluation rows with the classes of declared columns written as in the training rows.

    Two files may number the same classes differently, or one may contain names and the other numbers.

    Args:
        rows: evaluation rows.
        train: training rows.
    """
    changes = {}
    for column in {**rows.classes, **train.classes}:
        own, wanted = rows.classes.get(column, ()), train.classes.get(column, ())
        sample = _sample(train, column)
        is_number = isinstance(sample, (int, float))
        if sample is not None and (wanted or not (is_number or isinstance(as_numbers([sample])[0], int))):
            changes[column] = partial(_written, own=own, wanted=wanted if is_number else ())
    return _rewritten(rows, changes, {**rows.classes, **train.classes})


def numbered_as(rows: Table, names: Sequence[str]) -> Table:
    """Return rows with declared classes numbered as in ``names``; columns with other classes are unchanged.

    Args:
        rows: a table.
        names: label names of a model by number.
    """
    changes = {
        column: partial(_written, own=own, wanted=names)
        for column, own in rows.classes.items()
        if set(classes_used(rows, column)) <= set(names)
    }
    return _rewritten(rows, changes, {**rows.classes, **dict.fromkeys(changes, tuple(names))})


def _rewritten(rows: Table, changes: Mapping[str, Callable[[Any], Any]], classes: Classes) -> Table:
    """Return rows with the cells of some columns changed."""
    if not changes:
        return rows
    made = [{name: changes[name](cell) if name in changes else cell for name, cell in row.items()} for row in rows]
    return Table(made, classes)


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


def _sample(rows: Table, column: str) -> Any:
    """Return the first value of a column, or the first item of a list; None without values."""
    for row in rows:
        cell = row.get(column)
        while isinstance(cell, (list, tuple)):
            cell = cell[0] if cell else None
        if not is_missing(cell):
            return cell
    return None


def _written(cell: Any, own: Sequence[str], wanted: Sequence[str]) -> Any:
    """Return the name of a class, or its number among the wanted ones; other cells unchanged."""
    if isinstance(cell, (list, tuple)):
        return [_written(item, own, wanted) for item in cell]
    is_class = isinstance(cell, (int, float)) and not isinstance(cell, bool) and cell in range(len(own))
    name = own[int(cell)] if is_class else cell
    return wanted.index(name) if name in wanted else name


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
        train=_list_labels(rows, label, names, "train", is_regression),
        evals={
            name: _list_labels(held_out, label, names, f"eval {name}".strip(), is_regression)
            for name, held_out in tables.evals.items()
        },
    )
    if options.problem_type is None:
        options = replace(options, problem_type="multi_label_classification")
    return made, options if options.labels else replace(options, labels=names)


def _list_labels(rows: Table, label: str, names: Sequence[str], table: str, is_regression: bool) -> Table:
    found = list(dict.fromkeys(name for row in rows[:1] for name in row))
    absent = [name for name in names if name not in found]
    if absent:
        raise DataError(
            f"{table}: no column {', '.join(map(repr, absent))}{nearest(absent[0], found)}; it has {found}",
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
    expected = "a number in each" if is_regression else "1 where a text has the label, else 0"
    refuse_rows(table, "columns of labels with other values", wrong, expected)
    return Table(made, rows.classes)


SPLITS = frozenset(("train", "validation", "valid", "dev", "test", "eval"))
"""Usual names of splits; a mapping of splits is not a mapping of training tables."""


@dataclass(frozen=True)
class Tables:
    """The rows of a run.

    Attributes:
        train: training rows.
        evals: evaluation sets; the name is empty if there is only one.
        facts: for each table the values of the model card: name, rows, and the hash of a file.
        parts: training tables, if there are several.
        is_shared: whether the evaluation rows were split off the training data.
    """

    train: Table
    evals: dict[str, Table]
    facts: dict[str, dict[str, Any]]
    parts: dict[str, Table] = field(default_factory=dict)
    is_shared: bool = False

    @property
    def labelled(self) -> list[dict[str, Any]]:
        """All rows with labels: the training rows and the evaluation rows that were split off them."""
        return [*self.train, *self.evals[""]] if self.is_shared else self.train

    def drop_unlabelled(self, column: str | None, labels: Sequence[str] | None = None) -> None:
        """Remove rows with the label -1, which marks a missing label, and warn with their number.

        The label -1 is a class if the caller names it among the labels, or if the column has no declared classes and
        its other labels are not 0, 1 and further integers.

        Args:
            column: of the labels.
            labels: names of labels as the caller gave them.

        Raises:
            DataError: no row of a table has a label.
        """
        if column is None or str(UNLABELLED) in (labels or ()):
            return
        evals = {f"eval {name}".strip(): rows for name, rows in self.evals.items()}
        # One table may have two names, where a model is evaluated and not trained.
        named = {**(self.parts or {"train": self.train}), **evals}
        tables = dict({id(rows): (name, rows) for name, rows in named.items()}.values())
        cells = {name: as_numbers([row.get(column) for row in rows]) for name, rows in tables.items()}
        known = {cell for part in cells.values() for cell in part if not isinstance(cell, (list, tuple, dict))}
        is_declared = any(column in rows.classes for rows in tables.values())
        # -1, 0, 1 and perhaps further integers
        whole = all(isinstance(cell, (int, float)) and cell % 1 == 0 for cell in known)
        is_numbered = whole and known >= {0, 1} and min(known) == UNLABELLED
        if UNLABELLED not in known or not (is_declared or is_numbered):
            return
        counts = []
        for name, rows in tables.items():
            kept = [row for row, cell in zip(rows, cells[name], strict=True) if cell != UNLABELLED]
            if not kept:
                raise DataError(
                    f"{name}: column {column!r} has the label -1 in each row, which means no label; expected some "
                    "labels",
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
        if self.parts:
            self.train[:] = [row for part in self.parts.values() for row in part]
        parts = {f"train {name}": part for name, part in self.parts.items()}
        for name, rows in {**parts, "train": self.train, **evals}.items():
            if name in self.facts:
                self.facts[name]["rows"] = len(rows)


def read_tables(train: Any, held_out: Any, options: Options | None = None) -> Tables:
    """Return the rows of the given files or objects; from a stream only the rows that the run uses.

    Args:
        train: training data; None if a model is evaluated only: then the first evaluation set is used.
        held_out: evaluation data; a mapping for several sets; or a share (below 1) or number of training rows.
        options: the choices of the run.

    Raises:
        DataError: a file is absent or invalid, or has no rows; all files are read before it is raised.
        ConfigError: a share that leaves no rows, or an option with which the required length of a stream is unknown.
    """
    options = options or Options()
    share = None if isinstance(held_out, bool) or not isinstance(held_out, (int, float)) else held_out
    whole: dict[str, Any] = {} if held_out is None or share is not None else {"": held_out}
    named = dict(held_out) if is_several(held_out) else whole
    rows: dict[str, Table] = {}
    facts: dict[str, dict[str, Any]] = {}
    faults: list[DataError] = []
    several = dict(train) if is_several(train) else {}
    if several and {str(name).lower() for name in several} <= SPLITS:
        raise ConfigError(
            f"train: found the splits {', '.join(map(str, several))} of a data set; expected one of them, and another "
            "one for the evaluation: train=data['train'], eval=data['validation']",
            problems=["train"],
        )
    learned = {f"train {name}": source for name, source in several.items()} if several else {"train": train}
    learned = {} if train is None else learned
    for name, source in {**learned, **{f"eval {k}".strip(): source for k, source in named.items()}}.items():
        try:
            rows[name] = load_rows(stream_part(source, options, share) if name == "train" else source)
            rows[name].classes |= names_of_classes(getattr(source, "features", None))
            rows[name] = with_named_records(rows[name])
        except DataError as fault:
            faults.append(DataError(fault.message.replace(", or set format=", ""), **fault.details))
            continue
        facts[name] = {"rows": len(rows[name]), **_facts(source)}
    if len(faults) == 1:
        raise faults[0]
    if faults:
        raise DataError("\n".join(str(fault) for fault in faults), problems=[str(fault) for fault in faults])
    evals = {name: rows[f"eval {name}".strip()] for name in named}
    if train is None:
        first = next(iter(named))
        return Tables(evals[first], {name: aligned(part, evals[first]) for name, part in evals.items()}, facts)
    if several:
        if share is not None:
            raise ConfigError("eval: found a share of several training tables; expected data", problems=["eval"])
        parts = {name: rows[f"train {name}"] for name in several}
        return Tables(Table(row for part in parts.values() for row in part), evals, facts, parts)
    if share is not None:
        rows["train"], evals[""] = _held_out(rows["train"], share, options.seed)
        name = f"{facts['train']['name']}, {len(evals['']):,} rows split off"
        facts["eval"] = {**facts["train"], "name": name, "rows": len(evals[""])}
        facts["train"]["rows"] = len(rows["train"])
        return Tables(rows["train"], evals, facts, is_shared=True)
    return Tables(rows["train"], {name: aligned(part, rows["train"]) for name, part in evals.items()}, facts)


def is_several(source: Any) -> TypeGuard[Mapping[str, Any]]:
    """Return whether evaluation data are a mapping of names to sets, not of names to columns."""

    def is_table(value: Any) -> bool:
        is_rows = isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)
        is_file = isinstance(value, (str, os.PathLike, Mapping))
        return is_rows or is_file or hasattr(value, "features") or hasattr(value, "columns")

    return isinstance(source, Mapping) and bool(source) and all(map(is_table, source.values()))


def _held_out(rows: Table, share: float, seed: int) -> tuple[Table, Table]:
    """Return training rows and evaluation rows, each in order; the split depends only on the seed."""
    count = round(share * len(rows)) if share < 1 else int(share)
    if share <= 0 or not 0 < count < len(rows) or (share >= 1 and share != count):
        raise ConfigError(
            f"eval: found {share!r} of {len(rows)} training rows; expected a share between 0 and 1, or an integer "
            "of rows, that leaves some of both",
            problems=["eval"],
        )
    chosen = set(np.random.default_rng(seed).permutation(len(rows))[:count].tolist())
    kept = Table((row for i, row in enumerate(rows) if i not in chosen), rows.classes)
    return kept, Table((rows[i] for i in sorted(chosen)), rows.classes)


def _facts(source: Any) -> dict[str, Any]:
    if not isinstance(source, (str, os.PathLike)):
        return {"name": f"{type(source).__name__} in memory"}
    digest, path = hashlib.sha256(), Path(source)
    for one in [path / name for name in saved_files(path)] if is_saved_dataset(path) else [path]:
        with open(one, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return {"name": path.name, "sha256": digest.hexdigest()}

"""Columns of the input that the model reads, and columns that are copied to the output.

They are determined by the caller's arguments, then by usual names (`flodl_hf.tokenization.readers.columns`);
ambiguous input is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from flodl.errors import DataError, nearest
from flodl_hf.errors import PredictError
from flodl_hf.families.schema.tasks import TASKS, task_named
from flodl_hf.tokenization.readers.columns import NAMES, data_columns
from flodl_hf.tokenization.readers.rows import Row, RowFault


@dataclass(frozen=True, kw_only=True)
class ColumnArgs:
    """The caller's arguments about columns; None if not given."""

    text_column: str | None = None
    pair_column: str | None = None
    question: str | None = None
    question_column: str | None = None
    context_column: str | None = None
    query: str | None = None
    query_column: str | None = None
    id_column: str | None = None
    keep: str | Sequence[str] | None = None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The columns of a job.

    Attributes:
        task: "classes", "relevance", "entities", "answers", "masks" or "vectors".
        first: column of the text, of the first text of a pair, of the question, or of the query; None if it is `fixed`.
        second: column of the second text, the context, or the document; None for single texts.
        fixed: a question or query for all rows.
        keep: columns that are copied to the output, in order; None for all columns of each row.
    """

    task: str
    first: str | None
    second: str | None = None
    fixed: str | None = None
    keep: tuple[str, ...] | None

    @property
    def read(self) -> tuple[str, ...]:
        """Columns that the model reads."""
        return tuple(name for name in (self.first, self.second) if name is not None)

    def to_dict(self) -> dict[str, Any]:
        """Return the choice as JSON types."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


def choose_columns(head: str, names: Sequence[str], args: ColumnArgs, own: bool) -> Choice:
    """Return the role of each column.

    Args:
        head: the model's head.
        names: columns of the input, or of its first rows.
        args: the caller's arguments.
        own: whether each row has its own columns; "all" then means the columns of the row.

    Raises:
        DataError: a column is missing, ambiguous, or unsuitable for the head; lists all problems.
        PredictError: there is no form of the head's results in files.
    """
    if head in ("multiple_choice", "next_sentence", "pretraining", "replaced_tokens"):
        raise PredictError(
            f"found a model with the head {head}, which has no form of results in files. Call the method "
            "predict of the model in Python with the rows.",
            head=head,
        )
    faults = _absent(names, args)
    ask = args.query is not None or args.query_column is not None
    wanted = task_named(head)
    task = "relevance" if ask and wanted.answers == "classes" else wanted.answers
    faults += _senseless(task, args)
    first, second, fixed = args.text_column, args.pair_column, None
    if task in ("answers", "relevance"):
        fixed = args.question if task == "answers" else args.query
        first = args.question_column if task == "answers" else args.query_column
        if first is None and fixed is None:
            first = _look("question", names, [])
        second = args.context_column or args.text_column
        second = second or _look("context", names, [first]) or _look("text", names, [first])
        if first is None and fixed is None:
            faults.append("no column of questions. Set question_column=, or question= for one question for all rows")
        if second is None:
            faults.append(f"no column of {'contexts' if task == 'answers' else 'documents'}. Set text_column=")
    else:
        first = first or _look("text", names, [args.pair_column])
        if first is None and len(found := data_columns(names)) == 1:
            first = found[0]
        if first is None:
            faults.append("the column of texts is ambiguous. Set text_column=")
        if task == "classes" and second is None and args.text_column is None:
            second = _look("text_pair", names, [first])
    keep, more = _kept(names, args, own)
    faults += more
    if faults:
        raise DataError(
            f"columns: {'; '.join(faults)}. The input has columns {list(names)[:40]}",
            problems=faults,
            names=list(names),
        )
    return Choice(task=task, first=first, second=second, fixed=fixed, keep=keep)


def is_doubtful(names: Sequence[str], args: ColumnArgs) -> bool:
    """Return whether the only column has an unusual name and was not selected: it may be the first text."""
    return len(data_columns(names)) == 1 and args == ColumnArgs(keep=args.keep) and _look("text", names, []) is None


def _absent(names: Sequence[str], args: ColumnArgs) -> list[str]:
    """-"""
    roles = ("text_column", "pair_column", "question_column", "context_column", "query_column", "id_column")
    return [
        f"{role}: no column {name!r}{nearest(name, names)}"
        for role in roles
        if (name := getattr(args, role)) is not None and name not in names
    ]


def _senseless(task: str, args: ColumnArgs) -> list[str]:
    """Return arguments that the task does not use, or that contradict each other."""
    takes = next(each.columns for each in TASKS if each.answers == task)
    given = [
        role
        for role, value in asdict(args).items()
        if value is not None and role not in ("id_column", "keep") and role not in takes
    ]
    faults = [f"{role}: not used by this model" for role in given]
    for one, other in (("question", "question_column"), ("query", "query_column"), ("text_column", "context_column")):
        if getattr(args, one) is not None and getattr(args, other) is not None:
            faults.append(f"{one} and {other}: expected only one of them")
    return faults


def _look(role: str, names: Sequence[str], taken: Sequence[str | None]) -> str | None:
    for known in NAMES[role]:
        for name in names:
            if name.lower() == known and name not in taken:
                return name
    return None


def _kept(names: Sequence[str], args: ColumnArgs, own: bool) -> tuple[tuple[str, ...] | None, list[str]]:
    """Return the columns to keep, the id first, and problems with them."""
    keep = args.keep if args.keep is not None else "none" if args.id_column is not None else "all"
    lead = () if args.id_column is None else (args.id_column,)
    if keep == "all":
        return (None if own else (*lead, *(name for name in names if name not in lead))), []
    if keep == "none":
        return lead, []
    wanted = [name.strip() for name in keep.split(",")] if isinstance(keep, str) else list(keep)
    faults = [f"keep: no column {name!r}{nearest(name, names)}" for name in wanted if name not in names]
    return tuple(dict.fromkeys((*lead, *wanted))), faults


def item_of(choice: Choice) -> Callable[[Mapping[str, Any]], Any]:
    """Return the function from a row's values to the model's input: a text, or a pair of texts."""
    first, second, fixed = choice.first, choice.second, choice.fixed

    def text(values: Mapping[str, Any], column: str) -> str:
        value = values.get(column)
        if type(value) is str and value and not value.isspace():
            return value
        if not isinstance(value, str):
            if column not in values:
                raise RowFault(f"found no column {column!r}, expected one with a text")
            found = "null" if value is None else type(value).__name__
            raise RowFault(f"column {column!r}: found {found}, expected a text")
        return value

    if second is None:
        assert first is not None
        return lambda values: text(values, first)
    if first is None:
        return lambda values: (fixed, text(values, second))
    return lambda values: (text(values, first), text(values, second))


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

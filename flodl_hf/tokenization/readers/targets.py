"""The kind of the labels of a table, their names, and the number of each label.

The values decide, and a doubtful case is an error. Files such as CSV contain texts only: a column in which every cell
is the text of a number is a column of numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from flodl.errors import DataError, printable

_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
_TRUTH = {"true": True, "false": False}

LabelKind = Literal["single_label", "multi_label", "regression"]


def is_missing(value: Any) -> bool:
    """Return whether a cell is empty: None, NaN (as in data frames), or a text without characters."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, float) and math.isnan(value))


def as_numbers(values: Sequence[Any]) -> list[Any]:
    """Return the cells of a column as numbers or truth values if all of them are such, or texts of such.

    Other columns are returned unchanged. Missing cells do not count, and become None in a column of numbers. Items of
    lists count as cells.
    """
    cells = [value for value in values if not (_is_list(value) or is_missing(value))]
    for value in values:
        if _is_list(value):
            # A vector has many items. They are numbers if the first one is.
            cells += value if value and isinstance(value[0], str) else value[:1]
    if not any(isinstance(cell, str) for cell in cells):
        return list(values)
    convert: Callable[[Any], Any]
    if all(_number_of(cell) is not None for cell in cells):
        convert = _exact
    elif all(isinstance(cell, bool) or _truth_of(cell) is not None for cell in cells):
        convert = _truth_of
    else:
        return list(values)
    return [
        [convert(item) for item in value] if _is_list(value) else None if is_missing(value) else convert(value)
        for value in values
    ]


def _exact(value: Any) -> int | float:
    """Return a number, or the number in a text: an integer if it is written as one."""
    if not isinstance(value, str):
        return value
    return int(value) if _INTEGER.fullmatch(value.strip()) else float(value)


def _truth_of(value: Any) -> bool | None:
    return _TRUTH.get(value.strip().lower()) if isinstance(value, str) else value


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, (list, tuple))


@dataclass(frozen=True)
class Targets:
    """Kind, names and numbers of labels.

    Attributes:
        kind: one label of several, any number of labels, or a number to predict.
        names: the labels in the order of their numbers; empty for regression.
        size: numbers of a text, for regression.
    """

    kind: LabelKind
    names: tuple[str, ...] = ()
    size: int = 1

    def encode(self, value: Any) -> int | float | list[float]:
        """Return the label as a model needs it.

        Returns:
            The number of the label; for several labels a share from 0.0 to 1.0 for each; for regression the number, or
            the numbers.

        Raises:
            DataError: the label is not one of ``names``, or for regression not finite, or not as many numbers.
        """
        if self.kind == "regression":
            return self._numbers(value)
        if self.kind == "single_label":
            return self._number(value)
        if len(value) == len(self.names) and all(_is_share(v) for v in value):
            return [float(v) for v in value]
        labels = {self._number(v) for v in ([value] if isinstance(value, str) else value)}
        return [float(k in labels) for k in range(len(self.names))]

    def _numbers(self, value: Any) -> float | list[float]:
        numbers = [_number_of(item) for item in (value if _is_list(value) else (value,))]
        finite = [number for number in numbers if number is not None and math.isfinite(number)]
        if len(finite) != self.size or len(numbers) != self.size:
            expected = "a finite number" if self.size == 1 else f"{self.size} finite numbers"
            raise DataError(f"labels: found {printable(str(value))}, expected {expected}", found=value)
        return finite if self.size > 1 else finite[0]

    def _number(self, value: Any) -> int:
        for name in (_name(value), _number_name(value)):
            if name in self.names:
                return self.names.index(name)
        raise DataError(
            f"labels: found {printable(name)}, expected one of {list(self.names)[:20]}. Correct its spelling, or use "
            "labels of these data.",
            found=name,
            expected=self.names,
        )


def infer_targets(values: Sequence[Any], kind: LabelKind | None = None) -> Targets:
    """Return the kind of the labels ``values``, and their names in order.

    Numbers with a fraction are for regression. Lists are several labels: their names, or a share from 0 to 1 for each
    label. Other values are single labels. Names that are integers are ordered as numbers, others by character. Whole
    numbers have the same name in every source: ``1``, ``1.0`` and the text ``"1.0"`` are the label "1".

    Args:
        values: the labels of all training rows.
        kind: their kind, if it is known.

    Raises:
        DataError: a label is missing or not finite, no row has one, kinds are mixed, lists are written as text, or so
            many integers or texts differ that ``kind`` must be set.
    """
    count = len(values)
    empty = [i for i, value in enumerate(values) if is_missing(value)]
    if empty or not values:
        first = empty[0] if empty else 0
        raise DataError(
            f"labels: found none in {len(empty)} of {count} rows, first in row {first}, expected a label in each",
            rows=empty,
        )
    lists = sum(_is_list(v) for v in values)
    if lists == count:
        return _of_lists(values, kind)
    if lists:
        raise DataError(f"labels: found a list in {lists} of {count} rows, expected one kind of value in all")
    if kind is None and all(isinstance(v, str) and v.startswith("[") and v.endswith("]") for v in values):
        raise DataError(
            f"labels: found {printable(values[0][:60])}, a list that is written as text, expected lists. JSON lines "
            "and Parquet files contain lists, and json.loads reads those of a CSV file. Set "
            "problem_type='single_label_classification' if each text is the name of one label.",
            found=values[0],
        )
    numbers = [_number_of(v) for v in values]
    truths = sum(isinstance(v, bool) for v in values)
    if truths and any(number is not None for number in numbers):
        raise DataError(
            f"labels: found a truth value in {truths} of {count} rows and numbers in others, expected one kind",
            count=truths,
        )
    is_numeric = all(n is not None for n in numbers)
    odd = [i for i, n in enumerate(numbers) if is_numeric and not math.isfinite(n or 0)]
    if odd:
        raise DataError(
            f"labels: found {printable(str(values[odd[0]]))} in {len(odd)} of {count} rows, first in row {odd[0]}, "
            "expected finite numbers",
            rows=odd,
        )
    if kind == "regression" and not is_numeric:
        wrong = next(v for v, n in zip(values, numbers, strict=True) if n is None)
        raise DataError(f"labels: found {printable(str(wrong))}, expected numbers for regression", found=wrong)
    if kind == "regression" or (kind is None and is_numeric and not all(float(n or 0).is_integer() for n in numbers)):
        return Targets("regression")
    if kind == "multi_label":
        raise DataError(
            "labels: found single values, expected lists for problem_type='multi_label_classification'", kind=kind
        )
    names = _ordered({(_number_name if is_numeric else _name)(v) for v in values})
    if kind is None and len(names) > max(20, count // 2):
        what = "integers" if is_numeric else f"texts, such as {printable(names[0][:60])},"
        advice = "problem_type='regression' to predict numbers" if is_numeric else "another column if this is the text"
        raise DataError(
            f"labels: found {len(names)} different {what} in {count} rows, expected fewer classes than rows. Set "
            f"{advice}, or problem_type='single_label_classification' for that many classes.",
            count=len(names),
        )
    return Targets("single_label", names)


def _of_lists(values: Sequence[Sequence[Any]], kind: str | None) -> Targets:
    """Return the kind of labels that are lists: names of labels, shares of labels, or numbers for regression.

    Raises:
        DataError: the lists have different lengths, or numbers of neither kind.
    """
    items = [item for row in values for item in row]
    sizes = sorted({len(row) for row in values})
    lengths = ", ".join(map(str, sizes[:8]))
    numbers = [_number_of(item) for item in items]
    is_numeric = bool(items) and all(n is not None or isinstance(v, bool) for v, n in zip(items, numbers, strict=True))
    has_fractions = is_numeric and any(n is not None and not n.is_integer() for n in numbers)
    if kind == "regression" or (kind is None and has_fractions and sizes == [1]):
        if not is_numeric or len(sizes) > 1 or not all(n is not None and math.isfinite(n) for n in numbers):
            raise DataError(
                f"labels: found lists of {lengths} values for regression, expected as many finite numbers in each row",
                sizes=sizes,
            )
        return Targets("regression", size=sizes[0])
    if kind == "single_label":
        raise DataError(
            "labels: found lists, expected one label in each row for problem_type='single_label_classification'. "
            "Set problem_type='multi_label_classification' for shares of several labels from 0 to 1.",
            kind=kind,
        )
    if not items:
        raise DataError("labels: found an empty list in every row, expected some rows with labels", found=values[0])
    if is_numeric and len(sizes) == 1 and all(_is_share(item) for item in items):
        return Targets("multi_label", tuple(str(k) for k in range(sizes[0])))
    wrong = [v for v, n in zip(items, numbers, strict=True) if n is not None and (n < 0 or not n.is_integer())]
    if is_numeric and wrong:
        raise DataError(
            f"labels: found {wrong[0]!r} in lists of {lengths} numbers, expected a number from 0 to 1 for each label "
            "and equal lengths, names of labels, or problem_type='regression' to predict numbers",
            found=wrong[0],
            sizes=sizes,
        )
    return Targets("multi_label", _ordered({_name(item) for item in items}))


def _is_share(value: Any) -> bool:
    """Return whether a value is the share of a label: a number from 0 to 1."""
    return not isinstance(value, str) and 0 <= value <= 1


def _name(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _number_name(value: Any) -> str:
    """Return the name of a label that is a number or the text of one. Digits keep their leading zeros."""
    number = _number_of(value)
    if number is None or (isinstance(value, str) and value.strip().removeprefix("-").isdecimal()):
        return str(value).strip()
    return _name(number)


def _number_of(value: Any) -> float | None:
    if isinstance(value, bool) or (isinstance(value, str) and "_" in value):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _ordered(names: set[str]) -> tuple[str, ...]:
    if all(name.removeprefix("-").isdecimal() for name in names):
        return tuple(sorted(names, key=int))
    return tuple(sorted(names))

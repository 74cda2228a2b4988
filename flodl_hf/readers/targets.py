"""What the labels of a table are: one of several, any number of them, or numbers; and the number of each.

Decides from the values, and refuses to guess where they leave a doubt. Files such as CSV contain texts only: a column
in which every cell is the text of a number is a column of numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from flodl.errors import DataError, printable

__all__ = ["Targets", "as_numbers", "infer_targets", "is_missing"]

_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
_TRUTH = {"true": True, "false": False}


def is_missing(value: Any) -> bool:
    """Return whether a cell contains nothing: None, NaN (as in data frames), or an empty text."""
    return value is None or (isinstance(value, str) and not value.strip()) or _is_nan(value)


def as_numbers(values: Sequence[Any]) -> list[Any]:
    """Return the cells of a column as numbers or truth values if all of them are such or texts of such, else unchanged.

    Missing cells do not count, and become None in a column of numbers. Of lists the items count.
    """
    cells = [value for value in values if not is_missing(value)]
    # Vectors of a teacher have many items, which are numbers if the first one is.
    items = [
        item
        for value in cells
        for item in ((value if value and isinstance(value[0], str) else value[:1]) if _is_list(value) else (value,))
    ]
    if not any(isinstance(item, str) for item in items):
        return list(values)
    if all(_number_of(item) is not None for item in items):
        convert = _exact
    elif all(isinstance(item, bool) or _truth_of(item) is not None for item in items):
        convert = _truth_of
    else:
        return list(values)
    found: list[Any] = []
    for value in values:
        if _is_list(value):
            found.append([convert(item) for item in value])
        else:
            found.append(None if is_missing(value) else convert(value))
    return found


def _exact(value: Any) -> int | float:
    """Return a number, or the number that a text contains, an integer where it is written as one."""
    if not isinstance(value, str):
        return value
    return int(value) if _INTEGER.fullmatch(value.strip()) else float(value)


def _truth_of(value: Any) -> bool | None:
    return _TRUTH.get(value.strip().lower()) if isinstance(value, str) else value


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, (list, tuple))


@dataclass(frozen=True)
class Targets:
    """What labels look like, and their numbers.

    Attributes:
        kind: one label of several, any number of labels, or a number to predict.
        names: the labels in the order of their numbers; empty for regression.
        size: for regression: the numbers of a text.
    """

    kind: Literal["single_label", "multi_label", "regression"]
    names: tuple[str, ...] = ()
    size: int = 1

    def encode(self, value: Any) -> int | float | list[float]:
        """Return the label as a model takes it.

        Returns:
            The number of the label; for several labels how true each is, from 0.0 to 1.0; for regression the number,
            or the numbers.

        Raises:
            DataError: the label is not one of ``names``, or for regression not finite, or not as many numbers.
        """
        if self.kind == "regression":
            return self._numbers(value)
        if self.kind == "single_label":
            return self._number(value)
        if len(value) == len(self.names) and all(_is_share(v) for v in value):
            return [float(v) for v in value]
        said = {self._number(v) for v in ([value] if isinstance(value, str) else value)}
        return [float(k in said) for k in range(len(self.names))]

    def _numbers(self, value: Any) -> float | list[float]:
        numbers = [_number_of(item) for item in (value if _is_list(value) else (value,))]
        found = [number for number in numbers if number is not None and math.isfinite(number)]
        if len(found) != self.size or len(numbers) != self.size:
            expected = "a finite number" if self.size == 1 else f"{self.size} finite numbers"
            raise DataError(f"labels: found {printable(str(value))}; expected {expected}", found=value)
        return found if self.size > 1 else found[0]

    def _number(self, value: Any) -> int:
        name = _name(value)
        if name not in self.names:
            name = _number_name(value)
        if name not in self.names:
            raise DataError(
                f"labels: {printable(name)} is not one of {list(self.names)[:20]}; "
                "were labels taken from other data, or is it misspelt?",
                found=name,
                expected=self.names,
            )
        return self.names.index(name)


def infer_targets(
    values: Sequence[Any], kind: Literal["single_label", "multi_label", "regression"] | None = None
) -> Targets:
    """Return what kind of labels ``values`` are, and their names in order.

    Numbers with a fraction are for regression. Lists are several labels: their names, or how true each label is, a
    number from 0 to 1 for each. All else is one label. Names that are integers are ordered as numbers, others by
    character. The names of whole numbers are those of integers in every source: ``1``, ``1.0`` and the text ``"1.0"``
    are the label "1".

    Args:
        values: the labels of all training rows.
        kind: what they are, where that is known.

    Raises:
        DataError: a label is missing or not finite, no row has one, kinds are mixed, lists are written as text, or
            integers take so many values that they may be for regression: say ``kind``.
    """
    empty = [i for i, value in enumerate(values) if is_missing(value)]
    if empty or not values:
        raise DataError(
            f"labels: {len(empty)} of {len(values)} rows have none, first row {empty[0] if empty else 0}; "
            "expected a label in each",
            rows=empty,
        )
    lists = sum(_is_list(v) for v in values)
    if lists not in (0, len(values)):
        raise DataError(f"labels: {lists} of {len(values)} rows have a list, the others do not; expected one kind")
    if lists:
        return _of_lists(values, kind)
    if kind is None and all(isinstance(v, str) and v.startswith("[") and v.endswith("]") for v in values):
        raise DataError(
            f"labels: {printable(values[0][:60])} looks like a list that is written as text; expected lists, for any "
            "number of labels a row (JSON lines and Parquet hold them; json.loads reads those of a CSV file), or "
            "kind='single_label' if each is the name of one label",
            found=values[0],
        )
    truths = sum(isinstance(v, bool) for v in values)
    numbers = [_number_of(v) for v in values]
    if truths and any(number is not None for number in numbers):
        raise DataError(
            f"labels: {truths} of {len(values)} rows have a truth value, others a number; expected one kind",
            count=truths,
        )
    is_numeric = all(n is not None for n in numbers)
    odd = [i for i, n in enumerate(numbers) if n is not None and not math.isfinite(n)] if is_numeric else []
    if odd:
        raise DataError(
            f"labels: {len(odd)} of {len(values)} rows have {printable(str(values[odd[0]]))}, first row {odd[0]}, and "
            "the others numbers; expected a finite number in each",
            rows=odd,
        )
    fractions = is_numeric and any(n is not None and not n.is_integer() for n in numbers)
    if kind == "regression" or (kind is None and fractions):
        if not is_numeric:
            wrong = next(v for v, n in zip(values, numbers, strict=True) if n is None)
            raise DataError(
                f"labels: {printable(str(wrong))} is no number; expected numbers for regression", found=wrong
            )
        return Targets("regression")
    if kind == "multi_label":
        raise DataError(f"labels: kind is {kind!r}, and the labels are not lists", kind=kind)
    names = _ordered({(_number_name if is_numeric else _name)(v) for v in values})
    if kind is None and not is_numeric and len(names) > max(20, len(values) // 2):
        raise DataError(
            f"labels: {len(names)} different labels in {len(values)} rows, such as {printable(names[0][:60])}: nearly "
            "as many classes as rows. Is this column text? Say which column holds the labels, or kind='single_label' "
            "for that many classes",
            count=len(names),
        )
    if kind is None and is_numeric and len(names) > max(20, len(values) // 2):
        raise DataError(
            f"labels: {len(names)} different integers in {len(values)} rows; say kind='regression' to predict "
            "numbers, or kind='single_label' for that many classes",
            count=len(names),
        )
    return Targets("single_label", names)


def _of_lists(values: Sequence[Sequence[Any]], kind: str | None) -> Targets:
    """Return what labels are that are lists: names of labels, how true each label is, or numbers for regression.

    Raises:
        DataError: the lists have different lengths, or numbers that are neither.
    """
    items = [item for row in values for item in row]
    sizes = sorted({len(row) for row in values})
    numbers = [_number_of(item) for item in items]
    is_numeric = bool(items) and all(
        isinstance(item, bool) or n is not None for item, n in zip(items, numbers, strict=True)
    )
    fractions = [item for item, n in zip(items, numbers, strict=True) if n is not None and not n.is_integer()]
    if kind == "regression" or (kind is None and is_numeric and fractions and sizes == [1]):
        if not is_numeric or len(sizes) > 1 or not all(n is not None and math.isfinite(n) for n in numbers):
            raise DataError(
                f"labels: found lists of {', '.join(map(str, sizes[:8]))} values for regression; expected as many "
                "finite numbers in each row",
                sizes=sizes,
            )
        return Targets("regression", size=sizes[0])
    if kind == "single_label":
        raise DataError(
            "labels: kind is 'single_label', and the labels are lists; expected one label in each row. Numbers from 0 "
            "to 1 for each label are learned with kind='multi_label'",
            kind=kind,
        )
    if not items:
        raise DataError("labels: every row's list is empty; expected some rows with labels", found=values[0])
    if is_numeric and len(sizes) == 1 and all(_is_share(item) for item in items):
        return Targets("multi_label", tuple(str(k) for k in range(sizes[0])))
    wrong = [*fractions, *(item for item, n in zip(items, numbers, strict=True) if n is not None and n < 0)]
    if is_numeric and wrong:
        raise DataError(
            f"labels: found {wrong[0]!r} in lists of {', '.join(map(str, sizes[:8]))} numbers; expected a number from "
            "0 to 1 for each label and as many in each row, names of labels, or kind='regression' to predict numbers",
            found=wrong[0],
            sizes=sizes,
        )
    return Targets("multi_label", _ordered({_name(item) for item in items}))


def _is_share(value: Any) -> bool:
    """Return whether a value says how true a label is: a number from 0 to 1."""
    return not isinstance(value, str) and 0 <= value <= 1


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _name(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _number_name(value: Any) -> str:
    """Return the name of a label that is a number or the text of one; digits keep their leading zeros."""
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

"""What the labels of a table are: one of several, any number of them, or numbers; and the number of each.

Decides from the values, and refuses to guess where they leave a doubt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flodl.errors import DataError, printable

__all__ = ["Targets", "infer_targets"]


@dataclass(frozen=True)
class Targets:
    """What labels look like, and their numbers.

    Attributes:
        kind: one label of several, any number of labels, or a number to predict.
        names: the labels in the order of their numbers; empty for regression.
    """

    kind: Literal["single_label", "multi_label", "regression"]
    names: tuple[str, ...] = ()

    def encode(self, value: Any) -> int | float | list[float]:
        """Return the label as a model takes it: its number, a list of 0.0 and 1.0, or the value itself.

        Raises:
            DataError: the label is not one of ``names``, or for regression no finite number.
        """
        if self.kind == "regression":
            number = _number_of(value)
            if number is None or not math.isfinite(number):
                raise DataError(f"labels: found {printable(str(value))}; expected a finite number", found=value)
            return number
        if self.kind == "single_label":
            return self._number(value)
        if len(value) == len(self.names) and all(v in (0, 1) and not isinstance(v, str) for v in value):
            return [float(v) for v in value]
        said = {self._number(v) for v in ([value] if isinstance(value, str) else value)}
        return [float(k in said) for k in range(len(self.names))]

    def _number(self, value: Any) -> int:
        name = _name(value)
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

    Lists are several labels; numbers with a fraction, other than in lists, are for regression; all else is one label.
    Names that are integers are ordered as numbers, others by character.

    Args:
        values: the labels of all training rows.
        kind: what they are, where that is known.

    Raises:
        DataError: a label is missing or not finite, no row has one, kinds are mixed, lists are written as text, or
            integers take so many values that they may be for regression: say ``kind``.
    """
    # Data frames have NaN where nothing is.
    empty = [i for i, v in enumerate(values) if v is None or (isinstance(v, str) and not v.strip()) or _is_nan(v)]
    if empty or not values:
        raise DataError(
            f"labels: {len(empty)} of {len(values)} rows have none, first row {empty[0] if empty else 0}; "
            "expected a label in each",
            rows=empty,
        )
    lists = sum(isinstance(v, (list, tuple)) for v in values)
    if lists not in (0, len(values)):
        raise DataError(f"labels: {lists} of {len(values)} rows have a list, the others do not; expected one kind")
    if lists and kind in (None, "multi_label"):
        flags = all(v in (0, 1) and not isinstance(v, str) for row in values for v in row)
        if flags and values[0] and len({len(row) for row in values}) == 1:
            return Targets("multi_label", tuple(str(k) for k in range(len(values[0]))))
        found = _ordered({_name(v) for row in values for v in row})
        if not found:
            raise DataError("labels: every row's list is empty; expected some rows with labels", found=values[0])
        return Targets("multi_label", found)
    if kind is None and all(isinstance(v, str) and v.startswith("[") and v.endswith("]") for v in values):
        raise DataError(
            f"labels: {printable(values[0][:60])} looks like a list that is written as text; expected lists, for any "
            "number of labels a row (JSON lines and Parquet hold them; json.loads reads those of a CSV file), or "
            "kind='single_label' if each is the name of one label",
            found=values[0],
        )
    numbers = [_number_of(v) for v in values]
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
    if lists or kind == "multi_label":
        raise DataError(f"labels: kind is {kind!r}, and the labels are {'' if lists else 'not '}lists", kind=kind)
    names = _ordered({_name(v) for v in values})
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


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _name(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _number_of(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _ordered(names: set[str]) -> tuple[str, ...]:
    if all(name.removeprefix("-").isdecimal() for name in names):
        return tuple(sorted(names, key=int))
    return tuple(sorted(names))

"""Values of frozen records, checked by a table when a record is made: their kinds, and their bounds."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from flodl.errors import ConfigError, TrainError, capped, nearest, visible

MOST_SHOWN = 80
"""Characters that an error quotes of a value."""


@dataclass(frozen=True, kw_only=True)
class Values:
    """What a field may hold.

    Attributes:
        expected: in words, as errors say it.
        fits: whether a value is one.
        words: texts that are known by name; a text that is none of them is told the nearest.
        beyond: a value of the right kind that is out of range, where there is a range.
    """

    expected: str
    fits: Callable[[Any], bool]
    words: tuple[str, ...] = ()
    beyond: Any = None

    def __or__(self, other: Values | None) -> Values:
        """Return values of either kind; with None those, or None."""
        if other is None:
            other = Values(expected="None", fits=lambda value: value is None)
        return Values(
            expected=f"{self.expected}, or {other.expected}",
            fits=lambda value: self.fits(value) or other.fits(value),
            words=self.words + other.words,
            beyond=self.beyond if other.beyond is None else other.beyond,
        )


def check_fields(
    record: Any, table: Mapping[str, Values], where: str, error: type[ConfigError | TrainError] = TrainError
) -> None:
    """Refuse a record whose values are not those of ``table``.

    Raises:
        error: ``problems`` lists each field with what was found and what was expected.
    """
    problems = []
    for name, values in table.items():
        found = getattr(record, name)
        if not values.fits(found):
            near = nearest(found, values.words) if isinstance(found, str) and values.words else ""
            problems.append(f"{name}: found {_shown(found)}{near}; expected {values.expected}.")
    if problems:
        one = problems[0] if where == "settings" else f"{where}: {problems[0]}"
        said = one if len(problems) == 1 else f"{where}: values that cannot be:\n{capped(problems)}"
        raise error(said, problems=problems, where=where)


def _shown(value: Any) -> str:
    shown = visible(repr(value))
    return shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]}... ({type(value).__name__})"


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def whole(least: int) -> Values:
    """Return integers from ``least``, numpy's among them; True and False are none."""
    return Values(
        expected=f"an integer of {least} or more", fits=lambda v: _is_whole(v) and v >= least, beyond=least - 1
    )


def number(least: float | None = None, *, above: float | None = None, below: float | None = None) -> Values:
    """Return numbers within bounds, no NaN among them."""
    bounds = [f"of {least} or more"] if least is not None else []
    bounds += [f"above {above}"] if above is not None else []
    bounds += [f"below {below}"] if below is not None else []
    low = float("-inf") if least is None else least
    floor, ceiling = float("-inf") if above is None else above, float("inf") if below is None else below

    def fits(value: Any) -> bool:
        if not _is_number(value) or value != value:
            return False
        return value >= low and (above is None or value > floor) and (below is None or value < ceiling)

    beyond = float("nan") if not bounds else least - 1 if least is not None else above if above is not None else below
    return Values(expected=" ".join(["a number", " and ".join(bounds)]).strip(), fits=fits, beyond=beyond)


def share() -> Values:
    """Return numbers from 0 to 1, both included."""
    return Values(expected="a number from 0 to 1", fits=lambda v: _is_number(v) and 0 <= v <= 1, beyond=1.5)


def choice(*words: str) -> Values:
    """Return the texts ``words``."""
    return Values(
        expected=("one of " if len(words) > 1 else "") + ", ".join(map(repr, words)),
        fits=lambda value: isinstance(value, str) and value in words,
        words=words,
        beyond="nothing of the kind",
    )


def listed(expected: str, fits: Callable[[Any], bool]) -> Values:
    """Return sequences of what ``fits``; a single text is none, for it would be read letter by letter."""
    return Values(
        expected=expected,
        fits=lambda v: isinstance(v, Sequence) and not isinstance(v, (str, bytes)) and all(fits(one) for one in v),
        beyond="one text",
    )


def pair(expected: str, first: Values, second: Values) -> Values:
    """Return pairs of two kinds."""

    def fits(value: Any) -> bool:
        parts = list(value) if isinstance(value, Sequence) else []
        return len(parts) == 2 and first.fits(parts[0]) and second.fits(parts[1])

    return Values(expected=expected, fits=fits)


def of_kind(expected: str, fits: Callable[[Any], bool]) -> Values:
    """Return what ``fits``, where no other function here says it."""
    return Values(expected=expected, fits=fits)


truth = Values(expected="True or False", fits=lambda value: isinstance(value, bool))
text = Values(expected="a text", fits=lambda value: isinstance(value, str) and bool(value), beyond="")
path = Values(expected="a path", fits=lambda value: isinstance(value, (str, os.PathLike)) and bool(os.fspath(value)))

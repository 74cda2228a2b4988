"""Checks of the values of frozen records by a table: types and bounds."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from flodl.errors import ConfigError, TrainError, capped, nearest, visible

MAX_SHOWN_CHARS = 80


@dataclass(frozen=True)
class Values:
    """The valid values of a field.

    Attributes:
        expected: description for errors.
        fits: returns whether a value is valid.
        words: valid texts; errors suggest the nearest.
    """

    expected: str
    fits: Callable[[Any], bool]
    words: tuple[str, ...] = ()

    def __or__(self, other: Values | None) -> Values:
        """Return the union with other values, or with None."""
        if other is None:
            other = Values("None", lambda value: value is None)
        expected = f"{self.expected}, or {other.expected}"
        return Values(expected, lambda value: self.fits(value) or other.fits(value), self.words + other.words)


of_kind = Values


def check_fields(
    record: Any, table: Mapping[str, Values], title: str, error: type[ConfigError | TrainError] = TrainError
) -> None:
    """Raise if values of a record are invalid according to ``table``.

    Raises:
        error: ``problems`` lists each field with the found and the expected value.
    """
    problems = []
    for name, values in table.items():
        found = getattr(record, name)
        if not values.fits(found):
            near = nearest(found, values.words) if isinstance(found, str) and values.words else ""
            problems.append(f"{name}: found {_shown(found)}{near}; expected {values.expected}.")
    if problems:
        one = problems[0] if title == "settings" else f"{title}: {problems[0]}"
        message = one if len(problems) == 1 else f"{title}: invalid values:\n{capped(problems)}"
        raise error(message, problems=problems, where=title)


def _shown(value: Any) -> str:
    shown = visible(repr(value))
    return shown if len(shown) <= MAX_SHOWN_CHARS else f"{shown[:MAX_SHOWN_CHARS]}... ({type(value).__name__})"


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def whole(least: int) -> Values:
    """Return integers of at least ``least``, including numpy's; not True and False."""
    return Values(
        f"an integer of {least} or more",
        lambda value: isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least,
    )


def number(least: float | None = None, *, above: float | None = None, below: float | None = None) -> Values:
    """Return numbers within bounds; not NaN."""
    bounds = [f"of {least} or more"] if least is not None else []
    bounds += [f"above {above}"] if above is not None else []
    bounds += [f"below {below}"] if below is not None else []

    def fits(value: Any) -> bool:
        if not _is_number(value) or value != value:
            return False
        large_enough = (least is None or value >= least) and (above is None or value > above)
        return large_enough and (below is None or value < below)

    return Values(" ".join(["a number", " and ".join(bounds)]).strip(), fits)


def share() -> Values:
    """Return numbers from 0 to 1, both included."""
    return Values("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1)


def choice(*words: str) -> Values:
    """Return the texts ``words``."""
    expected = ("one of " if len(words) > 1 else "") + ", ".join(map(repr, words))
    return Values(expected, lambda value: isinstance(value, str) and value in words, words)


def listed(expected: str, fits: Callable[[Any], bool]) -> Values:
    """Return sequences of valid items; not a single text, which is a sequence of letters."""
    return Values(
        expected,
        lambda value: isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and all(map(fits, value)),
    )


def pair(expected: str, first: Values, second: Values) -> Values:
    """Return pairs of two kinds of values."""

    def fits(value: Any) -> bool:
        parts = list(value) if isinstance(value, Sequence) else []
        return len(parts) == 2 and first.fits(parts[0]) and second.fits(parts[1])

    return Values(expected, fits)


truth = Values("True or False", lambda value: isinstance(value, bool))
text = Values("a text", lambda value: isinstance(value, str) and bool(value))
path = Values("a path", lambda value: isinstance(value, (str, os.PathLike)) and bool(os.fspath(value)))

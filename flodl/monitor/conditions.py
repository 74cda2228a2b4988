"""Conditions on the values of a run: callables such as ``stalled("loss", 3)``, with a text form for command lines.

A condition is a value: it can be compared, pickled, combined by ``&``, ``|`` and ``~``, and converted to the text that
`parse_condition` reads. `flodl.train.rules` pairs conditions with actions.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flodl.checked_fields import Values, choice, number, text, whole
from flodl.errors import ConfigError, nearest
from flodl.monitor.trend import Trend

_DEFAULTS = {"stalled": 1e-3, "improving": "min", "worsening": "min", "no_better": "min"}


@dataclass(frozen=True)
class RuleContext:
    """Values that a condition reads; equal on all ranks.

    Attributes:
        trends: histories with their names: ``loss``, training metrics, watched values and evaluation metrics.
        epochs: number of finished epochs.
        steps: number of finished steps.
    """

    trends: Mapping[str, Trend] = field(default_factory=dict)
    epochs: int = 0
    steps: int = 0

    def trend(self, name: str) -> Trend:
        """Return the history with this name; an empty one if no value was recorded."""
        return self.trends.get(name) or Trend((), name)


@dataclass(frozen=True)
class Condition:
    """A callable that is true or false for a `RuleContext`; created by the functions of this module.

    Attributes:
        word: name of the function that created it, or ``and``, ``or``, ``not``.
        args: its arguments; conditions for ``and``, ``or`` and ``not``.
    """

    word: str
    args: tuple[Any, ...]

    def __call__(self, context: RuleContext) -> bool:
        """Return whether the condition is true now."""
        first, *rest = self.args
        if self.word == "not":
            return not first(context)
        if self.word in ("and", "or"):
            return (all if self.word == "and" else any)(part(context) for part in self.args)
        if self.word not in _TESTS:
            return getattr(context, self.word.removeprefix("after_")) >= first
        trend, least = context.trend(first), 1 if self.word in ("above", "below") else rest[0]
        return len(trend) >= least and _TESTS[self.word](trend, *rest)

    def why(self, context: RuleContext) -> str:
        """Return the values that make the condition true."""
        first = self.args[0]
        if self.word == "not":
            return f"{first} is false"
        if self.word in ("and", "or"):
            return " and ".join(part.why(context) for part in self.args if part(context))
        if self.word not in _TESTS:
            unit = self.word.removeprefix("after_")
            return f"{getattr(context, unit)} {unit} are done"
        return f"{first} is {context.trend(first).latest():.4g}"

    @property
    def names(self) -> list[str]:
        """Names of the histories that the condition reads."""
        found = [name for part in self.args if isinstance(part, Condition) for name in part.names]
        return list(dict.fromkeys([self.args[0]] if self.word in _TESTS else found))

    def renamed(self, names: Mapping[str, str]) -> Condition:
        """Return the condition with other names of histories."""
        args: list[Any] = [part.renamed(names) if isinstance(part, Condition) else part for part in self.args]
        if self.word in _TESTS:
            args[0] = names.get(args[0], args[0])
        return Condition(self.word, tuple(args))

    def __str__(self) -> str:
        if self.word == "not":
            return f"not ({self.args[0]})" if self.args[0].word in ("and", "or") else f"not {self.args[0]}"
        if self.word in ("and", "or"):
            inner = "or" if self.word == "and" else ""
            return f" {self.word} ".join(f"({part})" if part.word == inner else str(part) for part in self.args)
        args = self.args[:-1] if self.args[-1] == _DEFAULTS.get(self.word) else self.args
        return f"{self.word}({', '.join(map(_argument_text, args))})"

    def __and__(self, other: Condition) -> Condition:
        return Condition("and", (self, other))

    def __or__(self, other: Condition) -> Condition:
        return Condition("or", (self, other))

    def __invert__(self) -> Condition:
        return Condition("not", (self,))


def stalled(name: str, window: int, tolerance: float = 1e-3) -> Condition:
    """Return a condition: the absolute slope of the last ``window`` values is below ``tolerance``."""
    return _checked("stalled", name=name, window=window, tolerance=tolerance)


def improving(name: str, window: int, mode: str = "min") -> Condition:
    """Return a condition: the last ``window`` values fall, or rise for ``mode="max"``."""
    return _checked("improving", name=name, window=window, mode=mode)


def worsening(name: str, window: int, mode: str = "min") -> Condition:
    """Return a condition: the last ``window`` values rise, or fall for ``mode="max"``."""
    return _checked("worsening", name=name, window=window, mode=mode)


def no_better(name: str, window: int, mode: str = "min") -> Condition:
    """Return a condition: none of the last ``window`` values is better than the best before."""
    return _checked("no_better", name=name, window=window, mode=mode)


def converged(name: str, window: int, tolerance: float) -> Condition:
    """Return a condition: the variance of the last ``window`` values is below ``tolerance``."""
    return _checked("converged", name=name, window=window, tolerance=tolerance)


def above(name: str, value: float) -> Condition:
    """Return a condition: the newest value is higher than ``value``."""
    return _checked("above", name=name, value=value)


def below(name: str, value: float) -> Condition:
    """Return a condition: the newest value is lower than ``value``."""
    return _checked("below", name=name, value=value)


def after_epochs(count: int) -> Condition:
    """Return a condition: ``count`` epochs are finished."""
    return _checked("after_epochs", count=count)


def after_steps(count: int) -> Condition:
    """Return a condition: ``count`` steps are finished."""
    return _checked("after_steps", count=count)


def _no_better(trend: Trend, window: int, mode: str) -> bool:
    signed = [value if mode == "min" else -value for value in trend.values()]
    values = [math.inf if math.isnan(value) else value for value in signed]
    return len(values) > window and min(values[-window:]) >= min(values[:-window])


_TESTS: dict[str, Callable[..., bool]] = {
    "stalled": Trend.stalled,
    "improving": lambda trend, window, mode: trend.improving(window, mode=mode),
    "worsening": lambda trend, window, mode: trend.improving(window, mode="max" if mode == "min" else "min"),
    "no_better": _no_better,
    "converged": Trend.converged,
    "above": lambda trend, value: trend.latest() > value,
    "below": lambda trend, value: trend.latest() < value,
}
_FUNCTIONS: dict[str, Callable[..., Condition]] = {
    made.__name__: made
    for made in (stalled, improving, worsening, no_better, converged, above, below, after_epochs, after_steps)
}


_VALUES: dict[str, Values] = {
    "name": Values("the name of a value, such as loss", text.fits),
    "mode": choice("min", "max"),
    "value": number(),
    "tolerance": number(above=0, below=math.inf),
    "window": whole(2),
    "no_better window": whole(1),
    "count": whole(1),
}


def _checked(word: str, **args: Any) -> Condition:
    """Return a condition.

    Raises:
        ConfigError: an argument is invalid; ``problems`` lists all of them.
    """
    problems = []
    for name, value in args.items():
        values = _VALUES.get(f"{word} {name}", _VALUES[name])
        if not values.fits(value):
            problems.append(f"{word}: {name} is {value!r}, expected {values.expected}")
    if problems:
        raise ConfigError(f"condition: {'; '.join(problems)}", problems=problems)
    floats = ("tolerance", "value")
    return Condition(word, tuple(float(value) if name in floats else value for name, value in args.items()))


def _argument_text(value: Any) -> str:
    if isinstance(value, float):
        return repr(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)
    if isinstance(value, str) and (not re.fullmatch(r"[^\s()=,'\"]+", value) or not isinstance(_read(value), str)):
        return f'"{value}"' if "'" in value else f"'{value}'"
    return str(value)


_BARE_ARGUMENT = re.compile(r"""'[^']*'|"[^"]*"|(?<=[(,=])\s*([^\s()'",=]+)\s*(?=[,)])""")


def parse_condition(written: str) -> Condition:
    """Return the condition of a text such as ``stalled(loss, 3) and not improving(dev/f1, 2, mode=max)``.

    The text is an expression of Python in which names need quotes only if they contain spaces, commas or brackets.

    Raises:
        ConfigError: the text is not a condition.
    """
    quoted = _BARE_ARGUMENT.sub(lambda match: match[0] if match[1] is None else repr(_read(match[1])), written.strip())
    try:
        return _built(ast.parse(quoted, mode="eval").body)
    except (SyntaxError, TypeError, ValueError, RecursionError, ConfigError) as fault:
        raise ConfigError(
            f"condition {written!r}: {fault}; expected {', '.join(_FUNCTIONS)} with arguments, joined by and, or, not.",
            problems=[str(fault)],
        ) from None


def _built(node: ast.expr) -> Condition:
    """Return the condition of a parsed expression."""
    if isinstance(node, ast.BoolOp):
        return Condition("and" if isinstance(node.op, ast.And) else "or", tuple(map(_built, node.values)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ~_built(node.operand)
    word = ast.unparse(node.func if isinstance(node, ast.Call) else node)
    if not isinstance(node, ast.Call) or word not in _FUNCTIONS:
        raise ValueError(f"found {word!r}{nearest(word, _FUNCTIONS)}")
    named = {part.arg or "**": ast.literal_eval(part.value) for part in node.keywords}
    return _FUNCTIONS[word](*map(ast.literal_eval, node.args), **named)


def _read(word: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word

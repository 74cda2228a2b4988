"""Questions about the trends of a run, in Python and as text: ``stalled("loss", 3)`` and ``stalled(loss, 3)``.

A condition is a value: it can be compared, sent to other processes, joined by ``&``, ``|`` and ``~``, and written as
the text that `parse_condition` reads. What is done when one comes true is decided in `flodl.train.rules`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flodl.errors import ConfigError, nearest
from flodl.monitor.trend import Trend

__all__ = [
    "Condition",
    "Outlook",
    "above",
    "after_epochs",
    "after_steps",
    "below",
    "converged",
    "improving",
    "no_better",
    "parse_condition",
    "stalled",
    "worsening",
]

MODES = ("min", "max")


@dataclass(frozen=True)
class Outlook:
    """What a condition is asked about: what a run knows at a point where all its ranks know the same.

    Attributes:
        trends: by name: ``loss``, the metrics of training, values that are watched, by dotted names, and figures of
            evaluations.
        epochs: epochs that are done.
        steps: steps that are done.
    """

    trends: Mapping[str, Trend] = field(default_factory=dict)
    epochs: int = 0
    steps: int = 0

    def trend(self, name: str) -> Trend:
        """Return a trend; empty where nothing of this name is known yet."""
        return self.trends.get(name) or Trend((), name)


@dataclass(frozen=True)
class Condition:
    """A question with an answer of yes or no; made by the functions of this module.

    Attributes:
        word: which question.
        args: what it is asked with; conditions, for ``and``, ``or`` and ``not``.
    """

    word: str
    args: tuple[Any, ...]

    def __call__(self, outlook: Outlook) -> bool:
        """Return whether it is true now."""
        return bool(_WORDS[self.word].test(outlook, *self.args))

    def why(self, outlook: Outlook) -> str:
        """Return the figures that the answer comes from."""
        return _WORDS[self.word].why(outlook, *self.args)

    @property
    def names(self) -> list[str]:
        """The trends that it asks about."""
        inner = [name for part in self.args if isinstance(part, Condition) for name in part.names]
        own = [self.args[0]] if "name" in _WORDS[self.word].takes else []
        return list(dict.fromkeys([*own, *inner]))

    def renamed(self, names: Mapping[str, str]) -> Condition:
        """Return the same question about trends of other names."""
        args: list[Any] = [part.renamed(names) if isinstance(part, Condition) else part for part in self.args]
        if "name" in _WORDS[self.word].takes:
            args[0] = names.get(args[0], args[0])
        return Condition(self.word, tuple(args))

    def __str__(self) -> str:
        if self.word in ("and", "or"):
            return f" {self.word} ".join(_bracketed(part, self.word) for part in self.args)
        if self.word == "not":
            return f"not {_bracketed(self.args[0], 'not')}"
        takes = _WORDS[self.word].takes
        shown = [_shown(value) for value in self.args]
        while shown and self.args[len(shown) - 1] == list(takes.values())[len(shown) - 1]:
            shown.pop()  # defaults are left out
        return f"{self.word}({', '.join(shown)})"

    def __and__(self, other: Condition) -> Condition:
        return Condition("and", (self, other))

    def __or__(self, other: Condition) -> Condition:
        return Condition("or", (self, other))

    def __invert__(self) -> Condition:
        return Condition("not", (self,))


# ---- the questions ---------------------------------------------------------------------------------------


def stalled(name: str, window: int, tolerance: float = 1e-3) -> Condition:
    """Ask whether a trend stands still: the slope of its last ``window`` values is smaller than ``tolerance``.

    False before there are so many.
    """
    return _made("stalled", name, window, tolerance)


def improving(name: str, window: int, mode: str = "min") -> Condition:
    """Ask whether the slope of the last ``window`` values goes down, or up for ``mode="max"``."""
    return _made("improving", name, window, mode)


def worsening(name: str, window: int, mode: str = "min") -> Condition:
    """Ask whether the slope of the last ``window`` values goes up, or down for ``mode="max"``."""
    return _made("worsening", name, window, mode)


def no_better(name: str, window: int, mode: str = "min") -> Condition:
    """Ask whether none of the last ``window`` values is better than the best before them."""
    return _made("no_better", name, window, mode)


def converged(name: str, window: int, tolerance: float) -> Condition:
    """Ask whether the last ``window`` values have settled: their variance is smaller than ``tolerance``."""
    return _made("converged", name, window, tolerance)


def above(name: str, value: float) -> Condition:
    """Ask whether the newest value is higher than ``value``."""
    return _made("above", name, value)


def below(name: str, value: float) -> Condition:
    """Ask whether the newest value is lower than ``value``."""
    return _made("below", name, value)


def after_epochs(count: int) -> Condition:
    """Ask whether so many epochs are done."""
    return _made("after_epochs", count)


def after_steps(count: int) -> Condition:
    """Ask whether so many steps are done."""
    return _made("after_steps", count)


@dataclass(frozen=True)
class _Word:
    """One question: what it takes, with defaults, how it is answered, and from which figures."""

    takes: Mapping[str, Any]
    test: Callable[..., Any]
    why: Callable[..., str]


_NEEDED = object()


def _enough(outlook: Outlook, name: str, window: int) -> Trend | None:
    trend = outlook.trend(name)
    return trend if len(trend) >= max(window, 2) else None


def _stalled(outlook: Outlook, name: str, window: int, tolerance: float) -> bool:
    trend = _enough(outlook, name, window)
    return trend is not None and trend.stalled(window, tolerance)


def _improving(outlook: Outlook, name: str, window: int, mode: str) -> bool:
    trend = _enough(outlook, name, window)
    return trend is not None and trend.improving(window, mode=mode)


def _worsening(outlook: Outlook, name: str, window: int, mode: str) -> bool:
    return _improving(outlook, name, window, "max" if mode == "min" else "min")


def _no_better(outlook: Outlook, name: str, window: int, mode: str) -> bool:
    signed = [value if mode == "min" else -value for value in outlook.trend(name).values()]
    values = [math.inf if math.isnan(value) else value for value in signed]
    return len(values) > window and min(values[-window:]) >= min(values[:-window])


def _converged(outlook: Outlook, name: str, window: int, tolerance: float) -> bool:
    trend = _enough(outlook, name, window)
    return trend is not None and trend.converged(window, tolerance)


def _above(outlook: Outlook, name: str, value: float) -> bool:
    trend = outlook.trend(name)
    return len(trend) > 0 and trend.latest() > value


def _below(outlook: Outlook, name: str, value: float) -> bool:
    trend = outlook.trend(name)
    return len(trend) > 0 and trend.latest() < value


def _slope(outlook: Outlook, name: str, window: int, *_: Any) -> str:
    trend = outlook.trend(name)
    return f"the slope of {name} over {len(trend.last(window))} values is {trend.slope(window):.3g}"


def _values(outlook: Outlook, name: str, window: int, *_: Any) -> str:
    return f"the last values of {name} are {', '.join(f'{value:.4g}' for value in outlook.trend(name).last(window))}"


def _newest(outlook: Outlook, name: str, *_: Any) -> str:
    trend = outlook.trend(name)
    return f"{name} is {trend.latest():.4g}" if len(trend) else f"{name} has no value"


def _joined(word: str) -> Callable[..., str]:
    return lambda outlook, *parts: f" {word} ".join(
        part.why(outlook) for part in parts if word == "and" or part(outlook)
    )


_WINDOW = {"name": _NEEDED, "window": _NEEDED}
_WORDS: dict[str, _Word] = {
    "stalled": _Word({**_WINDOW, "tolerance": 1e-3}, _stalled, _slope),
    "improving": _Word({**_WINDOW, "mode": "min"}, _improving, _slope),
    "worsening": _Word({**_WINDOW, "mode": "min"}, _worsening, _slope),
    "no_better": _Word({**_WINDOW, "mode": "min"}, _no_better, _values),
    "converged": _Word({**_WINDOW, "tolerance": _NEEDED}, _converged, _values),
    "above": _Word({"name": _NEEDED, "value": _NEEDED}, _above, _newest),
    "below": _Word({"name": _NEEDED, "value": _NEEDED}, _below, _newest),
    "after_epochs": _Word({"count": _NEEDED}, lambda o, n: o.epochs >= n, lambda o, n: f"{o.epochs} epochs are done"),
    "after_steps": _Word({"count": _NEEDED}, lambda o, n: o.steps >= n, lambda o, n: f"{o.steps} steps are done"),
    "and": _Word({}, lambda o, *parts: all(part(o) for part in parts), _joined("and")),
    "or": _Word({}, lambda o, *parts: any(part(o) for part in parts), _joined("or")),
    "not": _Word({}, lambda o, part: not part(o), lambda o, part: f"{part} does not hold"),
}
QUESTIONS = tuple(word for word in _WORDS if word not in ("and", "or", "not"))


def _made(word: str, *args: Any, **named: Any) -> Condition:
    """Return a condition.

    Raises:
        ConfigError: it takes other arguments; ``problems`` lists all that is wrong.
    """
    takes = _WORDS[word].takes
    problems = [f"{word} has no argument {name!r}{nearest(name, takes)}" for name in named if name not in takes]
    if len(args) > len(takes):
        problems.append(f"{word} takes {len(takes)} arguments ({', '.join(takes)}), found {len(args)}")
    given = dict(zip(takes, args, strict=False))
    problems += [f"{word}: {name} is given twice" for name in named if name in given]
    given |= {name: value for name, value in named.items() if name in takes}
    values = []
    for name, default in takes.items():
        value = given.get(name, default)
        fault = f"{word}: {name} is missing" if value is _NEEDED else _fault(word, name, value)
        problems += [fault] if fault else []
        values.append(float(value) if name in ("tolerance", "value") and not fault else value)
    if problems:
        raise ConfigError(f"condition: {'; '.join(problems)}", problems=problems)
    return Condition(word, tuple(values))


def _fault(word: str, name: str, value: Any) -> str | None:
    """Return what is wrong with an argument."""
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) and value == value else None
    if name == "name" and (not isinstance(value, str) or not value):
        return f"{word}: found {value!r} for the name; expected the name of a figure, such as loss"
    least = 2 if name == "window" and word != "no_better" else 1
    if name in ("window", "count") and (number is None or number != int(number) or number < least):
        return f"{word}: found {value!r} for {name}; expected an integer from {least}"
    if name in ("tolerance", "value") and number is None:
        return f"{word}: found {value!r} for {name}; expected a number"
    if name == "tolerance" and number is not None and number <= 0:
        return f"{word}: found {value!r} for tolerance; expected more than 0"
    if name == "mode" and value not in MODES:
        return f"{word}: found {value!r} for mode{nearest(str(value), MODES)}; expected min or max"
    return None


def _bracketed(part: Any, around: str) -> str:
    inner = part.word if isinstance(part, Condition) else ""
    loose = (around == "not" and inner in ("and", "or")) or (around == "and" and inner == "or")
    return f"({part})" if loose else str(part)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return repr(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)
    if isinstance(value, str) and (not re.fullmatch(_NAME, value) or value in _RESERVED or _number(value) is not None):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return str(value)


# ---- as text ---------------------------------------------------------------------------------------------

_NAME = r"[^\s()=,'\"]+"
_RESERVED = ("and", "or", "not", "when")
_TOKEN = re.compile(rf"\s*(?:([()=,])|'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"|({_NAME}))")


def parse_condition(text: str) -> Condition:
    """Return the condition that a text says, such as ``stalled(loss, 3) and not improving(dev/f1, 2, mode=max)``.

    Names of figures need no quotes where they hold no spaces, commas, brackets or equals signs.

    Raises:
        ConfigError: it says none; the message has the place.
    """
    reader = _Reader(text)
    found = reader.either()
    if reader.token is not None:
        reader.fail("the end, or 'and' or 'or'")
    return found


@dataclass(frozen=True)
class _Token:
    text: str
    start: int
    kind: str  # "mark", "quoted" or "word"


def _tokens(text: str) -> Iterator[_Token]:
    place = 0
    while text[place:].strip():
        match = _TOKEN.match(text, place)
        if match is None:
            where = len(text) - len(text[place:].lstrip())
            raise ConfigError(f"condition {text!r}: found a quote that does not end, at {where + 1}", problems=[text])
        group = next(i for i in range(1, 5) if match[i] is not None)
        said = match[group]
        if group in (2, 3):
            said = re.sub(r"\\(.)", r"\1", said)
        yield _Token(said, match.start(group), {1: "mark", 4: "word"}.get(group, "quoted"))
        place = match.end()


class _Reader:
    """Reads one condition, token by token."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._rest = _tokens(text)
        self.token = next(self._rest, None)
        self.depth = 0

    def fail(self, expected: str) -> Any:
        found = "the end" if self.token is None else f"{self.token.text!r} at {self.token.start + 1}"
        raise ConfigError(f"condition {self.text!r}: found {found}; expected {expected}", problems=[self.text])

    def take(self, *texts: str) -> bool:
        """Go on after the next token if it is one of these."""
        if self.token is None or self.token.kind == "quoted" or self.token.text not in texts:
            return False
        self.token = next(self._rest, None)
        return True

    def either(self) -> Condition:
        found = [self.both()]
        while self.take("or"):
            found.append(self.both())
        return found[0] if len(found) == 1 else Condition("or", tuple(found))

    def both(self) -> Condition:
        found = [self.one()]
        while self.take("and"):
            found.append(self.one())
        return found[0] if len(found) == 1 else Condition("and", tuple(found))

    def one(self) -> Condition:
        self.depth += 1
        if self.depth > 50:
            self.fail("fewer brackets")
        try:
            if self.take("not"):
                return Condition("not", (self.one(),))
            if self.take("("):
                found = self.either()
                if not self.take(")"):
                    self.fail("')'")
                return found
            return self.question()
        finally:
            self.depth -= 1

    def question(self) -> Condition:
        token = self.token
        if token is None or token.kind != "word" or token.text not in QUESTIONS:
            hint = nearest(token.text, QUESTIONS) if token is not None and token.kind == "word" else ""
            self.fail(f"one of {', '.join(QUESTIONS)}{hint}")
        assert token is not None
        self.token = next(self._rest, None)
        if not self.take("("):
            self.fail("'('")
        args: list[Any] = []
        named: dict[str, Any] = {}
        while not self.take(")"):
            self.argument(args, named)
            if not self.take(","):
                if not self.take(")"):
                    self.fail("',' or ')'")
                break
        try:
            return _made(token.text, *args, **named)
        except ConfigError as fault:
            raise ConfigError(
                f"condition {self.text!r}: {'; '.join(fault.problems)}", problems=fault.problems
            ) from None

    def argument(self, args: list[Any], named: dict[str, Any]) -> None:
        token = self.token
        if token is None or token.kind == "mark":
            self.fail("a name or a number")
        assert token is not None
        self.token = next(self._rest, None)
        if token.kind == "word" and self.take("="):
            value = self.token
            if value is None or value.kind == "mark" or token.text in named:
                self.fail("a value, once")
            assert value is not None
            self.token = next(self._rest, None)
            named[token.text] = self.value(value)
            return
        if named:
            raise ConfigError(
                f"condition {self.text!r}: found {token.text!r} after an argument by name; expected it before",
                problems=[self.text],
            )
        args.append(self.value(token))

    def value(self, token: _Token) -> Any:
        number = _number(token.text) if token.kind == "word" else None
        return token.text if number is None else number


def _number(text: str) -> int | float | None:
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    try:
        return float(text) if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text) else None
    except ValueError:
        return None

"""Progress of long calls: a bar of rich in a terminal or notebook, a line every 30 seconds in a log.

    with Progress("predict", total=len(texts), unit="texts") as progress:
        for part in parts:
            ...
            progress.advance(len(part), loss=0.31)

Calls shorter than a second show nothing, nor do ranks other than the first, nor calls inside another one that is shown.
Everything goes to standard error. There is no thread: the display changes when the caller reports work.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self, TextIO

from flodl.verbosity import Verbosity, verbosity

_WORDING: ContextVar[Callable[[str], str]] = ContextVar("_WORDING", default=str)

AFTER_S = 1.0
"""Calls that end earlier show nothing."""
REDRAW_S = 0.1
LOG_FIRST_S, LOG_EVERY_S = 10.0, 30.0
"""Time of the first line of a log, and the longest time between two lines."""


def clock(seconds: float) -> str:
    """Return a duration: ``4 s``, ``3:07`` minutes, ``1:03:07`` hours."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    if whole < 60:
        return f"{whole} s"
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


@contextmanager
def worded(by: Callable[[str], str]) -> Iterator[None]:
    """Convert messages by a function in this block, for example to the options of a command line."""
    before = _WORDING.set(by)
    try:
        yield
    finally:
        _WORDING.reset(before)


def in_words(text: str) -> str:
    """Return a message as converted by `worded`."""
    return _WORDING.get()(text)


def is_wanted() -> bool:
    """Return whether the environment and the verbosity level allow progress where a call does not specify it."""
    return os.environ.get("FLODL_PROGRESS") not in ("0", "off", "no", "false") and verbosity() > Verbosity.QUIET


def count(number: float) -> str:
    """Return a number with at most three decimals and separators of thousands."""
    if isinstance(number, int) or (abs(number) >= 1000 and number == number):
        return f"{number:,.0f}"
    return f"{number:.3g}" if number and abs(number) < 0.1 else f"{number:.3f}".rstrip("0").rstrip(".")


def figures_of(figures: Mapping[str, Any]) -> list[str]:
    """Return values as ``name value``."""
    return [f"{name} {count(value) if isinstance(value, (int, float)) else value}" for name, value in figures.items()]


class Progress:
    """Progress of one long call; a context manager.

    Args:
        what: the call.
        total: amount of work; None if unknown. More work than this makes it unknown.
        unit: plural noun for the work, such as texts.
        done: work done before, for example by a resumed run.
        show: True also for short calls, False never, None for calls longer than a second, unless ``FLODL_PROGRESS=0``
            is in the environment or the verbosity level is quiet.
        stream: standard error if None.
        now: the clock, in seconds.
        started: time of the start by the clock; None for now.
    """

    def __init__(
        self,
        what: str,
        total: int | None = None,
        *,
        unit: str = "",
        done: int = 0,
        show: bool | None = None,
        stream: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
        started: float | None = None,
    ) -> None:
        self.what, self.total, self.unit, self.done = what, total, unit, done
        self.figures: dict[str, Any] = {}
        self._before, self._now, self._stream = done, now, stream
        self._started = now() if started is None else started
        is_hidden = show is False or os.environ.get("RANK", "0") != "0"
        self._is_silent = is_hidden or (show is None and not is_wanted())
        self._next = self._started + (0.0 if show else AFTER_S)
        self._display: _Bar | _Log | None = None

    def advance(self, by: int = 1, **figures: Any) -> None:
        """Report more work; ``figures`` (``loss=0.3``) are shown until they change."""
        self.update(self.done + by, **figures)

    def update(self, done: int | None = None, *, total: int | None = None, **figures: Any) -> None:
        """Report all work so far, or another total."""
        self.done = self.done if done is None else done
        self.total = self.total if total is None else total
        if self.total is not None and self.done > self.total:
            self.total = None
        self.figures.update(figures)
        if not self._is_silent and self._now() >= self._next:
            self._draw()

    def say(self, text: str) -> None:
        """Print a line above the progress."""
        if not self._is_silent:
            if self._display is None:
                self._draw()
            if self._display is not None:
                self._display.print(text)

    def close(self) -> None:
        """Remove the display; if something was shown, the last line reports the end."""
        if self._display is not None:
            self._display.draw(self, last=True)
        self._display, self._is_silent = None, True
        if _shown[-1:] == [self]:
            _shown.pop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._now() - self._started

    @property
    def rate(self) -> float | None:
        """Work per second; None before any work."""
        return (self.done - self._before) / self.elapsed if self.done > self._before and self.elapsed > 0 else None

    @property
    def left(self) -> float | None:
        """Seconds left; None if unknown."""
        return None if self.total is None or not self.rate else (self.total - self.done) / self.rate

    @property
    def text(self) -> str:
        """Everything on one line."""
        unit = f" {self.unit}" if self.unit else ""
        done = f"{count(self.done)}{unit}"
        if self.total:
            done = f"{count(self.done)} of {count(self.total)}{unit} ({100 * self.done / self.total:.0f} %)"
        parts = [done, *figures_of(self.figures), clock(self.elapsed)]
        if self.rate is not None:
            each = count(round(self.rate) if self.rate >= 10 else round(self.rate, 1))
            parts.append(f"{each}{unit}/s" if self.rate >= 1 else f"{count(1 / self.rate)} s each")
        if self.left is not None and self.left >= 0.5:
            parts.append(f"{clock(self.left)} left")
        return f"{self.what}: {', '.join(parts)}"

    def _draw(self) -> None:
        if self._display is None:
            if _shown:  # a call inside another one that is shown
                self._next = self._now() + AFTER_S
                return
            self._display = _display(self._stream or sys.stderr)
            _shown.append(self)
        self._display.draw(self, last=False)
        self._next = self._now() + self._display.every_s


_shown: list[Progress] = []
"""The call that is shown."""


def _display(stream: TextIO) -> _Bar | _Log:
    if not (stream.isatty() or "ipykernel" in sys.modules or "FORCE_COLOR" in os.environ):
        return _Log(stream)  # without importing rich
    state = random.getstate()  # rich draws random numbers at its import, and a run may be under way
    try:
        from rich.console import Console

        console = Console(file=stream, stderr=True)
        draws = console.is_jupyter or (console.is_terminal and not console.is_dumb_terminal)
        return _Bar(console) if draws else _Log(stream)
    except ImportError:
        return _Log(stream)
    finally:
        random.setstate(state)


class _Log:
    """A line after ten seconds, then less and less often."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self.every_s = stream, LOG_FIRST_S
        self._last: str | None = None
        self._is_first = True

    def draw(self, progress: Progress, *, last: bool) -> None:
        if (last and self._last not in (None, progress.text)) or not (last or self._is_first):
            self.print(progress.text)
            self.every_s = min(LOG_EVERY_S, 1.5 * self.every_s)
        self._is_first = False

    def print(self, text: str) -> None:
        self._last = text
        print(text, file=self._stream, flush=True)


class _Bar:
    """A bar of rich, drawn without a thread."""

    every_s = REDRAW_S

    def __init__(self, console: Any) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        columns = TextColumn("{task.description}"), BarColumn(bar_width=30), TextColumn("{task.fields[note]}")
        self._bar = Progress(*columns, console=console, auto_refresh=False)
        self._task: Any = self._bar.add_task("", note="")
        self._bar.start()

    def draw(self, progress: Progress, *, last: bool) -> None:
        from rich.markup import escape

        what, _, note = progress.text.partition(": ")
        self._bar.update(
            self._task, total=progress.total, completed=progress.done, refresh=True, description=escape(what),
            note=escape(note),
        )  # fmt: skip
        if last:
            self._bar.stop()

    def print(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)

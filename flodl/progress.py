"""How far a long call is: a bar in a terminal, HTML in a notebook, a line now and then in a log.

    with Progress("predict", total=len(texts), unit="texts") as progress:
        for part in parts:
            ...
            progress.advance(len(part), loss=0.31)

Nothing is shown of a call that is over before a second has passed, nor by ranks other than the first, nor of a call
inside another one that already shows something. Everything goes to standard error, so output stays output. Nothing
here has a thread of its own: what is shown changes when the caller says that work was done.
"""

from __future__ import annotations

import html
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from flodl.verbosity import Verbosity, verbosity

__all__ = ["Progress", "clock", "count", "in_words", "is_wanted", "worded"]

_WORDING: ContextVar[Callable[[str], str]] = ContextVar("_WORDING", default=str)

AFTER_S = 1.0
"""What is over by then shows nothing."""
REDRAW_S = 0.1
"""Between two changes of what people look at."""
LINE_FIRST_S = 10.0
LINE_EVERY_S = 30.0
"""When the first line of a log comes, and the most time between the others, which begin closer together."""


def clock(seconds: float) -> str:
    """Return a length of time for people: ``4 s``, ``3:07`` minutes, ``1:03:07`` hours."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


@contextmanager
def worded(by: Callable[[str], str]) -> Iterator[None]:
    """Have remarks said as ``by`` returns them while inside, such as in the words of a command line."""
    before = _WORDING.set(by)
    try:
        yield
    finally:
        _WORDING.reset(before)


def in_words(text: str) -> str:
    """Return a remark as it is to be said here; see `worded`."""
    return _WORDING.get()(text)


def is_wanted() -> bool:
    """Return whether the environment and the verbosity level allow progress where a call does not specify it."""
    return os.environ.get("FLODL_PROGRESS") not in ("0", "off", "no", "false") and verbosity() > Verbosity.QUIET


def count(number: float) -> str:
    """Return a number for people: at most three figures after the point, thousands apart."""
    if isinstance(number, int) or (abs(number) >= 1000 and number == number):
        return f"{number:,.0f}"
    return f"{number:.3g}" if number and abs(number) < 0.1 else f"{number:.3f}".rstrip("0").rstrip(".")


class _Screen(Protocol):
    """Where progress is seen."""

    every_s: float

    def draw(self, at: Progress, *, last: bool) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


class Progress:
    """How far one long call is; a context manager.

    Args:
        what: the call, as its user knows it.
        total: how much there is to do; None where nobody knows. What goes beyond it makes it unknown.
        unit: what is counted, in the plural.
        done: how much was done before, as by a run that goes on.
        show: True also shows a call that is over soon, False nothing, None what takes longer than ``after_s``.
            With ``FLODL_PROGRESS=0`` in the environment, or where the level is quiet (`flodl.verbosity`), None shows
            nothing either.
        after_s: seconds.
        stream: where to; None is standard error as it is at that time.
        now: the clock, in seconds.
    """

    def __init__(
        self,
        what: str,
        total: int | None = None,
        *,
        unit: str = "",
        done: int = 0,
        show: bool | None = None,
        after_s: float = AFTER_S,
        stream: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what, self.total, self.unit, self.done = what, total, unit, done
        self.figures: dict[str, Any] = {}
        self._before, self._now, self._stream = done, now, stream
        self._started = now()
        silent = show is False or os.environ.get("RANK", "0") != "0"
        self._silent = silent or (show is None and not is_wanted())
        self._next = self._started + (0.0 if show else after_s)
        self._screen: _Screen | None = None

    # --- what the caller says -------------------------------------------------------------------

    def advance(self, by: int = 1, **figures: Any) -> None:
        """Say that so much more is done; ``figures`` (``loss=0.3``) stand beside it until they change."""
        self.update(self.done + by, **figures)

    def update(self, done: int | None = None, *, total: int | None = None, **figures: Any) -> None:
        """Say how much is done in all, or that the total is another."""
        self.done = self.done if done is None else done
        self.total = self.total if total is None else total
        if self.total is not None and self.done > self.total:
            self.total = None
        self.figures.update(figures)
        if not self._silent and self._now() >= self._next:
            self._draw()

    def say(self, text: str) -> None:
        """Show a line that stays, such as the figures of an evaluation."""
        if not self._silent:
            if self._screen is None:
                self._draw()
            if self._screen is not None:
                self._screen.say(text)

    def close(self) -> None:
        """Take the display away; where something was shown, what is left says how it ended."""
        if self._screen is not None:
            self._screen.draw(self, last=True)
            self._screen.close()
        self._screen = None
        self._silent = True
        if _shown[-1:] == [self]:
            _shown.pop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- what is seen ---------------------------------------------------------------------------

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return self._now() - self._started

    @property
    def rate(self) -> float | None:
        """How much is done in a second; None before anything is."""
        return (self.done - self._before) / self.elapsed if self.done > self._before and self.elapsed > 0 else None

    @property
    def left(self) -> float | None:
        """Seconds that the rest will take; None where nobody knows."""
        return None if self.total is None or not self.rate else (self.total - self.done) / self.rate

    @property
    def text(self) -> str:
        """What is known, in one line."""
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
        if self._screen is None:
            if _shown:
                # A call inside of one that is seen; it may outlive it, as one that answers a stream does.
                self._next = self._now() + AFTER_S
                return
            self._screen = _screen(self._stream or sys.stderr)
            _shown.append(self)
        self._screen.draw(self, last=False)
        self._next = self._now() + self._screen.every_s


# The call that is seen now; one at a time, because a terminal has one last line.
_shown: list[Progress] = []


def figures_of(figures: Mapping[str, Any]) -> list[str]:
    """Return figures as ``name value``."""
    return [f"{name} {count(value) if isinstance(value, (int, float)) else value}" for name, value in figures.items()]


def _screen(stream: TextIO) -> _Screen:
    notebook = _notebook()
    if notebook is not None:
        return _Notebook(notebook)
    try:
        terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):
        terminal = False
    if not terminal:
        return _Log(stream)
    try:
        return _Rich(stream)
    except ImportError:
        return _Line(stream)


def _notebook() -> Any:
    """Return IPython's display module inside a notebook; nothing is imported that is not there already."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return sys.modules.get("IPython.display") if shell is not None and hasattr(shell, "kernel") else None


class _Log:
    """Lines, few: after ten seconds, then ever further apart up to half a minute."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.every_s = LINE_FIRST_S
        self._drawn = False
        self._said: str | None = None

    def draw(self, at: Progress, *, last: bool) -> None:
        # The first call comes after a second, which a log need not know.
        if last:
            if self._said not in (None, at.text):
                self.say(at.text)
            return
        if self._drawn:
            self.say(at.text)
            self.every_s = min(LINE_EVERY_S, 1.5 * self.every_s)
        self._drawn = True

    def say(self, text: str) -> None:
        self._said = text
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        pass


class _Line:
    """The last line of a terminal, written over."""

    every_s = REDRAW_S

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._wide = stream, 0

    def _put(self, text: str, end: str) -> None:
        self._stream.write("\r" + text.ljust(self._wide) + end)
        self._wide = len(text)
        self._stream.flush()

    def draw(self, at: Progress, *, last: bool) -> None:
        width = _columns() - 1
        self._text = at.text[:width]
        self._put(self._text, "\n" if last else "")

    def say(self, text: str) -> None:
        self._put(text, "\n")
        self._wide = 0
        self._put(getattr(self, "_text", ""), "")

    def close(self) -> None:
        pass


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError, AttributeError):
        return 80


class _Rich:
    """A bar of rich, drawn when there is news rather than by a thread."""

    every_s = REDRAW_S

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._bar = Progress(
            TextColumn("[bold]{task.description}"), BarColumn(bar_width=30), TextColumn("{task.fields[note]}"),
            console=Console(file=stream, stderr=True), auto_refresh=False,
        )  # fmt: skip
        self._task: Any = None
        self._bar.start()

    def draw(self, at: Progress, *, last: bool) -> None:
        from rich.markup import escape

        what, _, note = at.text.partition(": ")
        fields = {"total": at.total, "completed": at.done, "note": escape(note)}
        if self._task is None:
            self._task = self._bar.add_task(escape(what), **fields)
        else:
            self._bar.update(self._task, **fields)
        self._bar.refresh()

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._bar.stop()


class _Notebook:
    """HTML that replaces itself, which needs no widgets."""

    every_s = 0.25

    def __init__(self, display: Any) -> None:
        self._display, self._handle = display, None
        self._lines: list[str] = []
        self._bar = ""

    def draw(self, at: Progress, *, last: bool) -> None:
        share = f' value="{at.done}" max="{at.total}"' if at.total else ""
        self._bar = f'<progress{share} style="width:20em;vertical-align:middle"></progress> {html.escape(at.text)}'
        self._show()

    def say(self, text: str) -> None:
        self._lines.append(html.escape(text))
        self._show()

    def _show(self) -> None:
        lines = "".join(f"<div>{line}</div>" for line in self._lines)
        page = self._display.HTML(f'<div style="font-family:monospace">{lines}<div>{self._bar}</div></div>')
        if self._handle is None:
            self._handle = self._display.display(page, display_id=True)
        else:
            self._handle.update(page)

    def close(self) -> None:
        pass

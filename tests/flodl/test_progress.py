"""What a long call shows of itself: nothing at first, a bar for people, few lines for logs, HTML for notebooks."""

from __future__ import annotations

import io
import re
import sys
from typing import Any

import pytest

from flodl import progress as module
from flodl.progress import Progress, clock, count


class Clock:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def now() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def nothing_is_shown_before_or_after(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    yield
    assert module._shown == []


def work(progress: Progress, now: Clock, steps: int, seconds: float, by: int = 10, **figures: Any) -> None:
    for _ in range(steps):
        now.at += seconds
        progress.advance(by, **figures)


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_what_is_over_within_a_second_shows_nothing(now: Clock, stream: io.StringIO) -> None:
    with Progress("predict", 100, stream=stream, now=now) as progress:
        work(progress, now, 9, 0.1)
    assert stream.getvalue() == ""


def test_a_log_gets_few_lines_that_say_all(now: Clock) -> None:
    stream = io.StringIO()
    with Progress("predict", 10_000, unit="texts", stream=stream, now=now) as progress:
        work(progress, now, 100, 1.0, by=100, loss=0.25)
    lines = stream.getvalue().splitlines()
    assert 4 <= len(lines) <= 7
    assert lines[0] == "predict: 1,100 of 10,000 texts (11 %), loss 0.25, 11 s, 100 texts/s, 1:29 left"
    assert lines[-1] == "predict: 10,000 of 10,000 texts (100 %), loss 0.25, 1:40, 100 texts/s"
    assert "\r" not in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_a_log_is_told_the_end_once(now: Clock) -> None:
    stream = io.StringIO()
    with Progress("rows", 10, stream=stream, now=now) as progress:
        for done in (1, 2, 10):
            now.at += 20
            progress.update(done)
    lines = stream.getvalue().splitlines()
    assert len(lines) == len(set(lines)) == 2
    assert "10 of 10" in lines[-1]


def test_a_log_hears_nothing_of_what_takes_five_seconds(now: Clock) -> None:
    stream = io.StringIO()
    with Progress("predict", 50, stream=stream, now=now) as progress:
        work(progress, now, 5, 1.0)
    assert stream.getvalue() == ""


def test_a_terminal_shows_a_bar_from_the_first_second_on(now: Clock) -> None:
    stream = Terminal()
    with Progress("finetune [b]", 40, unit="steps", stream=stream, now=now) as progress:
        work(progress, now, 2, 1.0, loss=1.5)
        progress.say("evaluation: f1 0.5 [b]")
        work(progress, now, 2, 1.0)
    text = stream.getvalue()
    assert "finetune [b]" in text
    assert "40 of 40" in text
    assert "loss 1.5" in text
    assert re.search(r"evaluation: f1 0.5 \[b\] *\r?\n", text)


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_without_rich_or_cursor_control_a_terminal_gets_lines(
    now: Clock, term: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    if term == "xterm":
        monkeypatch.setitem(sys.modules, "rich.console", None)
    stream = Terminal()
    with Progress("predict", 40, stream=stream, now=now) as progress:
        work(progress, now, 4, 12.0)
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().splitlines()[-1].startswith("predict: 40 of 40 (100 %)")


@pytest.mark.parametrize(
    ("show", "environment", "seen"),
    [
        (False, {}, False),
        (None, {"FLODL_PROGRESS": "0"}, False),
        (True, {"FLODL_PROGRESS": "0"}, True),
        (None, {"RANK": "1"}, False),
        (True, {"RANK": "1"}, False),
        (None, {"RANK": "0"}, True),
        (None, {}, True),
    ],
)
def test_who_wants_none_gets_none(
    now: Clock, show: bool | None, environment: dict[str, str], seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = Terminal()
    with Progress("predict", 40, show=show, stream=stream, now=now) as progress:
        work(progress, now, 4, 1.0)
    assert bool(stream.getvalue()) is seen


def test_a_call_inside_of_another_is_silent_while_that_is_seen(now: Clock) -> None:
    stream = Terminal()
    with Progress("finetune", 40, stream=stream, now=now) as outer:
        work(outer, now, 2, 1.0)
        with Progress("predict", 40, stream=stream, now=now) as inner:
            work(inner, now, 4, 1.0)
    assert "predict" not in stream.getvalue()
    with Progress("predict", 40, stream=stream, now=now) as alone:
        work(alone, now, 4, 1.0)
    assert "predict" in stream.getvalue()


def test_totals_are_true(now: Clock) -> None:
    progress = Progress("read", 10, now=now, show=False)
    work(progress, now, 1, 1.0, by=5)
    assert (progress.rate, progress.left) == (5.0, 1.0)
    progress.advance(10)
    assert progress.total is None
    assert "of" not in progress.text
    progress.update(20, total=40)
    assert "20 of 40 (50 %)" in progress.text


def test_what_was_done_before_does_not_make_it_faster(now: Clock) -> None:
    progress = Progress("finetune", 100, done=90, now=now, show=False)
    work(progress, now, 5, 1.0, by=1)
    assert (progress.rate, progress.left) == (1.0, 5.0)


def test_a_fault_takes_the_display_away(now: Clock) -> None:
    stream = Terminal()

    def fails() -> None:
        with Progress("predict", 40, stream=stream, now=now) as progress:
            work(progress, now, 2, 1.0)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert "20 of 40" in stream.getvalue()
    assert module._shown == []


def test_times_and_numbers_are_for_people() -> None:
    assert [clock(s) for s in (0.4, 59, 61, 3787)] == ["0 s", "59 s", "1:01", "1:03:07"]
    assert [count(n) for n in (12_345, 2.5, 0.0312499, 1234.5, 0.0)] == ["12,345", "2.5", "0.0312", "1,234", "0"]

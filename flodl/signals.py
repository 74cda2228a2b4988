"""SIGTERM and SIGINT as a flag that a loop reads between steps, so that it can save and stop."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from flodl.errors import TrainInterrupted

REPEAT_S = 1.0
"""Two signals within this time count as one: a launcher forwards Ctrl-C to ranks that the terminal signals too."""


def stop_by(number: int, **about: Any) -> NoReturn:
    """Raise the exception for a signal.

    Args:
        number: the signal.
        **about: arguments of `TrainInterrupted`.

    Raises:
        TrainInterrupted: SIGINT; a plain KeyboardInterrupt without ``about``.
        SystemExit: another signal; the code is 128 plus its number.
    """
    if number == signal.SIGINT:
        raise TrainInterrupted(**about) if about else KeyboardInterrupt
    raise SystemExit(128 + number)


@contextlib.contextmanager
def handled_by(handler: Callable[[int, Any], Any]) -> Iterator[None]:
    """Handle SIGTERM and SIGINT by a function in this block; without effect outside of the main thread."""
    old: dict[int, Any] = {}
    with contextlib.suppress(ValueError):  # only the main thread may set handlers
        for number in (signal.SIGTERM, signal.SIGINT):
            old[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, before in old.items():
            signal.signal(number, before if before is not None else signal.SIG_DFL)


class StopSignals:
    """Context that records the first SIGTERM or SIGINT; a second one ends the process immediately.

    Attributes:
        number: the received signal, 0 for none.
    """

    def __init__(self) -> None:
        self.number = 0
        self._since = 0.0

    def __enter__(self) -> StopSignals:
        self._handled = handled_by(self._note)
        self._handled.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._handled.__exit__(*error)

    def _note(self, number: int, _frame: Any) -> None:
        if self.number and time.monotonic() - self._since > REPEAT_S:
            os._exit(128 + number)
        if not self.number:
            self.number, self._since = number, time.monotonic()

"""SIGTERM and SIGINT as a flag that a loop reads between steps, so that it can save and stop."""

from __future__ import annotations

import contextlib
import os
import signal
import time
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


class StopSignals:
    """Context that records the first SIGTERM or SIGINT; a second one ends the process immediately.

    Attributes:
        number: the received signal, 0 for none.
    """

    def __init__(self) -> None:
        self.number = 0
        self._since = 0.0
        self._old: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        with contextlib.suppress(ValueError):  # only the main thread may set handlers
            for number in (signal.SIGTERM, signal.SIGINT):
                self._old[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._old = {}

    def _note(self, number: int, _frame: Any) -> None:
        if self.number and time.monotonic() - self._since > REPEAT_S:
            os._exit(128 + number)
        if not self.number:
            self.number, self._since = number, time.monotonic()

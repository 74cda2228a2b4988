"""SIGTERM and SIGINT as a wish that the loop reads between steps, so that it can save and leave."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any, NoReturn

from flodl.errors import TrainInterrupted

__all__ = ["StopSignals", "stop_by"]

SETTLE_S = 1.0
"""A launcher passes a terminal's Ctrl-C on to ranks that got it themselves: twice within this time is once."""


def stop_by(number: int, **about: Any) -> NoReturn:
    """Leave because of a signal: Ctrl-C as Python reports it, another signal with the status of a shell.

    Args:
        number: of the signal.
        **about: attributes of the `TrainInterrupted`.

    Raises:
        TrainInterrupted: the signal is SIGINT and a run has ended; a plain KeyboardInterrupt without ``about``.
        SystemExit: another signal; the code is 128 and its number.
    """
    if number == signal.SIGINT:
        raise TrainInterrupted(**about) if about else KeyboardInterrupt
    raise SystemExit(128 + number)


class StopSignals:
    """Notes the first SIGTERM or SIGINT while entered; a second one ends the process at once.

    Attributes:
        number: the signal that came, 0 for none.
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
        if self.number and time.monotonic() - self._since > SETTLE_S:
            os._exit(128 + number)
        if not self.number:
            self.number, self._since = number, time.monotonic()

"""One request in its worker: whose it is, how long it may take, and results of its rows that it waits for.

Decides when nobody waits for an answer any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event, Semaphore
from typing import Any

from flodl_hf.errors import PredictError
from flodl_hf.inference.pending import Pending
from flodl_hf.serving.timeline import Timeline

__all__ = ["Awaited", "DeadlineError", "GivenUpError", "Ticket"]

_LATE = "the answer was not there in time; ask for less at once, or allow more time"
_GONE = "the request was given up"


def _nothing() -> None: ...


class DeadlineError(PredictError):
    """A request whose time was over before its answer was there."""


class GivenUpError(PredictError):
    """A request that its client gave up."""


@dataclass(eq=False)
class Ticket:
    """One request.

    Attributes:
        key: whose it is.
        until: when its time is over, by ``time.monotonic``.
        priority: 1 goes before others of its key, -1 behind them.
        gone: whether its client gave it up.
        tokens: tokens of all rows it has sent.
        rows: rows likewise.
        longest: most tokens of a row.
        dropped: tokens that were cut off.
        truncated: texts that they were cut off.
        waited_s: how long its rows waited before the first of them ran.
        timeline: when what happened, where it is traced.
        turn: held by its thread while that computes, and let go of while it waits for a batch.
        read_on: called when the device has what it needs: others may be read then.
    """

    key: str = ""
    until: float = float("inf")
    priority: int = 0
    gone: bool = False
    tokens: int = 0
    rows: int = 0
    longest: int = 0
    dropped: int = 0
    truncated: int = 0
    waited_s: float = 0.0
    timeline: Timeline | None = None
    turn: Semaphore | None = None
    read_on: Callable[[], None] = _nothing
    waits: list[Event] = field(default_factory=list)

    def count_truncated(self, texts: int, tokens: int) -> None:
        """Add texts that were truncated, and how many of their tokens were dropped."""
        self.truncated += texts
        self.dropped += tokens

    def give_up(self) -> None:
        """Let its rows leave the queue, and whoever waits for them go on."""
        self.gone = True
        for event in self.waits:
            event.set()

    @property
    def over(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self.gone or time.monotonic() > self.until

    def check(self) -> None:
        """Raise where nobody waits for the answer any more.

        Raises:
            GivenUpError: its client gave it up.
            DeadlineError: its time is over.
        """
        if self.gone:
            raise GivenUpError(_GONE)
        if self.over:
            raise DeadlineError(_LATE)


class Awaited(Pending):
    """Results that other threads bring.

    Args:
        rows: how many rows there are.
        ticket: whose they are.
    """

    def __init__(self, rows: int, ticket: Ticket) -> None:
        super().__init__(rows)
        self.left = rows
        self.here = Event()
        self._ticket = ticket
        ticket.waits.append(self.here)
        # Who gives the request up meanwhile sees this one, or is seen here.
        if not rows or ticket.gone:
            self.here.set()

    def parts(self) -> Any:
        """Return the results of each batch, when all are here.

        Raises:
            GivenUpError: the client gave the request up.
            DeadlineError: its time is over.
        """
        ticket = self._ticket
        if not self._arrives(max(0.0, min(ticket.until - time.monotonic(), 1e6))):
            raise DeadlineError(_LATE)
        if ticket.gone and self.left:
            raise GivenUpError(_GONE)
        if ticket.timeline is not None:
            ticket.timeline.arrived()
        return super().parts()

    def _arrives(self, seconds: float) -> bool:
        turn = self._ticket.turn
        if turn is None or self.here.is_set():
            return self.here.wait(seconds)
        turn.release()
        try:
            return self.here.wait(seconds)
        finally:
            turn.acquire()

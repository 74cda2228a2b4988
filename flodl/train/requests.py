"""Requests to a running run: stop, evaluate, save. Any process of the host may send them.

Requests travel with the flags that ranks exchange in each step, so all ranks act on them at the same step.
"""

from __future__ import annotations

from collections.abc import Sequence

from flodl.distributed.board import WISHES
from flodl.distributed.group import Ranks
from flodl.errors import TrainError
from flodl.signals import StopSignals

# Positions of two requests in `Requests.flags`.
EVALUATE, SAVE = 3, 4


class Requests:
    """The requests and the signal that this rank has received.

    Args:
        ranks: their shared board receives the requests.

    Attributes:
        signals: the signal that came.
        snapshots: whether another process has requested a snapshot.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._board, self._row = ranks.board, ranks.rank % ranks.board.world
        self._asked = self._board.requests_of(self._row)
        self.signals = StopSignals()
        self.snapshots = False
        self._done = [0.0] * (len(WISHES) + 1)  # the last one counts snapshots
        self._none = [0.0] * (2 + len(WISHES))

    def ask(self, request: str) -> None:
        """Add a request, from any thread.

        Raises:
            TrainError: an unknown request.
        """
        if request not in WISHES:
            raise TrainError(f"ask: found {request!r}; expected one of {', '.join(WISHES)}.", found=request)
        self._board.ask(self._row, request)

    def flags(self) -> list[float]:
        """Return 1 and the number for a signal, then 1 for each open request in the order of ``WISHES``."""
        number, asked = self.signals.number, self._asked[:]
        if not number and asked == self._done:
            return self._none
        *requests, self.snapshots = (a > d for a, d in zip(asked, self._done, strict=True))
        return [float(bool(number)), float(number), *map(float, requests)]

    def acknowledge(self, flags: Sequence[float]) -> None:
        """Mark the requests that all ranks act on now; ``flags`` has a number for each, 0 for none."""
        asked = self._asked[:]
        self._done[:-1] = [a if flag else d for a, d, flag in zip(asked, self._done, flags, strict=False)]

    def take_snapshots(self) -> int:
        """Return how many snapshots other processes have requested since the last call."""
        asked = self._asked[len(WISHES)]
        new, self._done[-1], self.snapshots = asked - self._done[-1], asked, False
        return round(new)

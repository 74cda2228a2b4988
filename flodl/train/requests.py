"""What a run is asked for while it goes on: to stop, to evaluate, to save. From this process or another of its host.

A wish travels with the flags that ranks exchange anyway, so all of them heed it at the same step.
"""

from __future__ import annotations

from collections.abc import Sequence

from flodl.distributed.board import WISHES
from flodl.distributed.group import Ranks
from flodl.errors import TrainError

__all__ = ["Wishes"]


class Wishes:
    """The wishes of one run, as this rank knows them.

    Args:
        ranks: whose board wishes are written on.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._board, self._row = ranks.board, ranks.rank % ranks.board.world

    def ask(self, wish: str) -> None:
        """Make a wish, from any thread.

        Raises:
            TrainError: none of `flodl.distributed.board.WISHES`.
        """
        if wish not in WISHES:
            raise TrainError(f"ask: found {wish!r}; expected one of {', '.join(WISHES)}.", found=wish)
        self._board.ask(self._row, wish)

    def flags(self) -> list[float]:
        """Return 1 for each wish that is to be heeded, in the order of ``WISHES``."""
        return [float(wish) for wish in self._board.open_wishes(self._row)]

    def heed(self, flags: Sequence[float]) -> None:
        """Be told which wishes all ranks heed now."""
        self._board.did(self._row, flags)

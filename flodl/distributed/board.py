"""Phase, step and pulse of each rank in shared memory, readable after the rank died; and requests to the run.

A rank writes; the launcher reads, or under torchrun the other ranks. A phase is a number in memory, so it survives
SIGKILL.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from multiprocessing.context import BaseContext
from typing import Any

from flodl.errors import TrainError
from flodl.signals import StopSignals

PHASES = (
    "spawn",
    "rendezvous",
    "model build",
    "first broadcast",
    "data",
    "forward",
    "backward",
    "reduce",
    "optimiser",
    "averaging",
    "checkpoint",
    "evaluation",
    "callback",
    "shutdown",
    "done",
)
PHASE_NUMBERS = {phase: number for number, phase in enumerate(PHASES)}
WISHES = ("stop", "evaluate", "save")
"""Requests that another process of the host can send to a rank."""
CELLS = 4 + len(WISHES)  # pulse, phase, step, the number of requests of each kind, and of snapshots


class Board:
    """One row for each rank with pulse, phase, step and requests, in memory that all local processes share.

    Args:
        world: number of ranks.
        cells: the shared array; None creates a private one.
    """

    def __init__(self, world: int, cells: Any = None) -> None:
        self.world = world
        self.cells = cells if cells is not None else (ctypes.c_double * (CELLS * world))()

    @classmethod
    def shared(cls, world: int, context: BaseContext) -> Board:
        """Return a board that can be passed to a child process."""
        return cls(world, context.Array(ctypes.c_double, CELLS * world, lock=False))

    @classmethod
    def to_be_mapped(cls, world: int) -> tuple[Board, int | None]:
        """Return a board that any process of the host can map, and its descriptor; None if that is impossible."""
        if not hasattr(os, "memfd_create") or not os.path.isdir("/proc/self/fd"):
            return cls(world), None
        descriptor, size = os.memfd_create("flodl-board"), cls.bytes_of(world)
        os.ftruncate(descriptor, size)
        return cls(world, (ctypes.c_double * (CELLS * world)).from_buffer(mmap.mmap(descriptor, size))), descriptor

    @staticmethod
    def bytes_of(world: int) -> int:
        """Return the bytes of the cells of ``world`` ranks."""
        return CELLS * world * ctypes.sizeof(ctypes.c_double)

    def beat(self, rank: int) -> None:
        """Record that ``rank`` is alive now, by the monotonic clock of the host."""
        self.cells[CELLS * rank] = time.monotonic()

    def phase(self, rank: int) -> str:
        """Return the last phase that ``rank`` entered."""
        return PHASES[int(self.cells[CELLS * rank + 1])]

    def step(self, rank: int) -> int:
        """Return the last step that ``rank`` entered."""
        return int(self.cells[CELLS * rank + 2])

    def ask(self, rank: int, wish: str) -> None:
        """Request one of `WISHES` of ``rank``, which acts on it at its next step."""
        self.cells[CELLS * rank + 3 + WISHES.index(wish)] += 1

    def progress_of(self, rank: int) -> Any:
        """Return the shared array of the number of the phase of ``rank``, and its step."""
        offset = (CELLS * rank + 1) * ctypes.sizeof(ctypes.c_double)
        return (ctypes.c_double * 2).from_buffer(self.cells, offset)

    def requests_of(self, rank: int) -> Any:
        """Return the shared array of how many times each of `WISHES`, and then a snapshot, was requested."""
        offset = (CELLS * rank + 3) * ctypes.sizeof(ctypes.c_double)
        return (ctypes.c_double * (len(WISHES) + 1)).from_buffer(self.cells, offset)

    def ask_snapshot(self, rank: int) -> None:
        """Request the weights of ``rank``."""
        self.cells[CELLS * rank + 3 + len(WISHES)] += 1

    def silence_s(self, rank: int) -> float:
        """Return the seconds since the last pulse of ``rank``; 0 before its first."""
        beat = self.cells[CELLS * rank]
        return max(0.0, time.monotonic() - beat) if beat else 0.0


# Positions of two requests in `Requests.flags`.
EVALUATE, SAVE = 3, 4


class Requests:
    """The requests and the signal that this rank has received.

    Args:
        board: the shared board, which receives the requests.
        rank: this rank.

    Attributes:
        signals: the signal that came.
        snapshots: whether another process has requested a snapshot.
    """

    def __init__(self, board: Board, rank: int) -> None:
        self._board, self._row = board, rank % board.world
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

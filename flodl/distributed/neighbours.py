"""The other ranks of this host: whether their processes live or stand still, and what each was doing.

For ranks that a launcher such as torchrun has started: nobody there shares memory with them or looks after them while
they wait for each other. Each rank keeps its row of the board in memory that has a descriptor, which its neighbours map
through ``/proc``; so a phase and a step can be read of a process that was killed. Where there is no ``/proc`` there are
no neighbours, and what a rank last wrote into the store has to do.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from flodl.distributed.board import Board
from flodl.system import process_state

__all__ = ["Neighbours"]


@dataclass
class _Neighbour:
    pid: int
    board: Board | None
    still_since: float | None = None
    gone_since: float | None = None


@dataclass
class Neighbours:
    """What is known of the other ranks of this host.

    Args:
        rank: own number.
        world: how many ranks there are on all hosts.
        descriptor: of this rank's own board.
    """

    rank: int
    world: int
    descriptor: int | None = None
    _known: dict[int, _Neighbour] = field(default_factory=dict)

    def address(self) -> str:
        """Return where others find this rank, for the store."""
        return f"{socket.gethostname()}|{os.getpid()}|{-1 if self.descriptor is None else self.descriptor}"

    def look_for(self, store: Any, prefix: str) -> None:
        """Map the boards of the ranks that have said where they are."""
        for rank in range(self.world):
            if rank == self.rank or rank in self._known or not store.check([f"{prefix}/{rank}"]):
                continue
            host, pid, descriptor = store.get(f"{prefix}/{rank}").decode().split("|")
            if host == socket.gethostname() and process_state(int(pid)) is not None:
                self._known[rank] = _Neighbour(int(pid), _mapped(int(pid), int(descriptor), self.world))

    @property
    def complete(self) -> bool:
        """Whether every other rank is known."""
        return len(self._known) == self.world - 1

    def dead(self) -> dict[int, str]:
        """Return the ranks whose process is no more, and what each did last."""
        return {
            rank: f"its process ended {self._doing(rank)}, pid {there.pid}"
            for rank, there in self._known.items()
            if process_state(there.pid) in (None, "Z", "X")
        }

    def ended(self, after_s: float) -> dict[int, str]:
        """Return the ranks that ended so long ago without being done, and what each did last."""
        now, dead, found = time.monotonic(), self.dead(), {}
        for rank, why in dead.items():
            there = self._known[rank]
            if there.board is not None and there.board.phase(rank) == "done":
                continue
            there.gone_since = there.gone_since or now
            if now - there.gone_since >= after_s:
                found[rank] = why
        return found

    def frozen(self, after_s: float) -> dict[int, str]:
        """Return the ranks that the system has stopped for so long, and what each was doing."""
        now, found = time.monotonic(), {}
        for rank, there in self._known.items():
            if process_state(there.pid) not in ("T", "t"):
                there.still_since = None
            elif there.still_since is None:
                there.still_since = now
            elif now - there.still_since >= after_s:
                why = f"frozen (stopped by a signal or a debugger) for {now - there.still_since:.1f} s"
                found[rank] = f"{why} {self._doing(rank)}, pid {there.pid}"
        return found

    def pid(self, rank: int) -> int:
        """Return the process of a neighbour."""
        return self._known[rank].pid

    def _doing(self, rank: int) -> str:
        board = self._known[rank].board
        return "" if board is None else f"in phase '{board.phase(rank)}', step {board.step(rank)}"


def _mapped(pid: int, descriptor: int, world: int) -> Board | None:
    """Return the board of another process, to be read even after it ended."""
    with contextlib.suppress(OSError, ValueError):
        opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY)
        try:
            size = Board.bytes_of(world)
            memory = mmap.mmap(opened, size, prot=mmap.PROT_READ)
        finally:
            os.close(opened)
        return Board(world, memoryview(memory).cast("d"))
    return None

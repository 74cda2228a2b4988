"""Detection of lost ranks: a pulse of this process, and the processes of other ranks on this host.

Every rank writes a pulse to its board and to the store of the run. A launcher such as torchrun shares no memory between
ranks and does not notice ranks that wait for each other. So each rank stores its row of the board in memory with a
descriptor, which the other ranks of the host map through ``/proc``; phase and step of a killed process stay readable.
Without ``/proc`` only the last pulse in the store is known.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from flodl.distributed.board import Board
from flodl.errors import visible
from flodl.system import hard_stop, process_state

PULSE_S = 0.5
LOOK_S = 0.25
ENDED_S = 0.6
"""Time after the end of another rank's process at which a rank on a GPU leaves; the rank reports its error earlier."""


@dataclass
class _Peer:
    rank: int
    pid: int
    board: Board | None
    stopped_since: float | None = None
    gone_since: float | None = None

    def __str__(self) -> str:
        board, rank = self.board, self.rank
        return "" if board is None else f"in phase '{board.phase(rank)}', step {board.step(rank)}"


class LocalPeers:
    """The other ranks of this host.

    Args:
        rank: number of this rank.
        world: number of ranks on all hosts.
        descriptor: descriptor of this rank's board.
    """

    def __init__(self, rank: int, world: int, descriptor: int | None = None) -> None:
        self.rank, self.world, self.descriptor = rank, world, descriptor
        self._known: dict[int, _Peer] = {}

    def address(self) -> str:
        """Return host, process and descriptor of this rank, for the store."""
        return f"{socket.gethostname()}|{os.getpid()}|{-1 if self.descriptor is None else self.descriptor}"

    def look_for(self, store: Any, prefix: str) -> None:
        """Map the boards of the ranks whose address is in the store."""
        for rank in range(self.world):
            if rank == self.rank or rank in self._known or not store.check([f"{prefix}/{rank}"]):
                continue
            host, pid, descriptor = store.get(f"{prefix}/{rank}").decode().split("|")
            if host == socket.gethostname() and process_state(int(pid)) is not None:
                self._known[rank] = _Peer(rank, int(pid), _mapped(int(pid), int(descriptor), self.world))

    @property
    def complete(self) -> bool:
        """True if every other rank is known."""
        return len(self._known) == self.world - 1

    def dead(self) -> dict[int, str]:
        """Return the ranks whose process ended, and their last phase and step."""
        return {
            rank: f"its process ended {peer}, pid {peer.pid}"
            for rank, peer in self._known.items()
            if process_state(peer.pid) in (None, "Z", "X")
        }

    def ended(self, after_s: float) -> dict[int, str]:
        """Return the ranks whose process ended this long ago before its work was done, and their last phase."""
        now, lost = time.monotonic(), {}
        for rank, why in self.dead().items():
            peer = self._known[rank]
            peer.gone_since = peer.gone_since or now
            if now - peer.gone_since >= after_s and (peer.board is None or peer.board.phase(rank) != "done"):
                lost[rank] = why
        return lost

    def frozen(self, after_s: float) -> dict[int, str]:
        """Return the ranks that the system has stopped for this long, and their phase."""
        now, found = time.monotonic(), {}
        for rank, peer in self._known.items():
            if process_state(peer.pid) not in ("T", "t"):
                peer.stopped_since = None
            elif peer.stopped_since is None:
                peer.stopped_since = now
            elif now - peer.stopped_since >= after_s:
                why = f"frozen (stopped by a signal or a debugger) for {now - peer.stopped_since:.1f} s"
                found[rank] = f"{why} {peer}, pid {peer.pid}"
        return found

    def stop(self, rank: int) -> None:
        """End the process of another rank."""
        with contextlib.suppress(OSError):
            os.kill(self._known[rank].pid, hard_stop())


def _mapped(pid: int, descriptor: int, world: int) -> Board | None:
    """Return the board of another process, which stays readable after the process ended."""
    with contextlib.suppress(OSError, ValueError):
        opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY)
        try:
            memory = mmap.mmap(opened, Board.bytes_of(world), prot=mmap.PROT_READ)
        finally:
            os.close(opened)
        return Board(world, memoryview(memory).cast("d"))
    return None


class PeerWatch:
    """A thread that writes the pulse of this rank, and ends the process if its parent or another rank is lost.

    Args:
        ranks: this rank (`flodl.distributed.Ranks`); its store receives the pulse.
        parent: process number of the launcher; None without one.
    """

    def __init__(self, ranks: Any, parent: int | None) -> None:
        self.ranks, self.parent, self._forked_by = ranks, parent, os.getppid()
        self._count = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flodl-pulse", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        ranks, near = self.ranks, self.ranks._peers
        beats = 0.0
        while True:
            now = time.monotonic()
            if now >= beats:
                beats = now + PULSE_S
                self._beat()
            if near is not None:
                # Gloo's connections break with a process; a kernel of NCCL waits for it, and so does its caller.
                ended = near.ended(ENDED_S) if ranks.device.type == "cuda" else {}
                frozen = near.frozen(ranks.frozen_after_s)
                if (ended or frozen) and not self._ended.is_set():
                    leave(ranks, ended, frozen)
            if self._ended.wait(LOOK_S if near is not None else PULSE_S):
                return

    def _beat(self) -> None:
        ranks, row = self.ranks, self.ranks.row
        ranks.board.beat(row)
        gone = os.getppid() != self._forked_by
        if self.parent is not None and (gone or process_state(self.parent) in (None, "Z", "X")):
            os._exit(1)  # the launcher is dead
        if ranks.store is None:
            return
        self._count += 1
        state = f"{self._count}|{ranks.board.phase(row)}|{ranks.board.step(row)}|{os.getpid()}|{socket.gethostname()}"
        with contextlib.suppress(Exception):  # the collective reports a lost store
            ranks.store.set(f"pulse/{ranks.attempt}/{ranks.rank}", state)
            if ranks._peers is not None and not ranks._peers.complete:
                ranks._peers.look_for(ranks.store, f"place/{ranks.attempt}")

    def silent_peers(self, watch_s: float = 1.6) -> dict[int, str]:
        """Return the ranks that are dead or whose pulse does not change for ``watch_s``, with their last phase."""
        store, near = self.ranks.store, self.ranks._peers
        if near is not None:
            # The connection may break a moment before the process ends.
            until = time.monotonic() + 0.3
            while not (dead := near.dead()) and time.monotonic() < until:
                time.sleep(0.01)
            if dead:
                return dead
        keys = {r: f"pulse/{self.ranks.attempt}/{r}" for r in range(self.ranks.world) if r != self.ranks.rank}
        try:
            before = {r: store.get(k).decode() for r, k in keys.items() if store.check([k])}
            self._ended.wait(watch_s)
            after = {r: store.get(k).decode() for r, k in keys.items() if store.check([k])}
        except Exception as error:  # the store is in rank 0 or in the agent
            return {0: f"the store does not answer ({type(error).__name__}); its host is lost"}
        silent = {}
        for rank, text in after.items():
            if before.get(rank) == text:
                _, phase, step, pid, host = text.split("|")
                silent[rank] = f"no pulse, last seen in phase '{phase}', step {step}, pid {pid} on {host}"
        return silent

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join(timeout=2)


def leave(ranks: Any, ended: dict[int, str], frozen: dict[int, str]) -> None:
    """End this process and frozen ones: a process that waits in a collective cannot be interrupted."""
    who = "; ".join(f"rank {rank}: {what}" for rank, what in sorted((ended | frozen).items()))
    board = ranks.board
    print_fault(
        f"rank {ranks.rank} of {ranks.world}, phase '{board.phase(ranks.row)}', step {board.step(ranks.row)}: {who}. "
        "Expected all ranks to run; this rank and any frozen ones end now. Start again with resume to continue from "
        "the last checkpoint."
    )
    for rank in frozen:
        ranks._peers.stop(rank)  # type: ignore[union-attr]
    os._exit(1)


def print_fault(text: str) -> None:
    """Write one line to standard error."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(visible(text).replace("\n", " ") + "\n")
        sys.stderr.flush()

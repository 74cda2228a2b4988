"""The ranks of one run as a process sees them: who am I, how many are we, and the few collectives we use.

Everything goes through `torch.distributed`; with one rank every operation is the identity and no
process group exists. What is sent, when and why is decided elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, rendezvous  # pyright: ignore[reportPrivateImportUsage]

from flodl.devices import pick_device
from flodl.distributed.board import Board
from flodl.distributed.neighbours import Neighbours
from flodl.errors import TrainError, visible
from flodl.system import hard_stop

__all__ = ["Ranks", "Summed", "is_first_rank", "join_ranks", "launched_world", "under_torchrun"]

PULSE_S = 0.5
LOOK_S = 0.25
ENDED_S = 0.6
"""How long a neighbour's process may be gone before a rank on a GPU leaves; what it says itself comes before that."""
FROZEN_S = 1.2
"""How long a rank may be stopped before the others give it up; with what comes before it they know within 2 s."""


@dataclass(frozen=True)
class Summed:
    """Transport by which the ranks of a run sum gradients.

    Attributes:
        by: ``"peer memory"`` (two GPUs write into each other's memory), ``"NCCL"`` or ``"gloo"``.
        reason: why a faster transport is not used; None if there is none.
    """

    by: str
    reason: str | None = None

    def __str__(self) -> str:
        return self.by if self.reason is None else f"{self.by}: {self.reason}"


@dataclass
class Ranks:
    """This process among its peers.

    Attributes:
        rank: own number, 0 is the one that writes files and reports.
        world: how many there are.
        local_rank: own number on this host.
        device: where this rank computes.
        store: key-value store that all ranks share; None with one rank.
        board: what each rank of this host is doing.
        attempt: how many times the run has been restarted.
        frozen_after_s: how long another rank of this host may be stopped before it is given up.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    store: Any = None
    board: Board = field(default_factory=lambda: Board(1))
    attempt: int = 0
    pipe: Any = None
    frozen_after_s: float = FROZEN_S
    _neighbours: Neighbours | None = None
    _pulse: _Pulse | None = None
    _own_group: bool = False

    @property
    def solo(self) -> bool:
        """Whether this is the only rank."""
        return self.world == 1

    def phase(self, phase: str, step: int | None = None) -> None:
        """Record what this rank begins to do, for the report if it dies."""
        self.board.enter(self.rank % self.board.world, phase, step)

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace ``tensor`` by its sum over ranks, in place, and return it."""
        if not self.solo:
            with self.peer_failures_named():
                dist.all_reduce(tensor)
        return tensor

    def sum_async(self, tensor: torch.Tensor) -> Any:
        """Start `sum_` and return its handle (``is_completed()``, ``wait()``), None with one rank."""
        return None if self.solo else dist.all_reduce(tensor, async_op=True)

    def copy_from(self, source: int, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite ``tensors`` by those of rank ``source``."""
        if not self.solo:
            with self.peer_failures_named():
                for tensor in tensors:
                    dist.broadcast(tensor, source)

    def table(self, row: Sequence[float]) -> list[list[float]]:
        """Return the rows that all ranks gave, by rank; every row must have the same length."""
        if self.solo:
            return [[float(value) for value in row]]
        cells = torch.zeros(self.world, len(row), dtype=torch.float64)
        cells[self.rank] = torch.tensor(row, dtype=torch.float64)
        if not dist.get_backend().startswith("nccl"):
            return self.sum_(cells).tolist()
        return self.sum_(cells.to(self.device)).cpu().tolist()

    def tell(self, value: Any, source: int = 0) -> Any:
        """Return the JSON value that rank ``source`` gave, on every rank."""
        if self.solo:
            return value
        text = json.dumps(value).encode() if self.rank == source else b""
        [size] = self.table([len(text)])[source]
        data = torch.zeros(int(size), dtype=torch.uint8)
        if self.rank == source:
            data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        if dist.get_backend().startswith("nccl"):
            data = data.to(self.device)
        self.copy_from(source, [data])
        return json.loads(data.cpu().numpy().tobytes())

    def gather(self, value: Any) -> list[Any]:
        """Return the JSON values of all ranks, by rank, on every rank."""
        return [self.tell(value, source) for source in range(self.world)]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.table([1.0])

    def leave(self) -> None:
        """Stop the pulse and take the process group down."""
        self.phase("done")
        if self._pulse is not None:
            self._pulse.stop()
        if self._own_group and dist.is_initialized():
            dist.destroy_process_group()

    @contextlib.contextmanager
    def peer_failures_named(self) -> Iterator[None]:
        """Turn the transport's error (a port number) into one that names the rank that went silent."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if isinstance(error, TrainError) or not _is_lost_peer(error):
                raise
            lost = self._pulse.silent_peers() if self._pulse is not None else {}
            who = "; ".join(f"rank {r}: {what}" for r, what in lost.items()) or "a peer that cannot be named"
            fault = TrainError(
                f"rank {self.rank}, step {self.board.step(self.rank % self.board.world)}: "
                f"lost contact in a collective with {who}. Expected all {self.world} ranks to take part. "
                "See the log of that rank for the cause; start again with resume to go on from "
                f"the last checkpoint. Transport said: {error}",
                rank=self.rank,
                lost=sorted(lost),
                cause=str(error),
            )
            if self._neighbours is not None:
                _say(fault.message)  # at once: the launcher may end this process before the error is shown
            raise fault from error


def _is_lost_peer(error: BaseException) -> bool:
    text = str(error).lower()
    signs = ("connection", "closed by peer", "reset by peer", "timed out", "timeout", "broken pipe", "gloo", "nccl")
    return isinstance(error, dist.DistError) or any(sign in text for sign in signs)


class _Pulse:
    """A thread that says "alive" twice a second and leaves when the parent is gone."""

    def __init__(self, ranks: Ranks, parent: int | None) -> None:
        self.ranks, self.parent = ranks, parent
        self._last: dict[int, str] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flodl-pulse", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        ranks, near = self.ranks, self.ranks._neighbours
        beats = 0.0
        while True:
            now = time.monotonic()
            if now >= beats:
                beats = now + PULSE_S
                ranks.board.beat(ranks.rank % ranks.board.world)
                if self.parent is not None and os.getppid() != self.parent:
                    os._exit(1)  # an orphan must not go on computing for nobody
                if ranks.store is not None:
                    with contextlib.suppress(Exception):  # a store that is gone is the collective's error to report
                        ranks.store.set(f"pulse/{ranks.attempt}/{ranks.rank}", self._state())
                        if near is not None and not near.complete:
                            near.look_for(ranks.store, f"place/{ranks.attempt}")
            lost, frozen = self._lost(near) if near is not None else ({}, {})
            if (lost or frozen) and not self._ended.is_set():
                _leave_the_lost(ranks, lost, frozen)
            if self._ended.wait(LOOK_S if near is not None else PULSE_S):
                return

    def _lost(self, near: Neighbours) -> tuple[dict[int, str], dict[int, str]]:
        """Return the neighbours to be given up: those that ended where no collective says so, and those that freeze."""
        # Gloo's connections break with a process; a kernel of NCCL waits for it, and the caller with the kernel.
        ended = near.ended(ENDED_S) if self.ranks.device.type == "cuda" else {}
        return ended, near.frozen(self.ranks.frozen_after_s)

    def _state(self) -> str:
        board, row = self.ranks.board, self.ranks.rank % self.ranks.board.world
        self._count = getattr(self, "_count", 0) + 1
        return f"{self._count}|{board.phase(row)}|{board.step(row)}|{os.getpid()}|{socket.gethostname()}"

    def silent_peers(self, watch_s: float = 1.6) -> dict[int, str]:
        """Return what is known of the ranks whose pulse does not move while we watch."""
        store, attempt, near = self.ranks.store, self.ranks.attempt, self.ranks._neighbours
        if near is not None:
            # What broke the line may be a moment ahead of the end of its process.
            until = time.monotonic() + 0.3
            while not (dead := near.dead()) and time.monotonic() < until:
                time.sleep(0.01)
            if dead:
                return dead
        keys = {r: f"pulse/{attempt}/{r}" for r in range(self.ranks.world) if r != self.ranks.rank}
        try:
            before = {r: store.get(k).decode() for r, k in keys.items() if store.check([k])}
            self._ended.wait(watch_s)
            after = {r: store.get(k).decode() for r, k in keys.items() if store.check([k])}
        except Exception as error:  # the store lives in rank 0 or the agent
            return {0: f"the store does not answer ({type(error).__name__}), its host is gone"}
        silent = {}
        for rank, text in after.items():
            if before.get(rank) == text:
                _, phase, step, pid, host = text.split("|")
                silent[rank] = f"no pulse, last seen in phase '{phase}', step {step}, pid {pid} on {host}"
        return silent

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(timeout=2)


def _leave_the_lost(ranks: Ranks, ended: dict[int, str], frozen: dict[int, str]) -> None:
    """End this process, and those that stand still: whoever waits for them in a collective cannot be called back."""
    who = "; ".join(f"rank {rank}: {what}" for rank, what in sorted((ended | frozen).items()))
    row = ranks.rank % ranks.board.world
    _say(
        f"rank {ranks.rank} of {ranks.world}, phase '{ranks.board.phase(row)}', step {ranks.board.step(row)}: {who}. "
        "Expected all ranks to go on; this rank and any frozen ones end now. Start again with resume to go on from the "
        "last checkpoint."
    )
    for rank in frozen:
        with contextlib.suppress(OSError):
            os.kill(ranks._neighbours.pid(rank), hard_stop())  # type: ignore[union-attr]
    os._exit(1)


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(visible(text).replace("\n", " ") + "\n")
        sys.stderr.flush()


def under_torchrun() -> bool:
    """Return whether a launcher has already given this process its rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launched_world(alone: int = 1) -> int:
    """Return the number of ranks that a launcher started; ``alone`` without a launcher."""
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else alone


def is_first_rank() -> bool:
    """Return whether this process is the one that writes and reports: rank 0 of a launcher's, or alone."""
    return not under_torchrun() or os.environ["RANK"] == "0"


_launcher: list[Any] = []  # the store of the launcher; opened once, since its master's port is taken then
_joined = 0


def _store_of_launcher(rank: int, world: int, attempt: int, limit: timedelta) -> Any:
    """Return a store of this run's own, within that which the launcher's environment names.

    After a restart, and from the second run of a process on, the launcher's store still has the addresses and words
    of those before: each run has a prefix of its own, the same on all ranks, which begin their runs in one order.
    """
    global _joined
    if not _launcher:
        _launcher.append(next(iter(rendezvous("env://", rank, world, timeout=limit)))[0])
    _launcher[0].set_timeout(limit)
    _joined += 1
    return PrefixStore(f"attempt{attempt}/run{_joined}", _launcher[0])


def join_ranks(
    *,
    rank: int = 0,
    world: int = 1,
    local_rank: int = 0,
    device: str | torch.device | None = None,
    store: Any = None,
    board: Board | None = None,
    attempt: int = 0,
    parent: int | None = None,
    timeout_s: float = 600.0,
    frozen_after_s: float = FROZEN_S,
) -> Ranks:
    """Return this process's `Ranks` with the process group up; the group is left by ``Ranks.leave``.

    Under torchrun (or any launcher that sets ``RANK`` and ``WORLD_SIZE``) call it without arguments.
    CPU tensors always travel by gloo; CUDA tensors by NCCL.

    Args:
        timeout_s: how long a collective waits for a peer that is alive before it gives up.
        frozen_after_s: how long another rank of this host may be stopped before this one ends.
    """
    if store is None and under_torchrun():
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    chosen = pick_device(device, local_rank)
    descriptor = None
    launched = store is None and board is None and world > 1
    if launched:
        board, descriptor = Board.to_be_mapped(world)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if world == 1:
        return Ranks(0, 1, 0, chosen, board=board or Board(1), attempt=attempt)
    ranks = Ranks(
        rank, world, local_rank, chosen, board=board or Board(world), attempt=attempt, frozen_after_s=frozen_after_s
    )
    ranks.phase("rendezvous")
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    if chosen.type == "cuda":
        # Sums that run beside a backward pass go first, or they would wait until it is over.
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
        # A capture that fails on one rank must not leave the others waiting for its buffers.
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    if store is None:
        store = _store_of_launcher(rank, world, attempt, timedelta(seconds=timeout_s))
    if not dist.is_initialized():
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))
        ranks._own_group = True
    ranks.store = PrefixStore("flodl", store)
    if launched:
        ranks._neighbours = Neighbours(rank, world, descriptor)
        ranks.store.set(f"place/{attempt}/{rank}", ranks._neighbours.address())
    ranks._pulse = _Pulse(ranks, parent)
    return ranks

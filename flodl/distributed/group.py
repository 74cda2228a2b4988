"""The ranks of one run from the view of one process: its number, their number, and a few collectives.

All communication uses `torch.distributed`; with one rank every operation is the identity and no process group exists.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, rendezvous  # pyright: ignore[reportPrivateImportUsage]

from flodl.devices import pick_device
from flodl.distributed.board import PHASE_NUMBERS, Board
from flodl.distributed.peers import LocalPeers, PeerWatch, print_fault
from flodl.errors import TrainError

FROZEN_S = 1.2
"""How long a rank may be stopped before the others end; they detect it within 2 s."""


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
    """This process among the ranks of a run.

    Attributes:
        rank: number of this rank; rank 0 writes files and reports.
        world: number of ranks.
        local_rank: number on this host.
        device: device of this rank.
        store: key-value store that all ranks share; None with one rank.
        board: phases and steps of the ranks of this host.
        attempt: number of restarts of the run.
        frozen_after_s: how long another rank of this host may be stopped before this one ends.
        solo: True if this is the only rank.
        progress: shared array of the number of the current phase and the step.
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
    _peers: LocalPeers | None = None
    _watch: PeerWatch | None = None
    _own_group: bool = False
    solo: bool = field(init=False)
    progress: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.solo = self.world == 1
        self.progress = self.board.progress_of(self.row)

    @property
    def row(self) -> int:
        """Row of this rank on its board."""
        return self.rank % self.board.world

    def phase(self, phase: str, step: int | None = None) -> None:
        """Record that this rank enters a phase; the report of its death contains it."""
        self.progress[0] = PHASE_NUMBERS[phase]
        if step is not None:
            self.progress[1] = step

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
        """Overwrite ``tensors`` by the values of rank ``source``."""
        if not self.solo:
            with self.peer_failures_named():
                for tensor in tensors:
                    dist.broadcast(tensor, source)

    def table(self, row: Sequence[float]) -> list[list[float]]:
        """Return the rows of all ranks, by rank; every row must have the same length."""
        if self.solo:
            return [[float(value) for value in row]]
        cells = torch.zeros(self.world, len(row), dtype=torch.float64)
        cells[self.rank] = torch.tensor(row, dtype=torch.float64)
        if not dist.get_backend().startswith("nccl"):
            return self.sum_(cells).tolist()
        return self.sum_(cells.to(self.device)).cpu().tolist()

    def gather(self, value: Any) -> list[Any]:
        """Return the JSON values of all ranks, by rank, on every rank."""
        if self.solo:
            return [value]
        text = json.dumps(value).encode()
        sizes = [int(row[0]) for row in self.table([len(text)])]
        cells = torch.zeros(self.world, max(sizes), dtype=torch.uint8)
        cells[self.rank, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        if dist.get_backend().startswith("nccl"):
            cells = cells.to(self.device)
        rows = self.sum_(cells).cpu().numpy()
        return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def tell(self, value: Any, source: int = 0) -> Any:
        """Return the JSON value of rank ``source`` on every rank."""
        return value if self.solo else self.gather(value if self.rank == source else None)[source]

    def barrier(self) -> None:
        """Wait until every rank calls this."""
        self.table([1.0])

    def leave(self) -> None:
        """Stop the pulse and destroy the process group."""
        self.phase("done")
        if self._watch is not None:
            self._watch.stop()
        if self._own_group and dist.is_initialized():
            dist.destroy_process_group()

    @contextlib.contextmanager
    def peer_failures_named(self) -> Iterator[None]:
        """Convert errors of the transport (a port number) to one that names the lost rank."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if isinstance(error, TrainError) or not _is_lost_peer(error):
                raise
            lost = self._watch.silent_peers() if self._watch is not None else {}
            who = "; ".join(f"rank {r}: {what}" for r, what in lost.items()) or "an unknown rank"
            fault = TrainError(
                f"rank {self.rank}, step {self.board.step(self.row)}: "
                f"lost contact in a collective with {who}. Expected all {self.world} ranks. See the log "
                "of that rank for the cause; start again with resume to continue from the last checkpoint. "
                f"Transport: {error}",
                rank=self.rank,
                lost=sorted(lost),
                cause=str(error),
            )
            if self._peers is not None:
                print_fault(fault.message)  # now, because the launcher may end this process before it shows the error
            raise fault from error


def _is_lost_peer(error: BaseException) -> bool:
    text = str(error).lower()
    signs = ("connection", "closed by peer", "reset by peer", "timed out", "timeout", "broken pipe", "gloo", "nccl")
    return isinstance(error, dist.DistError) or any(sign in text for sign in signs)


def under_torchrun() -> bool:
    """Return True if a launcher has set the rank of this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launched_world(alone: int = 1) -> int:
    """Return the number of ranks of a launcher; ``alone`` without one."""
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else alone


def is_first_rank() -> bool:
    """Return True if this process writes and reports: rank 0 of a launcher, or the only one."""
    return not under_torchrun() or os.environ["RANK"] == "0"


_launcher: list[Any] = []  # the store of the launcher; opened one time, because its port is in use then
_joined = 0


def _store_of_launcher(rank: int, world: int, attempt: int, limit: timedelta) -> Any:
    """Return a store for this run, inside the store that the launcher's environment names.

    After a restart, and from the second run of a process on, the launcher's store still contains the keys of earlier
    runs. So each run has its prefix, the same on all ranks, because all ranks start their runs in one order.
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
    """Return the `Ranks` of this process and create the process group; ``Ranks.leave`` destroys it.

    Under torchrun (or any launcher that sets ``RANK`` and ``WORLD_SIZE``) call it without arguments.
    Gloo sends CPU tensors, NCCL sends CUDA tensors.

    Args:
        timeout_s: how long a collective waits for a rank that is alive.
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
        # Sums that run during a backward pass have priority; otherwise they would wait until it ends.
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
        # If a capture fails on one rank, the others must not wait for its buffers.
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    if store is None:
        store = _store_of_launcher(rank, world, attempt, timedelta(seconds=timeout_s))
    if not dist.is_initialized():
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))
        ranks._own_group = True
    ranks.store = PrefixStore("flodl", store)
    if launched:
        ranks._peers = LocalPeers(rank, world, descriptor)
        ranks.store.set(f"place/{attempt}/{rank}", ranks._peers.address())
    ranks._watch = PeerWatch(ranks, parent)
    return ranks

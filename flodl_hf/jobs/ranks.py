"""Several processes on one file: assignment of parts, heartbeats, and worker processes on this host.

Part ``n`` is predicted by rank ``n % world``. Ranks share only the folder of parts, in which each writes its status.
Rank 0 creates the folder and acknowledges there the ranks that it has seen; the others wait for that, so they never use
the folder of an earlier run. Rank 0 then waits for the parts of the others.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flodl.devices import all_devices, cuda_count, find_device
from flodl.errors import DeviceError
from flodl_hf.errors import PredictError
from flodl_hf.jobs.parts import Parts
from flodl_hf.workers.pool import Worker
from flodl_hf.workers.process import EARLY, rank_process

PULSE_S = 1.0
SEEK_S = 0.05  # interval of checks for other ranks
FROZEN_S = 60.0  # a rank that wrote nothing for this time is considered dead
START_S = 600.0  # a rank that wrote nothing yet may still be loading its model
JOIN_S = 120.0  # time for the first rank to lay out the folder
RANK = "flodl_hf.jobs.file:serve"  # function of a worker process


class LostRank(Exception):
    """Another rank failed with ``fault``. Not a library error, so it is never attributed to a row."""

    def __init__(self, fault: PredictError) -> None:
        super().__init__(str(fault))
        self.fault = fault


@dataclass(frozen=True)
class Rank:
    """Rank of this process."""

    rank: int = 0
    world: int = 1
    local: int = 0

    @classmethod
    def from_env(cls) -> Rank:
        """Return the rank of the environment variables RANK, WORLD_SIZE and LOCAL_RANK, as torchrun sets them.

        Raises:
            PredictError: their values are invalid.
        """
        env = os.environ
        if not {"RANK", "WORLD_SIZE"} <= env.keys():
            return cls()
        try:
            rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
            local = int(env.get("LOCAL_RANK", rank))
        except ValueError:
            rank, world, local = -1, 0, 0
        if not 0 <= rank < world:
            raise PredictError(
                f"ranks: RANK is {env['RANK']!r} and WORLD_SIZE {env['WORLD_SIZE']!r}; expected 0 <= RANK < WORLD_SIZE"
            )
        return cls(rank, world, local)

    def owns(self, part: int) -> bool:
        """Return whether this rank predicts a part."""
        return part % self.world == self.rank

    @property
    def device(self) -> str | None:
        """Device of one of several ranks; None for the default device."""
        if self.world == 1 or not torch.cuda.is_available():
            return None
        return f"cuda:{self.local % torch.cuda.device_count()}"


class Heartbeat:
    """Writes the status and figures of this rank periodically while the context is active.

    Args:
        parts: the folder.
        rank: the rank of this process.
        figures: returns the figures to write.
    """

    def __init__(self, parts: Parts, rank: Rank, figures: Callable[[], Mapping[str, Any]]) -> None:
        self._parts, self._rank, self._figures = parts, rank, figures
        self._life = f"{os.getpid()}-{time.time_ns()}"
        self._seen: dict[str, str] = {}  # acknowledged process of each other rank
        self._beats = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._write()
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._over.set()
        self._thread.join()
        self._write("" if error is None else f"{kind.__name__}: {error}")

    def join(self, should_stop: Callable[[], bool]) -> bool:
        """Wait until rank 0 has created the folder and acknowledged this rank.

        Returns False if there is nothing to do: the output is complete, or a stop was requested.

        Raises:
            PredictError: rank 0 does not start.
        """
        until = time.monotonic() + JOIN_S
        while self._parts.read_rank_status(0).get("seen", {}).get(str(self._rank.rank)) != self._life:
            if should_stop():
                return False
            if time.monotonic() > until:
                if self._parts.target.exists():
                    return False
                raise PredictError(
                    f"{self._parts.folder}: rank 0 has not started within {JOIN_S:.0f} s. Start it with the "
                    "same command and RANK=0.",
                    path=str(self._parts.folder),
                )
            self._write()
            time.sleep(SEEK_S)
        return True

    def wait_for_ranks(self, most_s: float) -> None:
        """Wait until all other ranks were acknowledged, so that none waits for a removed folder."""
        until = time.monotonic() + most_s
        while len(self._seen) + 1 < self._rank.world and time.monotonic() < until:
            time.sleep(SEEK_S)

    def _write(self, fault: str | None = None) -> None:
        self._beats += 1
        state = {"life": self._life, "beat": self._beats, "fault": fault or "", "over": fault is not None}
        self._parts.write_rank_status(self._rank.rank, {**state, "seen": self._seen, **self._figures()})

    def _run(self) -> None:
        while not self._over.wait(PULSE_S if self._rank.rank or len(self._seen) + 1 >= self._rank.world else SEEK_S):
            if self._rank.rank == 0:
                others = {r: self._parts.read_rank_status(r) for r in range(1, self._rank.world)}
                self._seen = {str(r): status["life"] for r, status in others.items() if "life" in status}
            self._write()


def wait_for_parts(parts: Parts, rank: Rank, missing: Sequence[int], on_wait: Callable[[int], bool]) -> bool:
    """Wait until other ranks have finished their parts; return False if a stop was requested.

    Args:
        parts: the folder.
        rank: this rank.
        missing: numbers of the unfinished parts.
        on_wait: called repeatedly with the number of missing parts; True ends the wait.

    Raises:
        PredictError: a rank failed, was stopped, or wrote no status for too long.
    """
    last: dict[int, Any] = {}
    started = time.monotonic()
    since: dict[int, float] = {}
    left = list(missing)
    while left := [number for number in left if parts.record(number) is None]:
        if on_wait(len(left)):
            return False
        for other in sorted({number % rank.world for number in left}):
            status = parts.read_rank_status(other)
            if status != last.get(other, {}):
                last[other], since[other] = status, time.monotonic()
            if status.get("over"):
                if all(parts.record(number) is not None for number in left if number % rank.world == other):
                    continue
                _lost(parts, other, status.get("fault") or "it was stopped before its parts were finished", left)
            silent = time.monotonic() - since.get(other, started)
            if silent > (FROZEN_S if status else START_S):
                _lost(parts, other, f"no status for {silent:.0f} s", left)
        time.sleep(SEEK_S)
    return True


def _lost(parts: Parts, rank: int, reason: str, left: Sequence[int]) -> None:
    raise PredictError(
        f"rank {rank}: {reason}; {len(left)} parts are missing. All finished parts are kept in {parts.folder}: "
        f"{parts.again}, which resumes from them",
        rank=rank,
        missing=list(left),
        reason=reason,
    )


# ---- ranks on this host --------------------------------------------------------------------------------


def device_names(devices: int | str | Sequence[str]) -> list[str]:
    """Return the device of each rank.

    Raises:
        DeviceError: there are fewer devices, or none is given.
    """
    if isinstance(devices, str):
        if devices == "auto":
            return [str(device) for device in all_devices()]
        devices = int(devices) if devices.isdecimal() else [name.strip() for name in devices.split(",")]
    if not isinstance(devices, int):
        names = [str(name) for name in devices]
        if not names or not all(names):
            raise DeviceError(f"devices: found {devices!r}, expected a number, or names such as cuda:0,cuda:1")
        return [str(find_device(name)) for name in names]
    there = cuda_count()
    if devices < 1 or (there and devices > there):
        expected = f"1 to {there}, one for each CUDA device" if there else "a number of processes, 1 or more"
        raise DeviceError(f"devices: found {devices}, expected {expected}")
    return [f"cuda:{k}" for k in range(devices)] if there else ["cpu"] * devices


class Workers:
    """Ranks 1, 2, ... of a job on this host; this process is rank 0.

    Args:
        job: keyword arguments of `flodl_hf.jobs.predict_file`, as JSON types.
        devices: the device of each rank, including rank 0.
    """

    def __init__(self, job: Mapping[str, Any], devices: Sequence[str]) -> None:
        self._threads = torch.get_num_threads()
        env = {}
        if all(name.startswith("cpu") for name in devices):
            torch.set_num_threads(max(1, self._threads // len(devices)))
            env["OMP_NUM_THREADS"] = str(torch.get_num_threads())
        self._running: list[Worker] = []
        early = [EARLY.pop(0) for _ in devices[1:]] if len(EARLY) == len(devices) - 1 else []
        for rank, device in enumerate(devices[1:], 1):
            process = early[rank - 1] if early else rank_process(RANK, rank, len(devices), env=env)
            self._running.append(Worker(process))
            self._running[-1].send({**job, "device": device})

    def check(self, again: str = "run the same command again") -> None:
        """Raise if a worker ended before its parts were finished.

        Args:
            again: how to resume the job, for messages.

        Raises:
            LostRank: a worker was ended by a signal, or with another status than 0.
        """
        for rank, worker in enumerate(self._running, 1):
            if worker.end and (status := worker.process.wait()):
                raise LostRank(
                    PredictError(
                        f"rank {rank}: {worker.end}\nAll finished parts are kept. To resume, {again}",
                        rank=rank, status=status, reason=worker.process.reason or worker.end,
                    )
                )  # fmt: skip

    def stop(self, *, finish: bool = False) -> None:
        """End all workers and wait for them.

        Args:
            finish: let each worker finish its current part; otherwise they are killed, and unfinished parts are lost.
        """
        for worker in self._running:
            if finish:
                worker.send({"stop": True})
            else:
                worker.process.kill()
        for worker in self._running:
            worker.join()
            worker.close()
        self._running = []
        torch.set_num_threads(self._threads)

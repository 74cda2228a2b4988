"""Several processes on one file: who takes which part, who is alive, and starting them on this host.

Part ``n`` is rank ``n % world``'s, so that no rank has to ask another. Ranks share nothing but the folder of parts:
each tells there that it is alive, and the first one waits for the parts of the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flodl.devices import all_devices, cuda_count, find_device
from flodl.errors import DeviceError
from flodl_hf.bulk.parts import Parts
from flodl_hf.errors import PredictError

__all__ = ["Heartbeat", "Rank", "Workers", "device_names", "wait_for_parts"]

PULSE_S = 1.0
FROZEN_S = 60.0  # a rank that gave no sign for so long is taken for dead
START_S = 600.0  # a rank that gave none yet may still be loading its model


@dataclass(frozen=True)
class Rank:
    """Which of several processes this is."""

    rank: int = 0
    world: int = 1
    local: int = 0

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Rank:
        """Return what RANK, WORLD_SIZE and LOCAL_RANK say, as torchrun sets them.

        Raises:
            PredictError: they are no numbers that fit together.
        """
        env = os.environ if env is None else env
        if "RANK" not in env or "WORLD_SIZE" not in env:
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

    def takes(self, part: int) -> bool:
        """Return whether a part is this rank's."""
        return part % self.world == self.rank

    @property
    def device(self) -> str | None:
        """The device of one of several ranks; None for the usual one."""
        if self.world == 1 or not torch.cuda.is_available():
            return None
        return f"cuda:{self.local % torch.cuda.device_count()}"


class Heartbeat:
    """Tells in the folder, as long as it is entered, that this rank is alive and how far it is.

    Args:
        parts: the folder.
        rank: which rank this is.
        figures: what to tell.
        parent: end this process when its parent is no longer this one.
    """

    def __init__(
        self, parts: Parts, rank: Rank, figures: Callable[[], Mapping[str, Any]], parent: int | None = None
    ) -> None:
        self._parts, self._rank, self._figures, self._parent = parts, rank, figures, parent
        self._life = f"{os.getpid()}-{time.time_ns()}"
        self._beats = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._tell()
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._over.set()
        self._thread.join()
        self._tell("" if error is None else f"{kind.__name__}: {error}")

    def _tell(self, fault: str | None = None) -> None:
        self._beats += 1
        state = {"life": self._life, "beat": self._beats, "fault": fault or "", "over": fault is not None}
        self._parts.tell(self._rank.rank, {**state, **self._figures()})

    def _run(self) -> None:
        while not self._over.wait(PULSE_S):
            if self._parent is not None and os.getppid() != self._parent:
                os._exit(1)
            self._tell()


def wait_for_parts(
    parts: Parts,
    rank: Rank,
    missing: Sequence[int],
    before: Mapping[int, Mapping[str, Any]],
    on_wait: Callable[[int], bool],
) -> bool:
    """Wait until other ranks have finished their parts; False if told to stop.

    Args:
        parts: the folder.
        rank: this rank.
        missing: parts that were not there.
        before: what the other ranks had last said when this run began.
        on_wait: called now and then with the number of missing parts; True stops the waiting.

    Raises:
        PredictError: a rank failed, was ended, or gives no sign.
    """
    last = dict(before)
    started = time.monotonic()
    since = dict.fromkeys(before, started)
    left = list(missing)
    while left := [number for number in left if parts.record(number) is None]:
        if on_wait(len(left)):
            return False
        for other in sorted({number % rank.world for number in left}):
            told = parts.told(other)
            if told != last.get(other, {}):
                last[other], since[other] = told, time.monotonic()
            # What was said before this run began may be of an earlier one, or of a rank that was quicker to start.
            fresh = told != before.get(other, {})
            silent = time.monotonic() - since.get(other, started)
            if told.get("over") and (fresh or silent > FROZEN_S):
                if all(parts.record(number) is not None for number in left if number % rank.world == other):
                    continue
                _lost(parts, other, told.get("fault") or "it was stopped before its parts were done", left)
            if silent > (FROZEN_S if fresh else START_S):
                _lost(parts, other, f"it gave no sign for {silent:.0f} s", left)
        time.sleep(0.05)
    return True


def _lost(parts: Parts, rank: int, reason: str, left: Sequence[int]) -> None:
    raise PredictError(
        f"rank {rank}: {reason}; {len(left)} parts are missing. All finished parts are kept in {parts.folder}: "
        f"{parts.again}, which goes on from there",
        rank=rank,
        missing=list(left),
        reason=reason,
    )


# ---- ranks on this host --------------------------------------------------------------------------------


def device_names(devices: int | str | Sequence[str]) -> list[str]:
    """Return the device of each rank.

    Raises:
        DeviceError: there are fewer devices, or none were named.
    """
    if isinstance(devices, str):
        if devices == "auto":
            return [str(device) for device in all_devices()]
        devices = int(devices) if devices.isdecimal() else [name.strip() for name in devices.split(",")]
    if not isinstance(devices, int):
        names = [str(name) for name in devices]
        if not names or not all(names):
            raise DeviceError(f"devices: found {devices!r}; expected a number, or names such as cuda:0,cuda:1")
        return [str(find_device(name)) for name in names]
    there = cuda_count()
    if devices < 1 or (there and devices > there):
        expected = f"1 to {there}, one for each CUDA device here" if there else "a number of processes, 1 or more"
        raise DeviceError(f"devices: found {devices}; expected {expected}")
    return [f"cuda:{k}" for k in range(devices)] if there else ["cpu"] * devices


class Workers:
    """Ranks 1, 2, ... of a job on this host; this process is rank 0.

    Args:
        job: keyword arguments of `flodl_hf.bulk.predict_file`, as JSON types.
        devices: the device of each rank, that of rank 0 included.
    """

    def __init__(self, job: Mapping[str, Any], devices: Sequence[str]) -> None:
        threads = str(max(1, torch.get_num_threads() // len(devices)))
        self._before = torch.get_num_threads()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        on_cpu = all(name == "cpu" for name in devices)
        if on_cpu:
            torch.set_num_threads(int(threads))
        for rank, device in enumerate(devices[1:], 1):
            env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(len(devices)), "LOCAL_RANK": str(rank)}
            if on_cpu:
                env["OMP_NUM_THREADS"] = threads
            root = str(Path(__file__).parents[2])
            env["PYTHONPATH"] = os.pathsep.join(filter(None, (root, env.get("PYTHONPATH"))))
            command = [sys.executable, "-m", "flodl_hf.bulk.worker", json.dumps({**job, "device": device})]
            # In a group of its own: a Ctrl-C at the terminal reaches it through rank 0, once.
            self._running[rank] = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True)

    def check(self, again: str = "run the same command again") -> None:
        """Notice ranks that were killed, which cannot say so themselves.

        Args:
            again: what to do to go on, in words.

        Raises:
            PredictError: one was.
        """
        for rank, process in self._running.items():
            code = process.poll()
            if code is not None and code < 0:
                name = signal.Signals(-code).name
                raise PredictError(
                    f"rank {rank}: ended by {name}; all finished parts are kept. To go on from there, {again}",
                    rank=rank,
                    reason=name,
                )

    def stop(self) -> None:
        """Have all ranks finish their part, and wait for them."""
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        for process in self._running.values():
            process.wait()
        torch.set_num_threads(self._before)

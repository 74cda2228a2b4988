"""Ranks that a launcher started see each other: who ended, who stands still, and what each was doing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from flodl.distributed import Ranks, peers
from flodl.distributed.board import Board
from flodl.distributed.peers import LocalPeers

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="reads /proc")
ROOT = Path(__file__).parents[3]


class Store(dict[str, bytes]):
    """A store as far as neighbours ask one."""

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def rank_one(pipe: Any) -> None:
    board, descriptor = Board.to_be_mapped(2)
    Ranks(1, 2, board=board).phase("backward", 41)
    pipe.send(LocalPeers(1, 2, descriptor).address())
    pipe.recv()
    Ranks(1, 2, board=board).phase("optimiser", 42)
    pipe.send("done")
    time.sleep(600)


@pytest.fixture
def other() -> Any:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=rank_one, args=(theirs,), daemon=True)
    process.start()
    near = LocalPeers(0, 2)
    near.look_for(Store(), "place")
    assert not near.complete
    near.look_for(Store({"place/1": ours.recv().encode()}), "place")
    assert near.complete
    yield near, process, ours
    process.kill()
    process.join()


def test_a_rank_that_was_killed_leaves_phase_and_step(other: Any) -> None:
    near, process, pipe = other
    assert near.dead() == {}
    pipe.send("go on")
    pipe.recv()
    os.kill(process.pid, signal.SIGKILL)
    until = time.monotonic() + 600
    while not (dead := near.dead()):
        assert time.monotonic() < until
    assert dead == {1: f"its process ended in phase 'optimiser', step 42, pid {process.pid}"}


def test_a_rank_that_ended_is_given_up_after_a_while_unless_it_was_done(other: Any) -> None:
    near, process, _ = other
    os.kill(process.pid, signal.SIGKILL)
    until = time.monotonic() + 600
    while not near.dead():
        assert time.monotonic() < until
    assert near.ended(0.2) == {}
    time.sleep(0.25)
    assert "phase 'backward', step 41" in near.ended(0.2)[1]
    near._known[1].board = board = Board(2)
    Ranks(1, 2, board=board).phase("done", 42)
    assert near.ended(0.0) == {}


@pytest.mark.parametrize(("device", "leaves"), [("cuda", True), ("cpu", False)])
def test_only_ranks_on_gpus_leave_by_themselves_when_another_ends(
    device: str, leaves: bool, other: Any, monkeypatch: Any
) -> None:
    near, process, _ = other
    left: list[Any] = []
    monkeypatch.setattr(peers, "leave", lambda ranks, ended, frozen: left.append((ended, frozen)))
    ranks = Ranks(0, 2, 0, torch.device(device), board=Board(2))
    ranks._peers = near
    pulse = peers.PeerWatch(ranks, None)
    os.kill(process.pid, signal.SIGKILL)
    until = time.monotonic() + (60 if leaves else 1.5)
    while not left and time.monotonic() < until:
        time.sleep(0.05)
    pulse.stop()
    assert bool(left) is leaves
    if leaves:
        ended, frozen = left[0]
        assert list(ended) == [1]
        assert frozen == {}


def test_a_rank_that_stands_still_is_told_from_one_that_is_slow(other: Any) -> None:
    near, process, _ = other
    assert near.frozen(0.0) == {}
    os.kill(process.pid, signal.SIGSTOP)
    until = time.monotonic() + 600
    while not (frozen := near.frozen(0.2)):
        assert time.monotonic() < until
    assert re.search(r"for \d+\.\d s in phase 'backward', step 41", frozen[1])
    os.kill(process.pid, signal.SIGCONT)
    while near.frozen(0.0):
        assert time.monotonic() < until
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(0.05)
    assert near.frozen(600.0) == {}  # it counts from when it stopped again


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SIGKILL", "SIGSTOP"])
def test_ranks_of_a_torchrun_job_name_rank_phase_and_step_and_lose_nothing(kind: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "torchrun_faults.py"), "--ranks", "2", "--phases",
         "backward", "--kinds", kind],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith(f"| 2 | {kind}"))
    assert [cell.strip() for cell in row.split("|")[4:8]] == ["1", "1", "1", "1"]

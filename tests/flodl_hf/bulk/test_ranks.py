"""Several processes on one file: their results equal those of one, and the failure of one ends the job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flodl_hf import predict_file
from flodl_hf.errors import PredictError
from flodl_hf.jobs import ranks
from flodl_hf.workers.process import EARLY, start_early

ROOT = Path(__file__).parents[3]
HEAD = "sequence_classification"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute with one thread, as each of two processes does; the number of threads changes the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_two_devices_write_what_one_writes(folder: Any, model: Any, numbered: Any, tmp_path: Path) -> None:
    source, wanted, out = numbered(100), tmp_path / "wanted.jsonl", tmp_path / "out.jsonl"
    predict_file(model(), source, wanted, part_rows=16)
    result = predict_file(folder(HEAD), source, out, part_rows=16, devices=["cpu", "cpu:0"])
    assert (result.is_whole, result.rows, result.parts) == (True, 100, 7)
    assert out.read_bytes() == wanted.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "wanted.jsonl"]


@pytest.mark.usefixtures("one_thread")
def test_a_job_uses_ranks_that_were_started_before(folder: Any, model: Any, numbered: Any, tmp_path: Path) -> None:
    source, wanted, out = numbered(100), tmp_path / "wanted.jsonl", tmp_path / "out.jsonl"
    predict_file(model(), source, wanted, part_rows=16)
    start_early(ranks.RANK, ["cpu", "cuda:0"])
    started = EARLY[0]
    assert started.poll() is None
    predict_file(folder(HEAD), source, out, part_rows=16, devices=["cpu", "cpu"])
    assert out.read_bytes() == wanted.read_bytes()
    assert (EARLY, started.poll()) == ([], 0)


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        ("os._exit(3)", 3, "ended with status 3"),
        ("raise MemoryError('nothing left')", 1, "MemoryError: nothing left"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, "ended by SIGKILL, as when memory is exhausted"),
    ],
    ids=["status", "exception", "signal"],
)
def test_a_worker_that_ends_early_ends_the_job(
    code: str, status: int, reason: str, folder: Any, numbered: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "ending.py").write_text(f"import os, signal\ndef serve(stream):\n    {code}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(ranks, "RANK", "ending:serve")
    out = tmp_path / "out.jsonl"
    with pytest.raises(PredictError) as lost:
        predict_file(folder(HEAD), numbered(40), out, part_rows=16, devices=["cpu", "cpu"])
    assert (lost.value.rank, lost.value.status, lost.value.reason) == (1, status, reason)
    assert reason in str(lost.value)
    assert predict_file(folder(HEAD), tmp_path / "in.jsonl", out).rows == 40


def test_a_lost_worker_is_noticed_within_a_part(folder: Any, numbered: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """The first rank notices it after the batch that it is computing."""
    seen: list[int] = []

    class Lost(ranks.Workers):
        def __init__(self, job: Any, devices: Any) -> None:
            super().__init__(job, devices)
            self._running[0].process.kill()
            self._running[0].join()

        def check(self, again: str = "") -> None:
            seen.append(1)
            if len(seen) > 3:
                super().check(again)

    monkeypatch.setattr("flodl_hf.jobs.file.Workers", Lost)
    out = tmp_path / "out.jsonl"
    with pytest.raises(PredictError) as lost:
        predict_file(folder(HEAD), numbered(80), out, devices=["cpu", "cpu"], token_budget=16)
    assert lost.value.status == -signal.SIGKILL
    assert not list(out.with_name("out.jsonl.parts").glob("part-*"))


def start(rank: int, *args: Any) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "flodl_hf.cli", "predict", *map(str, args)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_restart_under_a_launcher(folder: Any, model: Any, numbered: Any, tmp_path: Path) -> None:
    pytest.importorskip("typer")
    source, wanted, out = numbered(60), tmp_path / "wanted.jsonl", tmp_path / "out.jsonl"
    out.write_text("an older output")
    asked = iter([False, False, True])
    # Parts of a run with other options.
    predict_file(model(), source, out, part_rows=8, overwrite=True, top_k=2, should_stop=lambda: next(asked))
    predict_file(model(), source, wanted, part_rows=16)
    args = (folder(HEAD), "--in", source, "--out", out, "--part-rows", 16, "--overwrite")
    processes = [start(rank, *args) for rank in (1, 0)]
    found = [process.communicate(timeout=900) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], found
    assert out.read_bytes() == wanted.read_bytes()
    assert not out.with_name("out.jsonl.parts").exists()

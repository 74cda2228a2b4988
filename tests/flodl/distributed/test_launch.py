"""Ranks that fail are noticed in bounded time, and the error says who, where and why."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import pytest
import torch

from flodl.distributed import RankError, launch
from flodl.errors import TrainError
from flodl.fork_server import prepare_ranks

torch.set_num_threads(1)


def work(ranks, fault, phase, victim):
    ranks.barrier()
    ranks.phase(phase, 7)
    if ranks.rank == victim:
        match fault:
            case "SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
            case "SIGSTOP":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "exception":
                raise ValueError("no such colour")
            case "exit":
                os._exit(0)
            case "memory":
                raise torch.OutOfMemoryError("tried to allocate 9 TiB")
    ranks.barrier()
    return ranks.rank


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(
    ("fault", "phase", "reason"),
    [
        ("SIGKILL", "forward", "killed by SIGKILL"),
        ("exception", "backward", "ValueError: no such colour"),
        ("exit", "optimiser", "exit code 0 before its work was done"),
        ("memory", "averaging", "tried to allocate"),
        ("SIGSTOP", "data", "frozen"),
    ],
)
def test_the_error_names_the_rank_its_phase_step_and_reason(fault, phase, reason, victim):
    with pytest.raises(RankError) as caught:
        launch(work, (fault, phase, victim), ranks=3, start="fork", frozen_after_s=2).wait()
    error = caught.value
    assert (error.rank, error.phase, error.step) == (victim, phase, 7)
    assert reason in error.reason
    assert f"rank {victim} of 3" in str(error)
    if fault == "exception":
        assert "raise ValueError" in error.trace
    with contextlib.suppress(ProcessLookupError):
        os.kill(error.pid, 0)
        pytest.fail(f"rank {victim} still runs")


def flaky(ranks, path):
    ranks.barrier()
    if ranks.rank == 1 and ranks.attempt < 2:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.barrier()
    return ranks.attempt


def test_ranks_are_started_again_as_often_as_allowed(tmp_path):
    assert launch(flaky, (str(tmp_path),), ranks=2, start="fork", max_restarts=2).wait() == [2, 2]
    with pytest.raises(RankError):
        launch(flaky, (str(tmp_path),), ranks=2, start="fork", max_restarts=1).wait()


def collectives(ranks):
    total = ranks.sum_(torch.tensor([ranks.rank + 1.0]))
    told = ranks.tell({"from": ranks.rank}, source=1)
    return total.item(), told, ranks.gather(ranks.rank * 2), ranks.table([ranks.rank, 5])


def test_collectives_give_every_rank_the_same():
    results = launch(collectives, ranks=3, start="fork").wait()
    assert results == [(6.0, {"from": 1}, [0, 2, 4], [[0, 5], [1, 5], [2, 5]])] * 3


def test_what_cannot_be_sent_to_a_new_process_is_told_so():
    with pytest.raises(TrainError, match="top of a module"):
        launch(lambda ranks: None, ranks=2, start="spawn")
    with pytest.raises(TrainError, match="3 devices for 2 ranks"):
        launch(work, ranks=2, device=["cpu"] * 3)


def sleeper(ranks, path):
    with open(f"{path}/{ranks.rank}", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(1200)


def boss(path):
    launch(sleeper, (path,), ranks=2, start="fork").wait()


def test_no_rank_outlives_a_launcher_that_was_killed(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process = multiprocessing.get_context("fork").Process(target=boss, args=(str(tmp_path),))
        process.start()
    until = time.monotonic() + 600
    while len([p for p in tmp_path.iterdir() if p.read_text()]) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    process.kill()
    process.join()
    pids = [int(p.read_text()) for p in tmp_path.iterdir()]
    assert len(pids) == 2
    until = time.monotonic() + 600  # half of what they sleep
    while any(map(runs, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(runs, pids))


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


SCRIPT = """
import os, signal, sys, torch
from torch import nn
from flodl.data import TensorRows
from flodl.train import Trainer, adamw, Loss
torch.set_num_threads(1)
folder, fault = sys.argv[1], sys.argv[2]
g = torch.Generator().manual_seed(0)
data = TensorRows({"x": torch.randn(60, 4, generator=g), "y": torch.randint(0, 2, (60,), generator=g)})
def step(model, batch):
    return Loss(nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"]))
def model(device):
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
def watch(epoch, trainer):
    def fall(event):
        done = trainer.ranks.attempt
        if fault == "kill" and type(event).__name__ == "StepDone" and event.step == 11 and trainer.ranks.rank == 1 and not done:
            os.kill(os.getpid(), signal.SIGKILL)
    trainer.events.subscribe(fall)
run = Trainer.builder(model, adamw(1e-2), step).dataset(data).batch_size(6).num_epochs(2)
run.checkpoints(folder, every=4).epoch_fn(watch).run()
"""


@pytest.mark.slow
def test_under_torchrun_a_killed_rank_is_named_and_a_restart_ends_with_the_same_bits(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))

    def torchrun(folder, fault, restarts):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += [f"--max-restarts={restarts}", str(script), str(tmp_path / folder), fault]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd(), "GLOO_SOCKET_IFNAME": "lo"}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)

    def weights(folder):
        return [p.read_bytes() for p in sorted((tmp_path / folder).glob("step-*/model.safetensors"))][-1]

    assert torchrun("whole", "none", 0).returncode == 0
    dead = torchrun("dead", "kill", 0)
    assert dead.returncode != 0
    assert "rank 1" in dead.stderr
    again = torchrun("again", "kill", 1)
    assert again.returncode == 0, again.stderr
    assert weights("again") == weights("whole")


class Enough(BaseException):
    """What a listener may end a run with."""


def test_ranks_do_not_outlive_a_wait_that_was_broken_off():
    def talk(ranks):
        ranks.pipe.send(("word", ranks.rank))
        time.sleep(1200)

    def listen(rank, message):
        raise Enough

    crew = launch(talk, ranks=2, start="fork", on_message=listen)
    with pytest.raises(Enough):
        crew.wait()
    assert crew.alive == []


# ---- signals while ranks start -----------------------------------------------------------------------


class Slow:
    """Builds a model so slowly on one rank that a signal finds it at that."""

    def __init__(self, folder, wait_s):
        self.folder, self.wait_s = folder, wait_s

    def __call__(self, device):
        (self.folder / f"{os.getpid()} builds").touch()
        if len(list(self.folder.glob("*builds"))) == 2:
            time.sleep(self.wait_s)
        return torch.nn.Linear(2, 1)


def two_ranks(folder, wait_s, saving):
    from flodl.train import Trainer, sgd

    run = Trainer.builder(Slow(folder, wait_s), sgd(0.1), lambda model, batch: model(batch["x"]).square().mean())
    run.dataset({"x": torch.randn(12, 2)}).batch_size(4).num_epochs(2).devices(2, start="fork").policy("sync")
    if saving:
        run.checkpoints(str(folder / "kept"))
    try:
        run.run()
    except KeyboardInterrupt:
        sys.exit(130)


@pytest.mark.parametrize("saving", [False, True])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("builds", [1, 2])
def test_a_signal_while_ranks_start_is_no_failure_of_a_rank(tmp_path, builds, number, code, saving):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process = multiprocessing.get_context("fork").Process(target=two_ranks, args=(tmp_path, 100.0, saving))
        process.start()
    until = time.monotonic() + 600
    while len(list(tmp_path.glob("*builds"))) < builds and time.monotonic() < until:
        time.sleep(0.005)
    os.kill(process.pid, number)
    process.join(timeout=600)
    assert process.exitcode == code


def place_of(ranks, fault):
    ranks.barrier()
    if ranks.rank == 1 and fault:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.barrier()
    return os.getppid(), os.environ.get("CHANGED_LATER")


def test_prepared_ranks_are_forked_by_one_process_and_their_faults_are_named(monkeypatch):
    monkeypatch.setattr(sys.modules[prepare_ranks.__module__], "_is_prepared", False)
    prepare_ranks("flodl.train")
    monkeypatch.setenv("CHANGED_LATER", "yes")
    (first, given), second = launch(place_of, (False,), ranks=2).wait()
    assert first not in (os.getpid(), 1)
    assert second == (first, "yes")
    assert given == "yes"
    with pytest.raises(RankError) as caught:
        launch(place_of, (True,), ranks=2).wait()
    assert (caught.value.rank, "SIGKILL" in caught.value.reason) == (1, True)


def test_a_script_without_a_main_guard_is_named_as_the_cause(tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text("from flodl.distributed import launch\nlaunch(print, (), ranks=2).wait()\n")
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert 'if __name__ == "__main__":' in ended.stderr.rpartition("RankError:")[2]

"""Under a launcher such as torchrun one process may have any number of runs, one after another."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.nn.functional import mse_loss

from flodl.distributed import group, join_ranks
from flodl.train import Trainer, sgd

torch.set_num_threads(1)
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)  # pays for imports before the fork


def job(call: Any, world: int = 2, *, agent: bool = True) -> list[Any]:
    """Run ``call(rank)`` in forked processes with the environment that torchrun sets; return what each answered."""
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        probe = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = probe.port
        del probe
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_in_job, args=(call, rank, world, port, agent, theirs), daemon=True)
            process.start()
            pipes.append(ours)
            processes.append(process)
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if agent else None
    try:
        answers = [pipe.recv() if pipe.poll(600) else "no answer" for pipe in pipes]
    finally:
        for process in processes:
            process.join(timeout=300)
            process.kill()
        del store
    assert not [answer for answer in answers if isinstance(answer, str)], answers
    return answers


def _in_job(call: Any, rank: int, world: int, port: int, agent: bool, pipe: Any) -> None:
    settings = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in settings.items()}, GLOO_SOCKET_IFNAME="lo")
    if agent:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    group._launcher.clear()
    try:
        pipe.send(call(rank))
        code = 0
    except BaseException:
        pipe.send(traceback.format_exc())
        code = 1
    sys.stdout.flush()
    os._exit(code)


def three_runs(rank: int) -> list[list[float]]:
    weights = []
    for _ in range(3):
        torch.manual_seed(1)
        data = {"x": torch.randn(24, 3), "y": torch.randn(24, 1)}

        def step(model: Any, batch: Any) -> Any:
            return mse_loss(model(batch["x"]), batch["y"])

        run = Trainer.builder(lambda device: torch.nn.Linear(3, 1), sgd(0.1), step)
        trained = run.dataset(data).batch_size(6).num_epochs(2).run()
        assert trained.model is not None
        weights.append(torch.cat([p.detach().flatten() for p in trained.model.parameters()]).tolist())
    return weights


@pytest.mark.parametrize("agent", [True, False], ids=["the launcher keeps the store", "rank 0 keeps it"])
def test_any_number_of_runs_in_one_job(agent: bool) -> None:
    first, second = job(three_runs, agent=agent)
    assert first == second
    assert first[0] == first[1] == first[2]


def group_of_the_user(rank: int) -> list[bool]:
    limit = timedelta(seconds=30)
    dist.init_process_group("gloo", init_method="env://", timeout=limit)
    for _ in range(2):
        ranks = join_ranks()
        assert ranks.sum_(torch.ones(1)).item() == 2.0
        ranks.leave()
    return [dist.is_initialized()]


def test_a_group_that_the_user_made_is_left_alone() -> None:
    assert job(group_of_the_user) == [[True], [True]]

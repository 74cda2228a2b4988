"""A script that starts its own ranks in new processes, on CPUs and, where there are two, on GPUs."""

import json
import os
import subprocess
import sys

import pytest
import torch

SCRIPT = """
import json, sys, torch
from torch import nn
from flodl.data import TensorRows
from flodl.train import Loss, Trainer, Synced, adamw

def model(device):
    return nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 2))

def step(model, batch):
    return Loss(nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"]))

def main(devices, policy, backend, folder):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1024, 8, generator=g)
    data = TensorRows({"x": x, "y": (x.sum(1) > 0).long()})
    def run(**settings):
        made = Trainer.builder(model, adamw(1e-2), step).dataset(data).batch_size(32).num_epochs(3)
        return made.devices(devices).policy(policy).backend(backend).set(anchor=2, max_anchor=4, **settings)
    synced = []
    whole = run().subscribe(synced.append, Synced).run()
    run(folder=folder, resume=True, max_steps=40).run()
    resumed = run(folder=folder, resume=True).run()
    same = all(torch.equal(v, resumed.state_dict()[k]) for k, v in whole.state_dict().items())
    print(json.dumps({
        "losses": [m.loss for m in whole.metrics], "samples": [m.samples for m in whole.metrics],
        "resumed": [m.epoch for m in resumed.metrics], "same": same, "rounds": len(synced),
        "mean": float(whole.buffers["1.running_mean"].abs().max()),
    }))

if __name__ == "__main__":
    torch.set_num_threads(1)
    main(json.loads(sys.argv[1]), *sys.argv[2:])
"""


def go(tmp_path, devices, policy, backend):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), json.dumps(devices), policy, backend, str(tmp_path / "run")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["samples"] == [1024] * 3
    assert found["losses"][-1] < 0.9 * found["losses"][0]
    assert found["resumed"][-1] == 2
    assert found["mean"] > 1e-3
    assert (found["rounds"] > 0) == (policy != "sync")
    if policy == "sync":
        assert found["same"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["sync", "async"])
def test_new_processes_on_cpus(tmp_path, policy):
    go(tmp_path, ["cpu", "cpu"], policy, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("backend", ["nccl", "cpu"])
@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_new_processes_on_gpus(tmp_path, policy, backend):
    go(tmp_path, 2, policy, backend)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["sync"])
def test_one_gpu_in_this_process(tmp_path, policy):
    go(tmp_path, 1, policy, "nccl")

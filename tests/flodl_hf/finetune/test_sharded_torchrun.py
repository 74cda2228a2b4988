"""Shards under torchrun: the command line and the Trainer, two processes that a launcher started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_tables import labelled

from flodl_hf import load
from flodl_hf.finetuning import finetune

ROWS = labelled(28)
OPTIONS: dict[str, Any] = {
    "epochs": 1, "batch_size": 8, "lr": 5e-3, "max_length": 24, "metric": "eval_loss", "dropout": 0.0, "seed": 3,
}  # fmt: skip

OF_ONE_S_OWN = """
import os
import sys

import torch
from torch import nn

from flodl.train import Loss, Trainer, adamw


def make(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def step(model, batch):
    return Loss(nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"]))


draw = torch.Generator().manual_seed(1)
rows = [{"x": torch.randn(6, generator=draw), "y": torch.tensor(place % 3)} for place in range(24)]
run = Trainer.builder(make, adamw(0.01), step).dataset(rows).set(batch_size=8, max_grad_norm=1.0, progress=False)
if sys.argv[2] == "fsdp":
    run.set(shard="fsdp").backend("gloo")
run.checkpoints(sys.argv[1])
run.devices("cpu").num_epochs(2)
handle = run.run().join()
weights = handle.state_dict()
assert not any(hasattr(tensor, "full_tensor") for tensor in weights.values())
torch.save(weights, f"{sys.argv[1]}-{os.environ['RANK']}.pt")
"""


def torchrun(*command: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *command]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd(), "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(started, env=env, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_the_command_trains_shards_under_torchrun(base: Path, tmp_path: Path) -> None:
    train, held = tmp_path / "train.jsonl", tmp_path / "eval.jsonl"
    train.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:20]))
    held.write_text("".join(json.dumps(row) + "\n" for row in ROWS[20:]))
    alone = finetune(base, train=ROWS[:20], eval=ROWS[20:], devices="cpu", report=False, **OPTIONS)
    given = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    done = torchrun(
        "-m", "flodl_hf", "finetune", str(base), "--train", str(train), "--eval", str(held), "--out", str(tmp_path / "out"),
        "--devices", "cpu", "--shard", "fsdp", *given,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-9000:]
    written = load(tmp_path / "out", mapped=False)
    one, other = (dict(model.graph.named_parameters()) for model in (alone.model, written))
    assert one.keys() == other.keys()
    assert max(float((one[name] - other[name]).detach().abs().max()) for name in one) < 1e-4
    assert "shard: fsdp" in (tmp_path / "out" / "recipe.yaml").read_text()


@pytest.mark.slow
def test_the_trainer_shards_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(OF_ONE_S_OWN)
    for name, ranks in (("plain", 1), ("fsdp", 2)):
        done = torchrun(str(script), str(tmp_path / name), name, ranks=ranks)
        assert done.returncode == 0, done.stderr[-9000:]
    plain, cut, other = (
        torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("plain-0", "fsdp-0", "fsdp-1")
    )
    assert plain.keys() == cut.keys() == other.keys()
    assert max(float((plain[name] - cut[name]).abs().max()) for name in plain) < 1e-5
    assert all(torch.equal(cut[name], other[name]) for name in cut)

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
from flodl_hf.training import finetune

ROWS = labelled(28)
OPTIONS: dict[str, Any] = {
    "epochs": 1, "batch_size": 8, "lr": 5e-3, "max_length": 24, "metric": "eval_loss", "dropout": 0.0, "seed": 3,
}  # fmt: skip

OF_ONE_S_OWN = """
import os
import sys

import torch
from torch import nn

from flodl.errors import TrainError
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
trained = run.run()
assert trained.whole == (sys.argv[2] != "fsdp" or os.environ["RANK"] == "0")
if trained.whole:
    weights = trained.state_dict()
    assert not any(hasattr(tensor, "full_tensor") for tensor in weights.values())
    torch.save(weights, f"{sys.argv[1]}-{os.environ['RANK']}.pt")
else:
    assert (trained.parameters, trained.buffers) == ({}, {}) and "on rank 0" in repr(trained)
    for ask in (trained.state_dict, lambda: trained.load_into(nn.Linear(1, 1))):
        try:
            ask()
        except TrainError as fault:
            assert "on rank 0" in str(fault)
        else:
            raise AssertionError
"""

TUNING = """
import json
import sys
import warnings
from pathlib import Path

from flodl.distributed.group import is_first_rank
from flodl.errors import TrainError
from flodl_hf import load
from flodl_hf.training import finetune

base, place = sys.argv[1], Path(sys.argv[2])
rows = json.loads((place / "rows.json").read_text())
result = finetune(
    base, train=rows[:20], eval=rows[20:], devices="cpu", shard="fsdp", epochs=2, batch_size=8, lr=5e-3,
    max_length=24, metric="eval_loss", dropout=0.0, seed=3, report=False, lora=int(sys.argv[3]) or None,
    out=place / "out" if sys.argv[4] == "out" else None, progress=False,
)
assert result.holds_model == is_first_rank()
texts = [row["text"] for row in rows]
if is_first_rank():
    assert result.metrics["eval_loss"] == min(row["eval_loss"] for row in result.history) or sys.argv[4] != "out"
    assert not result.model.untrained
    answers = result.model.predict(texts)
    if sys.argv[4] == "out":
        assert load(place / "out").predict(texts) == answers
    (place / "answers.json").write_text(json.dumps([a.label for a in answers]))
    (place / "losses.json").write_text(json.dumps(result.history[-1]["eval_loss"]))
else:
    assert "the model on rank 0" in repr(result)
    for ask in (lambda: result.model.predict(texts), lambda: result.model(None)):
        try:
            ask()
        except TrainError as fault:
            assert "on rank 0" in str(fault)
        else:
            raise AssertionError
"""

MEMORY = """
import ctypes
import os
import resource
from pathlib import Path

import torch
from torch import nn

from flodl.train import Loss, RunDone, Trainer, sgd

LAYERS, WIDTH = 40, 1024


def make(device):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def step(model, batch):
    return Loss(model(batch["x"]).square().sum(), len(batch["x"]))


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def note(event):
    # What training let go of is given back, and the peak begins anew.
    ctypes.CDLL(None).malloc_trim(0)
    at["training"] = peak()
    Path("/proc/self/clear_refs").write_text("5")
    at["end"] = peak()


rows = [{"x": torch.ones(WIDTH)} for _ in range(4)]
at = {}
run = Trainer.builder(make, sgd(1e-6), step).dataset(rows).set(batch_size=4, progress=False, shard="fsdp").backend("gloo")
run.subscribe(note, RunDone)
trained = run.devices("cpu").num_epochs(1).run()
print(f"rank {os.environ['RANK']}: {at['training']:.0f} {at['end']:.0f} {peak():.0f} {trained.whole}", flush=True)
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
    given = [word for name, value in OPTIONS.items() for word in ("--set", f"{name}={value}")]
    done = torchrun(
        "-m", "flodl_hf", "finetune", str(base), "--train", str(train), "--eval", str(held), "--out", str(tmp_path / "out"),
        "--devices", "cpu", "--shard", "fsdp", *given,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[:9000]
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
        assert done.returncode == 0, done.stderr[:9000]
    plain, cut = (torch.load(tmp_path / f"{name}-0.pt", weights_only=True) for name in ("plain", "fsdp"))
    assert plain.keys() == cut.keys()
    assert max(float((plain[name] - cut[name]).abs().max()) for name in plain) < 1e-5
    assert not (tmp_path / "fsdp-1.pt").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("lora", "where"), [(0, "out"), (2, "out"), (0, "memory")])
def test_the_first_rank_alone_has_the_model_of_shards(lora: int, where: str, base: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    script = tmp_path / "tune.py"
    script.write_text(TUNING)
    done = torchrun(str(script), str(base), str(tmp_path), str(lora), where)
    assert done.returncode == 0, done.stderr[:9000]
    options = {**OPTIONS, "epochs": 2, **({"lora": lora} if lora else {})}
    alone = finetune(
        base, train=ROWS[:20], eval=ROWS[20:], devices="cpu", report=False, keep_best=where == "out", **options
    )
    assert json.loads((tmp_path / "losses.json").read_text()) == pytest.approx(alone.history[-1]["eval_loss"], rel=1e-4)
    found: Any = alone.model.predict([row["text"] for row in ROWS])
    assert json.loads((tmp_path / "answers.json").read_text()) == [answer.label for answer in found]


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="memory is read as Linux tells it")
def test_ranks_without_the_result_never_hold_the_whole(tmp_path: Path) -> None:
    """160 MB of weights: the end of a run adds a few tensors to what a rank has, and on the first rank the whole once."""
    script = tmp_path / "memory.py"
    script.write_text(MEMORY)
    done = torchrun(str(script))
    assert done.returncode == 0, done.stderr[:9000]
    found = {line.split(":")[0]: line.split(": ")[1].split() for line in done.stdout.splitlines() if ": " in line}
    assert (found["rank 0"][3], found["rank 1"][3]) == ("True", "False")
    for rank, most in (("rank 0", 260), ("rank 1", 80)):
        _, begun, peak = map(float, found[rank][:3])
        assert peak - begun < most, found

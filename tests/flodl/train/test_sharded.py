"""Weights in shards, one part on each of two ranks, train as one rank does; checkpoints hold parts and are resumed."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy

from flodl.checkpoint import stored_rows
from flodl.errors import CheckpointError, TrainError
from flodl.train import Loss, Trainer, adamw
from flodl.train.saving.reading import list_checkpoints, read_checkpoint
from flodl.train.saving.state import whole_model

torch.set_num_threads(1)
ROWS = 22


class Rows:
    def __init__(self) -> None:
        g = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(ROWS, 6, generator=g), torch.randint(0, 3, (ROWS,), generator=g)

    def __len__(self) -> int:
        return ROWS

    def get(self, i: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[i], "y": self.y[i]}


class Model(nn.Module):
    """Numbered layers, and parameters of odd sizes around them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh())
        self.head = nn.Linear(5, 3)
        self.register_buffer("scale", torch.full((1,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x)) * self.scale


def make_model(device: torch.device) -> nn.Module:
    torch.manual_seed(3)
    return Model()


def step(model: nn.Module, batch: Any) -> Loss:
    logits = model(batch["x"])
    hits = (logits.argmax(1) == batch["y"]).sum()
    counted = {"accuracy": (hits, len(batch["y"]))}
    return Loss(cross_entropy(logits, batch["y"], reduction="sum"), len(batch["y"]), counted)


def run(ranks: int, folder: Path | None = None, **settings: Any) -> Any:
    """Return the trained state; ten rows a step in passes of at most three, so that ranks differ in how many."""
    options: dict[str, Any] = {"num_epochs": 2, "batch_size": 10, "micro_batch_size": 3, "max_grad_norm": 0.3}
    if ranks > 1:
        options["shard"] = "fsdp"
    accepted = settings.pop("allow_change", ())
    builder = Trainer.builder(make_model, adamw(0.05), step).dataset(Rows()).set(**(options | settings))
    builder.evaluate(step, Rows(), batch_size=5)
    if ranks > 1:
        builder.devices(["cpu"] * ranks, start="fork")
    if folder is not None:
        builder.checkpoints(str(folder), keep_last=5, allow_change=accepted)
    return builder.run()


def reads(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Any:
    """Have bytes of tensors that are read noted by process; return what gives them, by process and file."""
    folder.mkdir()
    before = stored_rows._read_into

    def noting(target: memoryview, piece: Any, *where: Any) -> None:
        with open(folder / str(os.getpid()), "a") as notes:
            notes.write(f"{Path(piece.path).stem} {len(target)}\n")
        before(target, piece, *where)

    monkeypatch.setattr(stored_rows, "_read_into", noting)

    def found() -> dict[str, dict[str, int]]:
        counted: dict[str, dict[str, int]] = {}
        for notes in folder.iterdir():
            own = counted.setdefault(notes.name, defaultdict(int))
            for line in notes.read_text().splitlines():
                name, length = line.split()
                own[name] += int(length)
        return counted

    return found


def furthest(a: Any, b: Any) -> float:
    one, other = a.state_dict(), b.state_dict()
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_ranks_train_as_one_does(precision: str, tmp_path: Path) -> None:
    alone, shared = run(1, precision=precision), run(2, precision=precision)
    # A step sums the same numbers in another order: rows by rank, then ranks.
    assert furthest(alone, shared) < (2e-6 if precision == "fp32" else 3e-2)
    for one, other in zip(alone.metrics, shared.metrics, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5 if precision == "fp32" else 3e-2)
        assert one.eval["eval_loss"] == pytest.approx(
            other.eval["eval_loss"], rel=1e-5 if precision == "fp32" else 3e-2
        )
        assert one.samples == other.samples == ROWS


def test_each_rank_saves_and_reads_its_part_and_a_run_goes_on_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(2, tmp_path / "whole")
    run(2, tmp_path / "cut", max_steps=4)
    took = reads(monkeypatch, tmp_path / "reads")
    [*_, newest] = list_checkpoints(tmp_path / "cut")
    again = run(2, tmp_path / "cut")
    assert furthest(whole, again) == 0.0
    by_rank = took()
    parts = {
        name: sum(tensor.nbytes for part, tensor in held.items() if part.startswith("shard/") and tensor.dim())
        for name, held in read_checkpoint(newest).tensors.items()
    }
    assert len(by_rank) == 2
    for found in by_rank.values():
        own = [name for name in found if name.startswith("rank-") and found[name] >= parts[name]]
        assert len(own) == 1  # of another rank's file at most what is no part of anything, such as counts of steps
        assert all(found[name] < 100 for name in parts if name.startswith("rank-") and name not in own)
    assert sum(found[name] for found in by_rank.values() for name in found) < 1.5 * sum(parts.values()) + 20_000
    [*_, newest] = list_checkpoints(tmp_path / "whole")
    saved = read_checkpoint(newest)
    weights = [saved.tensors[f"rank-{rank}"]["shard/model/layers.0.weight"] for rank in range(2)]
    assert [tuple(part.shape) for part in weights] == [(4, 6), (3, 6)]
    moments = [saved.tensors[f"rank-{rank}"]["shard/optimizer/head.weight::exp_avg"] for rank in range(2)]
    assert [tuple(part.shape) for part in moments] == [(2, 5), (1, 5)]
    assert list(saved.tensors["model"]) == ["scale"]
    found = whole_model(saved.tensors)
    assert found.keys() == whole.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.state_dict().items())


def test_a_part_that_was_changed_has_all_ranks_take_the_checkpoint_before(tmp_path: Path) -> None:
    whole = run(2, tmp_path, save_every=1)
    [*_, newest] = list_checkpoints(tmp_path)
    data = bytearray((newest / "rank-1.safetensors").read_bytes())
    data[-3] ^= 1
    (newest / "rank-1.safetensors").write_bytes(data)
    again = run(2, tmp_path, save_every=1)
    assert furthest(whole, again) == 0.0
    assert newest.with_name(f"{newest.name}.1").is_dir()  # the last step was taken again


def test_rows_in_several_files_are_read_as_those_of_one_tensor(tmp_path: Path) -> None:
    parts = [torch.randn(4, 3), torch.randn(0, 3), torch.randn(2, 3)]
    for i, part in enumerate(parts):
        save_file({"a": part, "b": torch.tensor(float(i))}, tmp_path / f"{i}.safetensors")
    held = [stored_rows.stored_tensors(tmp_path / f"{i}.safetensors") for i in range(3)]
    whole, joined = torch.cat(parts), held[0]["a"].joined([held[1]["a"], held[2]["a"]])
    assert (joined.shape, joined.dtype, joined.dim()) == (whole.shape, whole.dtype, 2)
    for first in range(7):
        assert all(torch.equal(joined[first:last], whole[first:last]) for last in range(8))
    assert torch.equal(joined[...], whole)
    assert held[2]["b"][...] == torch.tensor(2.0)
    (tmp_path / "0.safetensors").write_bytes((tmp_path / "0.safetensors").read_bytes()[:-20])
    with pytest.raises(CheckpointError):
        _ = joined[:4]


def test_one_rank_shards_nothing() -> None:
    assert furthest(run(1), run(1, shard="fsdp")) == 0.0


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"shard": "zero"}, "'fsdp'"),
        ({"policy": "cadence"}, "policy='cadence'"),
        ({"precision": "fp16"}, "fp16"),
        ({"ema": 0.9}, "ema"),
        ({"compile": True, "micro_batch_size": "auto"}, "compile"),
    ],
)
def test_what_does_not_go_with_shards_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(TrainError) as fault:  # not a RankError: no rank was started
        run(2, None, **({"shard": "fsdp"} | settings))
    assert named in str(fault.value)


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    whole = run(2)
    run(2, tmp_path / "cut", max_steps=3)
    again = run(3, tmp_path / "cut", allow_change=("world_size",))
    assert furthest(whole, again) < 2e-6

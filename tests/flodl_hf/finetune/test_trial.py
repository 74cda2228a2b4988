"""Before and beside a run: dry runs, rates, memory, traces and logs of `finetune`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_tables import TABLES, labelled, sentences

from flodl.errors import ConfigError, DataError, TrainError
from flodl_hf import load
from flodl_hf.training import batching, dry_run, find_lr, finetune
from flodl_hf.training.job import plan_job
from flodl_hf.training.options import make_options

torch.set_num_threads(1)


@pytest.mark.parametrize("task", TABLES)
def test_a_dry_run_tries_all_of_it_and_leaves_nothing(task: str, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(base.parent)
    before = sorted(base.parent.iterdir())
    rows = TABLES[task](40)
    found = dry_run(base, train=rows[:32], eval={"dev": rows[32:36], "hard": rows[36:]}, batch_size=8, epochs=5)
    assert found.task == task
    assert found.steps == found.needs.steps == finetune(base, train=rows[:32], batch_size=8, epochs=5).steps
    assert found.batch_size == 8
    assert set(found.eval_rows) == {"dev", "hard"}
    assert {"dev/eval_loss", "hard/eval_loss"} <= found.metrics.keys()
    assert found.needs.fits
    assert json.loads(json.dumps(found.to_dict()))["rows"] == found.rows
    assert f"{found.rows:,} training rows" in str(found)
    assert sorted(base.parent.iterdir()) == before


def test_trials_do_not_change_a_model_at_hand(base: Path) -> None:
    model = finetune(base, train=labelled(16), max_steps=1).model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dry_run(model, train=labelled(16), eval=0.25, freeze=["embeddings"], dropout=0.3)
    found = find_lr(model, train=labelled(32), low=1e-6, high=1e-1, steps=12, batch_size=8)
    assert len(found.losses) <= 12
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        ([{"text": text} for text in sentences()[:16]], {"task": "embedding", "vector_loss": "denoising"}),
        ([{"text": text, "positive": text} for text in sentences()[:16]], {"task": "multivector"}),
    ],
    ids=["decoder", "projection"],
)
def test_trials_leave_nothing_beside_a_model_at_hand(rows: Any, options: Any, base: Path) -> None:
    model: Any = load(base, head="base")
    before, recipe = {name: tensor.clone() for name, tensor in model.state_dict().items()}, model.sentence_recipe
    for trial in (
        lambda: dry_run(model, train=rows, batch_size=8, **options),
        lambda: find_lr(model, train=rows, batch_size=8, steps=8, **options),
    ):
        trial()
        assert model.beside is None
        assert model.sentence_recipe is recipe
        assert model.state_dict().keys() == before.keys()
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_trials_refuse_what_finetune_refuses(base: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'epochs'"):
        dry_run(base, train=labelled(8), epoch=3)  # type: ignore[call-arg]
    with pytest.raises(DataError):
        dry_run(base, train=[])
    with pytest.raises(ConfigError, match="rates above 0"):
        find_lr(base, train=labelled(8), low=1.0, high=0.1)


@pytest.mark.parametrize("layout", ["padded", "packed", "bucketed"])
def test_micro_batches_are_as_large_as_memory_allows(layout: str, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss with little room stands in for a device with little memory."""
    monkeypatch.setattr(batching, "_layout", lambda options: layout)
    from flodl_hf.training.step import Objective

    seen: list[int] = []
    inner = Objective.of

    def of(self: Any, scores: Any, batch: Any) -> Any:
        rows = int(batch["real"].sum()) if "real" in batch else len(scores)
        seen.append(rows)
        if rows > 5:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return inner(self, scores, batch)

    options: dict[str, Any] = {"batch_size": 16, "max_steps": 3, "dropout": 0.0, "optimizer": "sgd", "lr": 0.05}
    rows = labelled(48)
    whole = finetune(base, train=rows, **options).model.state_dict()
    whole = {name: tensor.clone() for name, tensor in whole.items()}
    monkeypatch.setattr(Objective, "of", of)
    found = finetune(base, train=rows, micro_batch_size="auto", **options).model.state_dict()
    assert seen[:3] == [16, 8, 4]
    assert set(seen[3:]) == {4}
    for name, tensor in whole.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=2e-6)
    if layout == "bucketed":
        plan = plan_job(base, rows, None, make_options({**options, "micro_batch_size": "auto"}))
        assert plan.collate.cut_to(4).shapes != plan.collate.shapes
        assert plan.collate.cut_to(4).shapes == plan_job(
            base, rows, None, make_options({**options, "micro_batch_size": 4})
        ).collate.shapes  # fmt: skip


def test_traces_and_logs_lie_where_they_are_asked_for(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    rows = labelled(40)
    finetune(
        base, train=rows, eval=0.2, out=out, batch_size=4, epochs=2, report_to="csv", profile=str(tmp_path / "traces")
    )
    lines = (tmp_path / "out.logs" / "figures.csv").read_text().splitlines()
    assert lines[0] == "step,figure,value"
    assert any(line.split(",")[1] == "eval/accuracy" for line in lines)
    assert len(list((tmp_path / "traces").glob("*.json"))) == 1
    assert "report_to" not in (out / "recipe.yaml").read_text()
    assert load(out) is not None
    elsewhere = tmp_path / "elsewhere"
    finetune(base, train=rows, max_steps=1, report_to=["csv"], logging_dir=str(elsewhere))
    assert (elsewhere / "figures.csv").is_file()


def test_a_log_without_its_package_is_refused_before_training(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(TrainError, match="pip install wandb"):
        finetune(base, train=labelled(8), report_to="wandb")
    with pytest.raises(ConfigError, match="trackers: found 'comet'; expected some of csv, jsonl"):
        finetune(base, train=labelled(8), report_to="comet")
    with pytest.raises(ConfigError, match="micro_batch_size: found 'some'; expected a number"):
        finetune(base, train=labelled(8), micro_batch_size="some")


@pytest.mark.parametrize("options", [{"group_by_length": False}, {"group_by_length": True}, {"tokens_per_batch": 90}])
def test_the_heaviest_batch_is_the_one_that_is_tried(
    options: dict[str, Any], base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flodl_hf.training.step import Objective

    sizes: list[int] = []
    inner = Objective.__call__

    def call(self: Any, model: Any, batch: Any) -> Any:
        sizes.append(batch["input_ids"].numel())
        return inner(self, model, batch)

    monkeypatch.setattr(Objective, "__call__", call)
    finetune(base, train=labelled(48), micro_batch_size="auto", batch_size=4, epochs=1, **options)
    assert sizes[0] == max(sizes[1:])

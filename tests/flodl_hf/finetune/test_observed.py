"""What a fine-tune watches and decides: short paths, rules in Python, in recipes and on the command line, trackers."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_tables import TABLES, labelled

from flodl.errors import ConfigError
from flodl.train import Decided, Observed, RunDone, trackers
from flodl_hf import finetune
from flodl_hf.training.observation import Rules, Watch
from flodl_hf.training.options import TRACKERS

torch.set_num_threads(1)
QUICK: dict[str, Any] = {"epochs": 3, "batch_size": 8, "lr": 1e-3, "progress": False}


def told(base: Path, rows: Any, **options: Any) -> tuple[list[Any], Any]:
    seen: list[Any] = []
    result = finetune(base, train=rows, on_event=seen.append, **{**QUICK, **options})
    return seen, result


def decisions(seen: list[Any]) -> list[tuple[str, str, int]]:
    return [(event.action, event.path, event.step) for event in seen if isinstance(event, Decided)]


@pytest.mark.parametrize("task", TABLES)
def test_states_of_layers_are_told_for_every_task(base: Path, task: str) -> None:
    seen, _ = told(
        base, TABLES[task](16), task=task, epochs=1, callbacks=[Watch(["layers.0-1:norm", "embeddings", "head:max"])]
    )
    found = [event for event in seen if isinstance(event, Observed)]
    names = {"encoder.layers.0:norm", "encoder.layers.1:norm", "encoder.embeddings", "head:max"}
    assert found[-1].scope == "epoch"
    assert all(event.values.keys() == names for event in found)
    assert all(event.values["encoder.layers.0:norm"] > 0 for event in found)


def test_rules_act_on_short_paths_and_the_model_is_given_back_as_it_came(base: Path) -> None:
    rules = [
        "freeze layers.0 when after_epochs(1)",
        "rate embeddings 0.1 when below(layers.1:norm, 1e9) and after_epochs(1)",
        "thaw encoder when after_epochs(2)",
        "stop when above(accuracy, -1) and after_epochs(2)",
    ]
    seen, result = told(
        base, labelled(32), eval=labelled(16), callbacks=[Rules(rules), Watch(["layers.1:norm"])], epochs=5
    )
    assert decisions(seen) == [
        ("freeze", "encoder.layers.0", 4),
        ("rate", "encoder.embeddings", 4),
        ("thaw", "encoder", 8),
        ("stop", "", 8),
    ]
    assert result.steps == 8
    assert all(p.requires_grad for p in result.model.parameters())


def test_a_part_that_is_frozen_from_the_start_is_thawed_by_a_rule(base: Path) -> None:
    seen, result = told(
        base, labelled(32), freeze=["encoder"], callbacks=[Rules(["thaw encoder when after_epochs(1)"])], epochs=1
    )
    still, moved = told(
        base, labelled(32), freeze=["encoder"], callbacks=[Rules(["thaw encoder when after_epochs(1)"])], epochs=2
    )
    assert decisions(seen) == decisions(still)
    at_first = finetune(base, train=labelled(32), freeze=["encoder"], epochs=1, batch_size=8, lr=1e-3, progress=False)
    for name, p in result.model.network.encoder.named_parameters():
        assert torch.equal(p, dict(at_first.model.network.encoder.named_parameters())[name])
    assert not torch.equal(
        moved.model.network.encoder.layers.get_submodule("0").attention.query.weight,
        result.model.network.encoder.layers.get_submodule("0").attention.query.weight,
    )


def test_trends_by_steps_decide_inside_of_an_epoch(base: Path) -> None:
    seen, _ = told(base, labelled(64), callbacks=[Rules(["stop when stalled(loss, 2, 100)"], trend_every=2)], epochs=1)
    assert decisions(seen) == [("stop", "", 4)]


@pytest.mark.parametrize(
    ("callback", "held_out", "part"),
    [
        (Rules(["stop when stalled(los, 2)"]), None, "'los' is a metric of evaluation data"),
        (Rules(["stop when above(acuracy, 1)"]), 0.25, "did you mean 'accuracy'"),
        (Rules(["stop when above(accuracy, 1)"]), "several", "'accuracy' is named 'dev/accuracy' here"),
        (Rules(["stop when stalled(loss, 1)", "frieze a when after_epochs(1)"]), None, "did you mean 'freeze'"),
        (Rules(["freeze layers.0-9 when after_epochs(1)"]), None, "has no '0-9'"),
        (Watch(["layer.0"]), None, "has no 'layer'"),
    ],
)
def test_an_invalid_callback_raises_before_training(base: Path, callback: Any, held_out: Any, part: str) -> None:
    if held_out == "several":
        held_out = {"dev": labelled(8), "test": labelled(8)}
    with pytest.raises(ConfigError) as caught:
        told(base, labelled(16), eval=held_out, callbacks=[callback])
    assert any(part in problem for problem in caught.value.problems)


def test_a_run_that_goes_on_decides_and_writes_as_one_left_alone(base: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "callbacks": [Rules(["freeze layers.0 when after_epochs(1)", "stop when after_epochs(2)"])],
        "trackers": ["csv", "jsonl"],
    }

    def figures(folder: Path) -> dict[tuple[int, str], float]:
        with open(folder / "figures.csv", newline="") as file:
            rows = [(int(row["step"]), row["figure"], float(row["value"])) for row in csv.DictReader(file)]
        assert len(rows) == len({row[:2] for row in rows})  # nothing twice
        return {row[:2]: row[2] for row in rows if "second" not in row[1] and "samples_per_s" not in row[1]}

    _, whole = told(base, labelled(32), out=tmp_path / "whole", **options)
    cut: dict[str, Any] = {**options, "checkpoints": str(tmp_path / "saved"), "log_dir": str(tmp_path / "logs")}
    told(base, labelled(32), out=tmp_path / "part", max_steps=5, save_every=3, **cut)
    seen, rest = told(base, labelled(32), out=tmp_path / "rest", save_every=3, resume=["schedule"], **cut)
    assert decisions(seen) == [("stop", "", 8)]
    assert isinstance(seen[-1], RunDone)
    assert rest.steps == whole.steps == 8
    one, other = figures(tmp_path / "logs"), figures(tmp_path / "whole.logs")
    assert one.keys() == other.keys()


def test_the_table_names_the_trackers_that_there_are() -> None:
    assert set(TRACKERS) == set(trackers.TRACKERS)


def test_the_focal_loss_is_a_loss_of_ones_own(base: Path) -> None:
    from flodl.losses import focal_loss

    _, plain = told(base, labelled(32), epochs=1)
    _, focal = told(base, labelled(32), epochs=1, loss=focal_loss)
    assert len(focal.losses) == len(plain.losses) == 4
    assert all(0 < one < other for one, other in zip(focal.losses[:1], plain.losses[:1], strict=True))

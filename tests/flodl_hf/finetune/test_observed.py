"""What a fine-tune watches and decides: short paths, rules in Python, in recipes and on the command line, trackers."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_tables import TABLES, labelled

from flodl.errors import ConfigError
from flodl.train import Decided, Observed, RunDone, trackers
from flodl_hf import finetune
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
    seen, _ = told(base, TABLES[task](16), task=task, epochs=1, watch=["layers.0-1:norm", "embeddings", "head:max"])
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
    seen, result = told(base, labelled(32), eval=labelled(16), rules=rules, watch=["layers.1:norm"], epochs=5)
    assert decisions(seen) == [
        ("freeze", "encoder.layers.0", 4),
        ("rate", "encoder.embeddings", 4),
        ("thaw", "encoder", 8),
        ("stop", "", 8),
    ]
    assert result.steps == 8
    assert all(p.requires_grad for p in result.model.parameters())


def test_a_part_that_is_frozen_from_the_start_is_thawed_by_a_rule(base: Path) -> None:
    seen, result = told(base, labelled(32), freeze=["encoder"], rules=["thaw encoder when after_epochs(1)"], epochs=1)
    still, moved = told(base, labelled(32), freeze=["encoder"], rules=["thaw encoder when after_epochs(1)"], epochs=2)
    assert decisions(seen) == decisions(still)
    at_first = finetune(base, train=labelled(32), freeze=["encoder"], epochs=1, batch_size=8, lr=1e-3, progress=False)
    for name, p in result.model.network.encoder.named_parameters():
        assert torch.equal(p, dict(at_first.model.network.encoder.named_parameters())[name])
    assert not torch.equal(
        moved.model.network.encoder.layers.get_submodule("0").attention.query.weight,
        result.model.network.encoder.layers.get_submodule("0").attention.query.weight,
    )


def test_trends_by_steps_decide_inside_of_an_epoch(base: Path) -> None:
    seen, _ = told(base, labelled(64), rules=["stop when stalled(loss, 2, 100)"], trend_every=2, epochs=1)
    assert decisions(seen) == [("stop", "", 4)]


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"rules": "stop when stalled(los, 2)"}, "'los' would be a figure of held-out data, and there are none"),
        ({"rules": ["stop when above(acuracy, 1)"], "eval": 0.25}, "did you mean 'accuracy'"),
        ({"rules": ["stop when above(accuracy, 1)"], "eval": "several"}, "'accuracy' is called 'dev/accuracy' here"),
        ({"rules": ["stop when"]}, "found no condition"),
        ({"rules": ["stop when stalled(loss, 1)", "frieze a when after_epochs(1)"]}, "did you mean 'freeze'"),
        ({"rules": ["freeze layers.0-9 when after_epochs(1)"]}, "has no '0-9'"),
        ({"watch": ["layer.0"]}, "has no 'layer'"),
        ({"trend_every": 5}, "there are no rules"),
        ({"trend_every": 0, "rules": ["stop when after_steps(1)"]}, "trend_every"),
    ],
)
def test_what_cannot_be_is_refused_before_training(base: Path, options: dict[str, Any], part: str) -> None:
    if options.get("eval") == "several":
        options = {**options, "eval": {"dev": labelled(8), "test": labelled(8)}}
    with pytest.raises(ConfigError) as caught:
        told(base, labelled(16), **options)
    assert part in str(caught.value)


def test_recipes_and_the_command_line_say_rules_and_trackers(base: Path, tmp_path: Path) -> None:
    runner = pytest.importorskip("typer.testing").CliRunner()
    from flodl_hf.cli.app import app

    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in labelled(32)))
    recipe = tmp_path / "run.yaml"
    recipe.write_text(
        f"model: {base}\ntrain: {data}\nepochs: 4\nbatch_size: 8\nlr: 1e-3\n"
        "watch: ['layers.0:norm']\nrules:\n  - stop when stalled(loss, 2, 100) and after_epochs(3)\n"
        "  - freeze layers.0 when after_epochs(1)\n"
    )
    out = tmp_path / "out"
    said = runner.invoke(app, ["finetune", "--recipe", str(recipe), "--out", str(out), "--trackers", "csv,jsonl"])
    assert said.exit_code == 0, said.output
    told_events = [json.loads(line) for line in (tmp_path / "out.logs" / "events.jsonl").read_text().splitlines()]
    decided = [(event["action"], event["step"]) for event in told_events if event["event"] == "Decided"]
    assert decided == [("freeze", 4), ("stop", 12)]
    assert (out / "recipe.yaml").read_text().count("when") == 2
    flags = ["finetune", str(base), "--train", str(data), "--batch-size", "8", "--epochs", "3"]
    flags += ["--rules", "stop when stalled(loss, 2, 100)", "--rules", "freeze layers.0 when after_epochs(1)"]
    said = runner.invoke(app, [*flags, "--json"])
    assert said.exit_code == 0, said.output
    assert json.loads(said.stdout[said.stdout.index("{") :])["steps"] == 8
    said = runner.invoke(app, [*flags, "--rules", "stop when stall(loss, 2)"])
    assert said.exit_code == 1
    assert "did you mean 'stalled'" in " ".join(said.output.split())


def test_a_run_that_goes_on_decides_and_writes_as_one_left_alone(base: Path, tmp_path: Path) -> None:
    options = {
        "rules": ["freeze layers.0 when after_epochs(1)", "stop when after_epochs(2)"],
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
    seen, rest = told(
        base, labelled(32), out=tmp_path / "rest", save_every=3, resume=True, allow_change=["schedule"], **cut
    )
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

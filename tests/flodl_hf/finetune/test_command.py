"""``flodl-hf finetune`` and ``config show``: files in, a folder and its papers out."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from finetune_tables import labelled

from flodl.distributed.group import Summed
from flodl_hf import load
from flodl_hf.training import run as run_module
from flodl_hf.training.result import FinetuneResult

pytest.importorskip("typer")
from typer.testing import CliRunner

from flodl_hf.cli.app import app
from flodl_hf.cli.finetune import _loading, usual_folder

QUICK = ["--epochs", "1", "--batch-size", "16", "--lr", "1e-3"]


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    rows = labelled(48)
    for name, part in (("train.csv", rows[:40]), ("dev.csv", rows[40:])):
        with (tmp_path / name).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["text", "label"])
            writer.writeheader()
            writer.writerows(part)
    return str(tmp_path / "train.csv"), str(tmp_path / "dev.csv")


def run(*args: Any, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert result.exit_code == code, result.output
    return result


def test_a_model_comes_out_with_its_papers(base: Path, files: tuple[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = run("finetune", base, "--train", files[0], "--eval", files[1], "--out", out, *QUICK)
    assert "accuracy" in said.stdout
    assert str(out) in said.stdout
    card = (out / "README.md").read_text()
    assert card.startswith("---\npipeline_tag: text-classification\n")
    assert "| train | train.csv | 40 |" in card
    assert str(tmp_path) not in card
    facts = json.loads((out / "training.json").read_text())
    assert facts["policy"] == {"name": "sync", "reason": "there is one rank"}
    assert f"| accuracy | {facts['metrics']['accuracy']:.4f} |" in card
    assert facts["data"]["train"]["rows"] == 40
    config = json.loads((out / "config.json").read_text())
    assert config["id2label"] == {"0": "complaint", "1": "praise"}
    assert config["problem_type"] == "single_label_classification"


def test_the_written_recipe_makes_the_same_model_again(base: Path, files: tuple[str, str], tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    options = ["--freeze", "embeddings,layers.0", "--class-weights", "praise=2.0", "--warmup", "0.1", "--seed", "3"]
    run("finetune", base, "--train", files[0], "--eval", files[1], "--out", first, *QUICK, *options)
    run("finetune", "--recipe", first / "recipe.yaml", "--out", second)
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert (first / "recipe.yaml").read_bytes() == (second / "recipe.yaml").read_bytes()
    assert load(second).config.labels == ("complaint", "praise")


def test_a_recipe_an_overlay_and_the_command_line_lie_over_each_other(
    base: Path, files: tuple[str, str], tmp_path: Path
) -> None:
    recipe = tmp_path / "run.yaml"
    recipe.write_text(f"model: {base}\ntrain: {files[0]}\nepochs: 50\nlr: 1e-3\nbatch_size: 4\nseed: 5\n")
    (tmp_path / "run.ci.yaml").write_text("epochs: 1\nbatch_size: 8\nseed: null\n")
    said = run("finetune", "--recipe", recipe, "--env", "ci", "--batch-size", "20", "--json", "--out", tmp_path / "out")
    told = json.loads(said.stdout)
    assert told["steps"] == 2
    assert told["summed"] is None  # there is one rank
    written = (tmp_path / "out" / "recipe.yaml").read_text()
    assert "seed: 42\n" in written
    assert "batch_size: 20\n" in written


@pytest.mark.parametrize("summed", [Summed("peer memory"), Summed("NCCL", "FLODL_PEER_MEMORY is 0")], ids=str)
def test_by_what_gradients_were_summed_is_said(summed: Summed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = tmp_path / "t.csv"
    train.write_text("text,label\na cat,1\n")
    model: Any = None
    done = FinetuneResult(model, None, "rank", {}, [], [], 2, 2, 1.0, {}, summed=summed)
    monkeypatch.setattr(run_module, "finetune", lambda *args, **options: done)
    said = run("finetune", "m", "--train", train, "--json")
    assert f"gradients: summed by {summed}\n" in said.stderr
    assert json.loads(said.stdout)["summed"] == {"by": summed.by, "reason": summed.reason}


def test_show_gives_each_value_with_its_origin(tmp_path: Path) -> None:
    recipe = tmp_path / "run.yaml"
    recipe.write_text("epochs: 5\ncolumns:\n  text: body\n")
    (tmp_path / "run.ci.yaml").write_text("epochs: 1\n")
    rows = [line.split("  #") for line in run("config", "show", recipe, "--env", "ci").stdout.splitlines()]
    shown = {value.strip(): origin.strip() for value, origin in rows}
    assert shown == {"epochs: 1": "run.ci.yaml:1", 'columns.text: "body"': "run.yaml:3"}
    both = json.loads(run("config", "show", recipe, "--json").stdout)
    assert both["values"] == {"epochs": 5, "columns": {"text": "body"}}
    assert "lr: 5e-05" in run("config", "show", recipe, "--defaults").stdout


def test_show_reports_options_that_do_not_exist(tmp_path: Path) -> None:
    recipe = tmp_path / "run.yaml"
    recipe.write_text("epoch: 5\n")
    assert "did you mean 'epochs'" in run("config", "show", recipe, code=1).stderr


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["finetune"], "no model and no train"),
        (["finetune", "x", "--train", "y", "--env", "ci"], "no --recipe"),
        (["finetune", "no/where", "--train", "y.csv", "--local-files-only"], "y.csv"),
        (["finetune", "x", "--train", "y", "--columns", "text"], "expected name=value"),
    ],
)
def test_faults_are_one_message_and_status_1(args: list[str], says: str) -> None:
    assert says in run(*args, code=1).stderr


def test_a_run_without_a_folder_is_kept_under_the_models_name_and_overwrites_nothing(
    base: Path, files: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["finetune", base, "--train", files[0], *QUICK]
    said = run(*given)
    target = f"{base.name}-finetuned"
    assert f"the model will be written to {target}; --out DIR names another folder" in said.stderr
    assert f"written to {tmp_path / target}" in said.stdout
    assert load(tmp_path / target).config.labels == ("complaint", "praise")
    first = (tmp_path / target / "model.safetensors").stat().st_ino
    for number in (2, 3):
        assert f"written to {target}-{number}; --out DIR" in run(*given).stderr
    assert (tmp_path / target / "model.safetensors").stat().st_ino == first
    assert f"written to {target}-3;" in run(*given, "--overwrite").stderr
    (tmp_path / f"{target}-4.checkpoints" / "step-1").mkdir(parents=True)  # of a run that was ended
    assert usual_folder(base) == Path(f"{target}-5")
    assert usual_folder(base, again=True) == Path(f"{target}-4")


@pytest.mark.parametrize(
    ("model", "folder"), [("owner/name", "name"), ("owner/name@v1", "name"), ("name", "name"), ("./a/b/", "b")]
)
def test_the_usual_folder_has_the_last_part_of_the_models_name(model: str, folder: str) -> None:
    assert usual_folder(model) == Path(f"{folder}-finetuned")


@pytest.mark.parametrize("out", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_ctrl_c_says_how_to_go_on(base: Path, files: tuple[str, str], tmp_path: Path, out: bool) -> None:
    command = [sys.executable, "-m", "flodl_hf.cli", "finetune", str(base), "--train", files[0], "--epochs", "100000"]
    command += ["--out", str(tmp_path / "out")] if out else []
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=tmp_path) as run:
        assert run.stderr is not None
        said = [next(line for line in run.stderr if line.startswith("epoch 1:"))]
        run.send_signal(signal.SIGINT)
        said += list(run.stderr)
    assert run.returncode == 130
    stopped = next(line for line in said if line.startswith("stopped after step "))
    assert "--resume" in stopped
    kept = "out" if out else f"{base.name}-finetuned"
    assert list(tmp_path.glob(f"{kept}.checkpoints/step-*"))


def test_a_dry_run_and_a_search_of_rates_write_nothing(base: Path, files: tuple[str, str], tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    given = ["finetune", base, "--train", files[0], "--out", tmp_path / "out", "--batch-size", "8"]
    said = run(*given, "--eval", "0.2", "--dry-run", "--epochs", "4").stdout
    assert "32 training rows" in said
    assert "evaluation: 8 rows" in said
    assert "16 steps of" in said
    found = json.loads(run(*given, "--find-lr", "--json").stdout)
    assert found["rates"][0] == pytest.approx(1e-7)
    assert "steps at rates of 1.0e-07 to" in run(*given, "--find-lr").stdout
    assert sorted(tmp_path.iterdir()) == before


def test_several_sets_curves_and_logs_by_flags(base: Path, files: tuple[str, str], tmp_path: Path) -> None:
    said = run(
        "finetune", base, "--train", files[0], "--eval", f"dev={files[1]},same={files[1]}", "--out", tmp_path / "out",
        *QUICK, "--schedule", "polynomial", "--schedule-options", "power=2,end=1e-7", "--ema", "0.9", "--trackers", "csv",
        "--neftune", "5", "--micro-batch-size", "auto", "--keep-last", "2",
    )  # fmt: skip
    assert "dev/accuracy" in said.stdout
    recipe = (tmp_path / "out" / "recipe.yaml").read_text()
    assert "power: 2.0" in recipe
    assert "ema: 0.9" in recipe
    assert (tmp_path / "out.logs" / "figures.csv").is_file()


@pytest.mark.parametrize(
    ("devices", "device"),
    [(None, "auto"), ("cpu", "cpu"), ("cuda:1", "cuda:1"), ("auto", None), (2, None), (["cuda:0", "cuda:1"], None)],
)
def test_a_device_is_made_ready_while_torch_is_imported_where_this_process_trains(devices: Any, device: Any) -> None:
    assert _loading({"devices": devices}) == {"device": device, "mapped": False}
    assert _loading({"shard": "fsdp"})["mapped"], "parts are read by the ranks that hold them"

"""Which device commands run on: the best there is, named on stderr, unless ``--device`` says another."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flodl_hf import jobs as bulk
from flodl_hf import load
from flodl_hf.heads import auto

typer_testing = pytest.importorskip("typer.testing")


@pytest.fixture
def folder(saved: Callable[..., Path]) -> str:
    return str(saved("bert", "sequence_classification", labels=["bad", "good"]))


def run(*arguments: Any, code: int = 0) -> Any:
    from flodl_hf.cli.app import app

    done = typer_testing.CliRunner().invoke(app, [str(a) for a in arguments])
    assert done.exit_code == code, done.output
    return done


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let this machine say that it has two CUDA devices; return where models would have been loaded."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    asked: list[Any] = []

    def loaded(name: Any, *, device: Any, **options: Any) -> Any:
        asked.append(device)
        return load(name, **options)

    def answered(*args: Any, device: Any = None, devices: Any = None, **options: Any) -> Any:
        asked.append(device or devices)
        return bulk.FileResult(Path("out.jsonl"))

    monkeypatch.setattr(auto, "load", loaded)
    monkeypatch.setattr(bulk, "predict_file", answered)
    return asked


def test_the_best_device_is_taken_and_named(folder: str, on_a_gpu: list[Any], tmp_path: Path) -> None:
    done = run("predict", folder, "the cat")
    assert on_a_gpu.pop() == "cuda"
    assert "on cuda:0 (GPU 0)\n" in done.stderr
    assert "GPU" not in done.stdout
    run("predict", folder, "the cat", "--device", "cpu")
    assert on_a_gpu.pop() == "cpu"
    done = run("predict", folder, "the cat", "--device", "cuda:1", "--json")
    assert on_a_gpu.pop() == "cuda:1"
    assert "on cuda:1 (GPU 1)\n" in done.stderr
    (tmp_path / "in.txt").write_text("the cat\n")
    files = ["--in", tmp_path / "in.txt", "--out", tmp_path / "out.jsonl"]
    done = run("predict", folder, *files)
    assert on_a_gpu.pop() == "cuda"
    assert "on cuda:0 (GPU 0)\n" in done.stderr
    run("predict", folder, *files, "--device", "cpu")
    assert on_a_gpu.pop() == "cpu"
    run("predict", folder, *files, "--devices", "auto")
    assert on_a_gpu.pop() == "auto"


@pytest.mark.parametrize("rest", [[], ["--json"]])
def test_a_device_that_is_absent_is_one_line(folder: str, tmp_path: Path, rest: list[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    (tmp_path / "in.csv").write_text("text,label\nthe cat,bad\na dog,good\n")
    files = ["--in", tmp_path / "in.csv", "--out", tmp_path / "out.jsonl"]
    train = ["finetune", folder, "--train", tmp_path / "in.csv", "--out", tmp_path / "new"]
    for command in (
        ["predict", folder, "the cat", "--device", "cuda"],
        ["predict", folder, *files, "--device", "cuda:3"],
        ["predict", folder, *files, "--devices", "cuda:0,cuda:1"],
        [*train, "--devices", "cuda:0"],
        [*train, "--device", "cuda"],
        ["inspect", folder, "--device", "cudo"],
    ):
        done = run(*command, *rest, code=1)
        [line] = done.stderr.splitlines()
        assert line.startswith("DeviceError: device: "), line
        assert json.loads(done.stdout)["error"] == "DeviceError" if rest else not done.stdout
    assert not (tmp_path / "out.jsonl").exists()
    assert not (tmp_path / "new").exists()


def test_models_are_loaded_to_a_device_by_name(folder: str) -> None:
    from flodl.errors import DeviceError

    model: Any = load(folder, device="auto")
    found = [model.predict("the cat", devices=d, precision="exact") for d in ("auto", [str(model.device)])]
    assert found[0] == found[1]
    for call in (
        lambda: load(folder, device="cuda:99"),
        lambda: model.predict("the cat", devices=["cuda:99"]),
        lambda: model.runtime(devices=["gpu"]),
        lambda: model.explain("gpu"),
    ):
        with pytest.raises(DeviceError, match=r"^device: "):
            call()


def test_training_says_where(folder: str, tmp_path: Path) -> None:
    from flodl_hf import finetune

    (tmp_path / "in.csv").write_text("text,label\nthe cat,bad\na dog,good\n")
    train = ["finetune", folder, "--train", tmp_path / "in.csv", "--max-steps", "1", "--out", tmp_path / "tuned"]
    assert "training on cpu (" in run(*train, "--device", "cpu").stderr
    done = finetune(folder, train=str(tmp_path / "in.csv"), max_steps=1, devices="auto", out=tmp_path / "new")
    assert done.steps == 1
    assert "devices: auto" in (tmp_path / "new" / "recipe.yaml").read_text()


def test_training_devices_are_listed(on_a_gpu: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    from flodl_hf.cli.shared import training_said

    for given, said in (
        (None, "training on cuda:0 (GPU 0); 1 more idle, --devices auto takes all"),
        ("auto", "training on cuda:0 (GPU 0), cuda:1 (GPU 1)"),
        (2, "training on cuda:0 (GPU 0), cuda:1 (GPU 1)"),
        ("cuda:1", "training on cuda:1 (GPU 1); 1 more idle, --devices auto takes all"),
    ):
        training_said(given)
        assert capsys.readouterr().err == f"{said}\n"
    training_said(["cpu", "cpu"])
    assert capsys.readouterr().err.startswith("training on 2 x cpu (")


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_inspect_says_what_the_model_explains(folder: str, device: str) -> None:
    model = load(folder)
    for precision in (None, "exact", "fp32", *(["bf16"] if device == "cuda" else [])):
        rest = ["--precision", precision] if precision else []
        told = str(model.explain(device, precision))  # type: ignore[arg-type]
        assert run("inspect", folder, "--device", device, *rest).stdout.endswith(f"{told}\n")
        found = json.loads(run("inspect", folder, "--device", device, *rest, "--json").stdout)["runs"]
        assert found == model.explain(device, precision).to_dict()  # type: ignore[arg-type]
    assert "runs" not in json.loads(run("inspect", folder, "--json").stdout)
    assert "tf33" in run("inspect", folder, "--precision", "tf33", code=2).stderr


@pytest.mark.filterwarnings("default")
def test_a_fall_off_is_one_warning_with_its_reason(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = load(folder)
    model.graph.get_submodule("encoder.layers.1.attention.query").register_forward_hook(lambda *given: None)
    reason = next(group.reason for group in model.explain("cpu").groups if group.table == "torch")
    monkeypatch.setattr(auto, "load", lambda *given, **options: model)
    done = run("predict", folder, "the cat", "a dog", "--device", "cpu")
    [line] = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert "1 layer runs on torch's own operations, more slowly" in line
    assert reason in line
    assert "encoder.layers.1" in line
    assert "warning" not in run("predict", folder, "the cat", "--device", "cpu").stderr

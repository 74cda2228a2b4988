"""Options have the same names everywhere: device, devices, dtype, precision and batch_size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from flodl_hf import encode_file, load, predict_file
from flodl_hf.cli.app import app_for
from flodl_hf.errors import PredictError
from flodl_hf.inference import cpu

TYPES = [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")]


@pytest.mark.parametrize(("short", "long"), [*TYPES, ("fp64", "float64")])
def test_weights_are_stored_in_a_type_of_either_name(demo_model: Path, short: str, long: str) -> None:
    assert load(demo_model, dtype=short).dtype == load(demo_model, dtype=long).dtype == getattr(torch, long)


@pytest.mark.parametrize(("short", "long"), TYPES[:2])  # processors do not compute in fp16
def test_predictions_compute_in_a_type_of_either_name(
    demo_model: Path, short: str, long: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "multiplies_bf16", lambda: True)  # on other processors it is only slower
    model = load(demo_model)
    found = [model.predict(["a fine film"], precision=name)[0].score for name in (short, long)]
    assert found[0] == found[1]


@pytest.mark.parametrize("words", [["--precision", "{}"], ["--precision={}"]])
@pytest.mark.parametrize("name", TYPES[1])
def test_commands_take_either_name_of_a_precision(
    demo_model: Path, words: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "multiplies_bf16", lambda: True)
    args = ["predict", str(demo_model), "a fine film", "--json", *(word.format(name) for word in words)]
    args += ["--", "--precision=bfloat16"]  # a text
    found = CliRunner().invoke(app_for(args), args)
    assert found.exit_code == 0, found.output
    assert [json.loads(line)["text"] for line in found.stdout.splitlines()] == ["a fine film", "--precision=bfloat16"]


@pytest.mark.parametrize("name", TYPES[2])
def test_an_export_takes_either_name_of_a_type(demo_model: Path, tmp_path: Path, name: str) -> None:
    args = ["export", str(demo_model), "--out", str(tmp_path / "out"), "--dtype", name]
    assert CliRunner().invoke(app_for(args), args).exit_code == 0
    assert load(tmp_path / "out").dtype == torch.float16


def test_several_devices_of_a_model_are_those_of_its_predictions(demo_model: Path) -> None:
    model = load(demo_model, devices=["cpu", "cpu"])
    assert [str(device) for device in model.run_options.devices or ()] == ["cpu", "cpu"]
    assert model.predict(["a fine film"])[0].label == load(demo_model).predict(["a fine film"])[0].label


@pytest.mark.parametrize("devices", [5, "cpu", []])
def test_devices_that_are_no_list_are_refused_before_loading(demo_model: Path, devices: Any) -> None:
    with pytest.raises(PredictError) as refused:
        load(demo_model, devices=devices)
    assert refused.value.devices == devices


def test_the_device_of_the_weights_is_one_of_the_devices(demo_model: Path) -> None:
    assert load(demo_model, devices=["cpu"], device="cpu").device == torch.device("cpu")
    with pytest.raises(PredictError) as refused:
        load(demo_model, devices=["cpu"], device="meta")
    assert refused.value.device == "meta"


@pytest.mark.parametrize("call", [predict_file, encode_file])
def test_file_jobs_take_a_batch_size(call: Any, demo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a fine film\na dull film\n")
    for name, options in (("usual", {}), ("small", {"batch_size": 1})):
        call(demo_model, tmp_path / "in.txt", tmp_path / f"{name}.jsonl", precision="exact", **options)
    assert (tmp_path / "usual.jsonl").read_bytes() == (tmp_path / "small.jsonl").read_bytes()
    with pytest.raises(PredictError) as refused:
        call(demo_model, tmp_path / "in.txt", tmp_path / "none.jsonl", batch_size=0)
    assert refused.value.problems == ["batch_size"]


@pytest.mark.parametrize("command", ["predict", "encode"])
def test_commands_of_files_take_a_batch_size(command: str, demo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a fine film\n")
    files = ["--in", str(tmp_path / "in.txt"), "--out", str(tmp_path / "out.jsonl")]
    args = [command, str(demo_model), *files, "--batch-size", "8"]
    assert CliRunner().invoke(app_for(args), args).exit_code == 0

"""Folders of adapters: peft's format read and written, and every way in which one can be wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from flodl.errors import CheckpointError, ConfigError
from flodl_hf import AutoModelForQuestionAnswering, AutoModelForSequenceClassification, load
from flodl_hf.cli.app import app
from flodl_hf.errors import ExportError

IDS = torch.tensor([[2, 5, 6, 7, 3], [2, 9, 8, 11, 3]])
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# As peft 0.21.2 writes it, for such an adapter.
OF_PEFT = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None, "bias": "none",
    "corda_config": None, "ensure_weight_tying": False, "eva_config": None, "exclude_modules": None,
    "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True, "layer_replication": None,
    "layers_pattern": None, "layers_to_transform": None, "loftq_config": {}, "lora_alpha": 8, "lora_bias": False,
    "lora_dropout": 0.0, "megatron_config": None, "megatron_core": "megatron.core",
    "modules_to_save": ["classifier", "score"], "peft_type": "LORA", "peft_version": "0.21.2", "qalora_group_size": 16,
    "r": 4, "rank_pattern": {}, "revision": None, "target_modules": ["query", "value"], "target_parameters": None,
    "task_type": "SEQ_CLS", "trainable_token_indices": None, "use_dora": False, "use_qalora": False,
    "use_rslora": False,
}  # fmt: skip


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.fixture
def folder(adapted: Callable[..., Any], tmp_path: Path) -> Path:
    return adapted().save_pretrained(tmp_path / "adapter")


@pytest.mark.parametrize("merged", [False, True])
def test_what_does_not_read_back_never_stands_in_place(
    adapted: Any, tmp_path: Path, merged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that a disk changed as they were written; an adapter's alone, and a whole model's."""
    model = adapted()
    if merged:
        model.merge_adapter()
    old = model.save_pretrained(tmp_path / "out")
    before = {file.name: file.read_bytes() for file in old.iterdir()}

    def differ(folder: Path, files: Any) -> None:
        raise ExportError(f"{folder}: read again, 1 files are not what was written", path=str(folder), problems=["x"])

    monkeypatch.setattr("flodl_hf.models.saving.verify_files", differ)
    for place in (old, tmp_path / "new"):
        with pytest.raises(ExportError, match="read again"):
            model.save_pretrained(place, overwrite=True)
    assert {file.name: file.read_bytes() for file in old.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir() if path.name in ("out", "new")) == ["out"]


def edit(folder: Path, **changes: Any) -> Path:
    values = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("kind", [{}, {"dora": True, "targets": "all-linear"}, {"ranks": {"query": 2}}])
def test_what_is_written_comes_back_with_its_bits(adapted: Any, base: Path, tmp_path: Path, kind: dict) -> None:
    model = adapted(**kind)
    folder = model.save_pretrained(tmp_path / "adapter")
    back: Any = AutoModelForSequenceClassification.from_pretrained(base, adapter=folder)
    assert torch.equal(logits(back), logits(model))
    assert back.adapters["default"].dora == bool(kind.get("dora"))
    by_itself: Any = load(folder)  # the file names its base
    assert torch.equal(logits(by_itself), logits(model))
    again = back.save_pretrained(tmp_path / "again")
    for name in (CONFIG, WEIGHTS, "head_config.json"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()


def test_names_are_pefts_and_the_head_is_there(folder: Path) -> None:
    names = set(load_file(folder / WEIGHTS))
    at = "base_model.model.bert.encoder.layer"
    assert names == {
        *(f"{at}.{i}.attention.self.{p}.lora_{x}.weight" for i in range(2) for p in ("query", "value") for x in "AB"),
        "base_model.model.classifier.weight",
        "base_model.model.classifier.bias",
    }
    values = json.loads((folder / CONFIG).read_text())
    assert (values["r"], values["lora_alpha"], values["task_type"]) == (4, 8, "SEQ_CLS")
    assert (values["target_modules"], values["modules_to_save"]) == (["query", "value"], ["classifier"])


def test_a_folder_of_pefts_is_read(adapted: Any, base: Path, folder: Path) -> None:
    wanted = logits(adapted())
    (folder / CONFIG).write_text(json.dumps({**OF_PEFT, "base_model_name_or_path": str(base)}))
    (folder / "head_config.json").unlink()
    model: Any = load(folder)
    assert torch.equal(logits(model), wanted)
    assert json.loads((model.save_pretrained(folder.parent / "again") / CONFIG).read_text())["peft_version"] == "0.21.2"


def test_names_that_peft_gives_to_biases_are_read(adapted: Any, base: Path, folder: Path) -> None:
    values, at = load_file(folder / WEIGHTS), "base_model.model.bert.encoder.layer.0.attention.self.query"
    model = adapted()
    bias = model.graph.get_submodule("encoder.layers.0.attention.query").bias
    with torch.no_grad():
        bias.add_(torch.arange(len(bias)))
    values[f"{at}.base_layer.bias"] = bias.detach().clone()
    head = "base_model.model.classifier"
    values[f"{head}.original_module.bias"] = torch.randn_like(values[f"{head}.bias"])
    values[f"{head}.default.bias"] = values.pop(f"{head}.bias")
    save_file(values, folder / WEIGHTS)
    found: Any = AutoModelForSequenceClassification.from_pretrained(base, adapter=edit(folder, bias="all"))
    assert torch.equal(logits(found), logits(model))
    assert not torch.equal(logits(found), logits(adapted()))


def test_a_folder_without_its_head_is_refused_where_answers_would_be_random(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file({n: t for n, t in tensors.items() if "classifier" not in n}, folder / WEIGHTS)
    bare: Any = load(json.loads((folder / CONFIG).read_text())["base_model_name_or_path"], head="base")
    bare.save_pretrained(tmp_path / "bare")  # a base that has no head either
    with pytest.raises(CheckpointError) as fault:
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "bare", adapter=folder)
    assert {"head.classifier.weight", "head.classifier.bias"} <= set(fault.value.details["headless"])
    assert "random values" in str(fault.value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"peft_type": "ADALORA"}, "peft_type"),
        ({"use_qalora": True}, "use_qalora"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"some_new_way": "fast"}, "some_new_way"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"r": "4"}, "r:"),
        ({"r": 0}, "rank 0"),
        ({"target_modules": None}, "target_modules"),
        ({"target_modules": "(a+)+$"}, "target_modules"),
        ({"exclude_modules": 5}, "exclude_modules"),
        ({"modules_to_save": [5]}, "modules_to_save"),
        ({"layers_to_transform": 0.5}, "layers_to_transform"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"lora_alpha": float("nan")}, "NaN"),
        ({"alpha_pattern": {"query": None}}, "alpha_pattern"),
        ({"alpha_pattern": {"query": "3"}}, "alpha_pattern"),
    ],
)
def test_settings_that_change_numbers_are_refused_by_name(folder: Path, change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as fault:
        load(edit(folder, **change))
    assert any(problem in found for found in fault.value.details["problems"])
    assert CONFIG in str(fault.value)


def test_settings_that_are_not_set_or_change_nothing_are_passed_over(folder: Path) -> None:
    before = logits(load(folder))
    edit(folder, some_new_way=None, another=False, more={}, inference_mode=False, peft_version="9.9")
    assert torch.equal(logits(load(folder)), before)


def _lost(tensors: dict[str, Any]) -> str:
    name = next(n for n in tensors if n.endswith("1.attention.self.value.lora_B.weight"))
    del tensors[name]
    return name.removesuffix(".lora_B.weight")


def _whole_layer(tensors: dict[str, Any]) -> str:
    for name in [n for n in tensors if ".layer.1." in n and "query" in n]:
        del tensors[name]
    return "base_model.model.bert.encoder.layer.1.attention.self.query.lora_A.weight"


def _half_a_head(tensors: dict[str, Any]) -> str:
    del tensors["base_model.model.classifier.bias"]
    return "modules_to_save names its module"


def _strange(tensors: dict[str, Any]) -> str:
    tensors["base_model.model.bert.encoder.layer.7.attention.self.query.lora_A.weight"] = torch.zeros(4, 64)
    return "base_model.model.bert.encoder.layer.7"


def _reshaped(tensors: dict[str, Any]) -> str:
    name = next(n for n in tensors if "lora_A" in n)
    tensors[name] = tensors[name][:, :-1].contiguous()
    return name.removesuffix(".lora_A.weight")


def _not_finite(tensors: dict[str, Any]) -> str:
    name = next(n for n in tensors if "lora_B" in n)
    tensors[name][0, 0] = float("nan")
    return name


def _headless(tensors: dict[str, Any]) -> str:
    tensors["base_model.model.classifier.weight"] = torch.zeros(3, 7)
    return "base_model.model.classifier.weight"


@pytest.mark.parametrize("damage", [_lost, _whole_layer, _half_a_head, _strange, _reshaped, _not_finite, _headless])
def test_tensors_that_do_not_fit_are_named(folder: Path, base: Path, damage: Callable[[dict[str, Any]], str]) -> None:
    tensors = load_file(folder / WEIGHTS)
    named = damage(tensors)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(CheckpointError) as fault:
        AutoModelForSequenceClassification.from_pretrained(base, adapter=folder, labels=["a", "b"])
    assert any(named in found for found in fault.value.details["problems"]), fault.value


def test_an_adapter_of_another_task_is_refused(folder: Path, base: Path) -> None:
    with pytest.raises(CheckpointError, match="sequence_classification"):
        AutoModelForQuestionAnswering.from_pretrained(base, adapter=folder)


def test_a_fault_leaves_the_model_as_it_was(adapted: Any, folder: Path) -> None:
    model = adapted(seed=3)
    before = logits(model)
    (folder / WEIGHTS).write_bytes(b"no weights")
    with pytest.raises(CheckpointError):
        model.load_adapter(folder, "other")
    assert (model.active_adapter, list(model.adapters)) == ("default", ["default"])
    assert torch.equal(logits(model), before)


def test_a_folder_without_a_base_says_how_to_open_it(folder: Path, base: Path) -> None:
    edit(folder, base_model_name_or_path=None)
    with pytest.raises(ConfigError, match="adapter="):
        load(folder)
    assert load(base, adapter=folder).active_adapter == "default"


def test_merge_writes_a_whole_folder(adapted: Any, folder: Path, base: Path, tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["merge", str(base), str(folder), "--out", str(tmp_path / "full")])
    assert ran.exit_code == 0, ran.output
    assert "warning" not in ran.stderr
    whole: Any = load(tmp_path / "full")
    model = adapted()
    assert not whole.adapters
    assert torch.allclose(logits(whole), logits(model), rtol=0, atol=1e-5)
    assert torch.equal(logits(whole), logits(model.merge_adapter()))
    ran = CliRunner().invoke(app, ["verify", str(tmp_path / "full")])
    assert ran.exit_code == 0, ran.output


def test_merge_warns_of_another_base(folder: Path, base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "other")
    ran = CliRunner().invoke(app, ["merge", str(tmp_path / "other"), str(folder), "--out", str(tmp_path / "full")])
    assert ran.exit_code == 0, ran.output
    assert f"the base is {tmp_path / 'other'}" in ran.stderr


def test_a_command_for_whole_models_names_merge_for_an_adapter(folder: Path) -> None:
    ran = CliRunner().invoke(app, ["inspect", str(folder)])
    assert ran.exit_code == 1
    assert "flodl-hf merge" in ran.output


def test_export_of_an_adapter_with_its_head_reports_no_untrained_tensors(tmp_path: Path, folder: Path) -> None:
    from flodl_hf import AutoModel

    config = json.loads((folder / CONFIG).read_text())
    bare = AutoModel.from_pretrained(config["base_model_name_or_path"]).save_pretrained(tmp_path / "bare")
    edit(folder, base_model_name_or_path=str(bare))
    ran = CliRunner().invoke(app, ["export", str(folder), "--out", str(tmp_path / "again")])
    assert ran.exit_code == 0, ran.output
    assert "untrained" not in ran.output
    assert "verify-export" not in ran.output  # which compares whole models

"""Learned scales (IA3): what they compute, their folders with the head, merged and taken out; beside peft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import moved  # pyright: ignore[reportMissingImports]
from safetensors.torch import load_file, save_file

from flodl.errors import CheckpointError, ConfigError
from flodl_hf import AutoModel, AutoModelForSequenceClassification, load
from flodl_hf.errors import PredictError
from flodl_hf.models.adapters import IA3, Lora
from flodl_hf.parity.cell import Bench, Cell, all_cells
from flodl_hf.training import demo, finetune

IDS = torch.tensor([[2, 5, 6, 7, 3], [2, 8, 9, 10, 3]])
TEXTS = ["a good film", "bad", "the soup was cold"]


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.fixture
def scaled(base: Path) -> Any:
    model: Any = AutoModelForSequenceClassification.from_pretrained(base)
    return moved(model.add_adapter(IA3()))


def test_scales_stand_where_they_were_asked_for_and_the_base_stays(base: Path, scaled: Any) -> None:
    plain: Any = AutoModelForSequenceClassification.from_pretrained(base)
    fresh: Any = AutoModelForSequenceClassification.from_pretrained(base).add_adapter(IA3())
    assert torch.equal(logits(fresh), logits(plain))
    learning = {name for name, p in scaled.named_parameters() if p.requires_grad}
    ends = {name.rpartition("layers.0.")[2] for name in learning if "layers.0." in name}
    assert ends == {"attention.key.ia3.scales", "attention.value.ia3.scales", "feed_forward.down.ia3.scales"}
    layer = scaled.graph.get_submodule("encoder.layers.0.feed_forward.down")
    x = torch.randn(3, layer.in_features)
    assert torch.equal(layer(x), torch.nn.functional.linear(x * layer.ia3.scales, layer.weight, layer.bias))
    assert not torch.allclose(logits(scaled), logits(plain), atol=1e-3)
    for name, value in scaled.set_adapter(None).state_dict().items():
        assert torch.equal(value, plain.state_dict()[name])
    assert torch.equal(logits(scaled), logits(plain))


def test_merged_they_are_one_weight_and_bias_and_come_out_to_the_bit(scaled: Any) -> None:
    before, state = logits(scaled), {n: v.clone() for n, v in scaled.state_dict().items()}
    exact = scaled.predict(TEXTS, precision="exact")
    for found, right in zip(scaled.predict(TEXTS), exact, strict=True):
        assert {a.label: a.score for a in found} == pytest.approx({a.label: a.score for a in right}, abs=1e-5)
    scaled.merge_adapter()
    assert torch.allclose(logits(scaled), before, atol=1e-5)
    scaled.unmerge_adapter()
    assert all(torch.equal(value, state[name]) for name, value in scaled.state_dict().items())
    assert torch.equal(logits(scaled), before)
    assert torch.allclose(logits(scaled.merge_and_unload()), before, atol=1e-5)


def test_a_folder_keeps_the_head_and_is_refused_without(base: Path, scaled: Any, tmp_path: Path) -> None:
    scaled.save_pretrained(tmp_path / "scales")
    assert torch.equal(logits(load(tmp_path / "scales")), logits(scaled))
    AutoModel.from_pretrained(base).save_pretrained(tmp_path / "headless")
    file = tmp_path / "scales" / "adapter_model.safetensors"
    tensors = load_file(file)
    assert sum(name.endswith(".ia3_l") for name in tensors) == 6
    save_file({n: t for n, t in tensors.items() if "classifier" not in n}, file)
    with pytest.raises(CheckpointError, match=r"no head: head\.classifier"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "headless", adapter=tmp_path / "scales")
    name = next(name for name in tensors if name.endswith(".ia3_l"))
    save_file(tensors | {name: tensors[name].flatten()}, file)
    with pytest.raises(CheckpointError, match="ia3_l: shape"):
        load(tmp_path / "scales")
    further = name.replace(".ia3_l", ".lora_B.bias")
    save_file(tensors | {further: torch.zeros(2)}, file)
    with pytest.raises(CheckpointError) as refused:
        load(tmp_path / "scales")
    (problem,) = refused.value.problems
    assert problem.startswith(f"{further}: ")
    assert name in problem
    settings = json.loads((tmp_path / "scales" / "adapter_config.json").read_text())
    (tmp_path / "scales" / "adapter_config.json").write_text(json.dumps(settings | {"unheard_of": 3}))
    with pytest.raises(ConfigError, match="unheard_of"):
        load(tmp_path / "scales")


def test_they_share_a_model_with_sums_but_no_batch(scaled: Any) -> None:
    moved(scaled.add_adapter(Lora(rank=2), "sums"), "sums")
    with pytest.raises(PredictError, match="scales states"):
        scaled.predict_mixed(TEXTS, ["default", "sums", "sums"])
    assert scaled.adapters == {"default": IA3(), "sums": Lora(rank=2)}
    with pytest.raises(ConfigError, match="IA3: found targets"):
        IA3(targets=("",))


def test_fine_tuning_trains_scales_and_the_head_alone(base: Path, tmp_path: Path) -> None:
    rows = [{"text": text, "label": demo.LABELS[label]} for text, label in demo.sentences()[:32]]
    result = finetune(base, train=rows, out=tmp_path / "out", adapter=IA3(), epochs=1, batch_size=8, lr=1e-2)
    found: Any = load(tmp_path / "out")
    assert isinstance(found.adapters["default"], IA3)
    assert (
        found._held_adapters.known["default"].parts.keys() == result.model._held_adapters.known["default"].parts.keys()
    )
    assert torch.equal(logits(found), logits(result.model.to("cpu")))
    start = load(base).state_dict()
    fixed = result.model._fixed_names()
    assert fixed
    assert all(torch.equal(result.model.state_dict()[name], start[name]) for name in fixed if name in start)


QUICK = (("bert", "sequence_classification"), ("modernbert", "base"))


def cells() -> list[Any]:
    found = []
    for cell in all_cells():
        if (
            cell.head in ("base", "sequence_classification")
            and cell.record.tiny
            and (cell.head == "base" or cell.head in cell.record.heads)
        ):
            quick = (cell.family, cell.head) in QUICK and cell.variant == "base"
            found.append(pytest.param(cell, id=cell.name, marks=() if quick else pytest.mark.slow))
    return found


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")  # of transformers, which peft calls by older names
@pytest.mark.parametrize("cell", cells())
def test_peft_reads_them_and_what_it_writes_is_read(cell: Cell, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    with Bench(cell) as bench:
        model: Any = bench.load()
        moved(model.add_adapter(IA3())).save_pretrained(tmp_path / "ours")
        theirs = peft.PeftModel.from_pretrained(bench.load_theirs().model, tmp_path / "ours").eval()
        theirs.save_pretrained(tmp_path / "theirs")
        again: Any = type(model).from_pretrained(bench.folder, adapter=tmp_path / "theirs")
        for batch in bench.batches():
            with torch.no_grad():
                ours, back = model.eval()(**batch.inputs), again.eval()(**batch.inputs)
                right = theirs.get_base_model()(**batch.inputs)
            for name, value in right.items():
                assert torch.equal(ours[name], back[name]), (batch.name, name)
                # Query, key and value of one matrix are three products here, and one there.
                same = torch.equal(ours[name], value)
                assert same or (cell.family != "bert" and torch.allclose(ours[name], value, atol=1e-5)), (
                    batch.name,
                    name,
                )

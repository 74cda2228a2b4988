"""What a family record can state beyond names and sizes: kept tensors of one head, a token limit, own methods."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flodl_hf import AutoConfig, load
from flodl_hf import families as known
from flodl_hf.errors import CheckpointError
from flodl_hf.families import bert, register
from flodl_hf.families.schema import PassthroughTensor
from flodl_hf.heads.auto import head_named

SIZES: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    "max_position_embeddings": 40, "type_vocab_size": 2,
}  # fmt: skip
EXTRA = "cls.sketch.weight"


def doubled(model: Any, number: int) -> tuple[str, int]:
    """Return the model type and twice a number."""
    return model.config.model_type, 2 * number


@pytest.fixture(autouse=True)
def sketched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "_registered", {})  # other tests list the registered families
    heads = dict(bert.FAMILY.heads)
    heads["masked_lm"] = replace(heads["masked_lm"], kept=(PassthroughTensor(EXTRA, "read by no layer"),))
    register(
        bert.FAMILY.renamed(
            "sketched", "Sketched", heads=heads, max_tokens=lambda config: config.num_layers * 16,
            methods={"doubled": f"{__name__}:doubled"},
        )
    )  # fmt: skip


def written(folder: Path, head: str, *, extra: bool) -> Path:
    kind = head_named(head)
    values = SIZES | {"architectures": ["Sketched" + kind.hf_suffix]}
    kind.model.from_config(AutoConfig.for_model("sketched", **values)).save_pretrained(folder)
    if extra:
        file = folder / "model.safetensors"
        save_file(load_file(file) | {EXTRA: torch.arange(3.0)}, file, metadata={"format": "pt"})
    return folder


def test_a_head_keeps_a_tensor_that_it_does_not_use_and_writes_it_back(tmp_path: Path) -> None:
    model = load(written(tmp_path / "whole", "masked_lm", extra=True))
    assert not model.load_report.new
    assert EXTRA in model.load_report.ignored
    again = load_file(model.save_pretrained(tmp_path / "again") / "model.safetensors")
    assert torch.equal(again[EXTRA], torch.arange(3.0))


def test_another_head_names_the_tensor_and_does_not_write_it(tmp_path: Path) -> None:
    folder = written(tmp_path / "whole", "masked_lm", extra=True)
    base: Any = load(folder, head="base")
    assert base.load_report.ignored[EXTRA] == "read by no layer"
    assert EXTRA not in load_file(base.save_pretrained(tmp_path / "base") / "model.safetensors")


def test_a_tensor_that_no_head_states_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "whole", "masked_lm", extra=False)
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"cls.predictions.other.weight": torch.ones(3)}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as no:
        load(folder)
    assert "cls.predictions.other.weight" in str(no.value.problems)


def test_a_family_limits_the_tokens_of_a_text() -> None:
    config = AutoConfig.for_model("sketched", **SIZES)
    assert config.max_tokens == 16
    assert head_named("base").model.from_config(config).max_tokens == 16
    assert AutoConfig.for_model("bert", **SIZES).max_tokens == 40


def test_models_of_a_family_have_its_methods_and_others_do_not() -> None:
    model: Any = head_named("base").model.from_config(AutoConfig.for_model("sketched", **SIZES))
    assert model.doubled(4) == ("sketched", 8)
    assert "doubled" in dir(model)
    other: Any = head_named("base").model.from_config(AutoConfig.for_model("bert", **SIZES))
    assert not hasattr(other, "doubled")
    assert not hasattr(other, "predict_contacts")

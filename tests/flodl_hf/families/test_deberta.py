"""DeBERTa's first version: names of its authors' code, its tokenizer, and its norm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from flodl.errors import CheckpointError
from flodl_hf import load
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.families import named
from flodl_hf.heads.auto import head_named
from flodl_hf.nn.joined_tensors import part_of, split
from flodl_hf.nn.layers import StepwiseNorm, normalised
from flodl_hf.parity.cell import settings_of
from flodl_hf.tokenization.tokenizer import Tokenizer

IDS = torch.tensor([[1, 9, 17, 33, 41, 8, 2], [1, 30, 2, 0, 0, 0, 0]])
MASK = torch.tensor([[1] * 7, [1] * 3 + [0] * 4])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    family = named("deberta")
    assert family is not None
    config = ModelConfig.for_model("deberta", **settings_of(family, "tiny"))
    model = head_named("base").model.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return model.save_pretrained(tmp_path / "saved")


def as_the_authors(folder: Path, out: Path, **more: torch.Tensor) -> Path:
    """Return a folder with the same tensors under the names that the authors' code writes."""
    tensors = load_file(folder / "model.safetensors")
    renamed: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        stem, found, _ = name.partition("in_proj.")
        if found:
            for index, part in enumerate(("query", "key", "value")):
                mark = part_of(f"in_proj[{index}/3 of 4].weight")
                assert mark is not None
                renamed[f"bert.{stem}{part}_proj.weight"] = split(value, mark)
            continue
        name = name.replace("q_bias", "query_proj.bias").replace("v_bias", "value_proj.bias")
        renamed["bert." + name.replace("pos_proj.", "pos_key_proj.").replace("pos_q_proj.", "pos_query_proj.")] = value
    out.mkdir()
    save_file({name: value.clone() for name, value in (renamed | more).items()}, out / "model.safetensors")
    (out / "config.json").write_text((folder / "config.json").read_text("utf-8"), "utf-8")
    return out


def test_files_of_the_authors_code_are_read_and_written_back(folder: Path, tmp_path: Path) -> None:
    theirs = as_the_authors(folder, tmp_path / "theirs")
    ours, again = load(folder).eval(), load(theirs).eval()
    with torch.no_grad():
        assert torch.equal(ours(IDS, MASK)[0], again(IDS, MASK)[0])
    written = load_file(again.save_pretrained(tmp_path / "again") / "model.safetensors")
    before = load_file(theirs / "model.safetensors")
    assert written.keys() == before.keys()
    assert all(torch.equal(written[name], before[name]) for name in before)


def test_a_bias_of_keys_is_refused_because_nothing_here_adds_it(folder: Path, tmp_path: Path) -> None:
    more = {"bert.encoder.layer.0.attention.self.key_proj.bias": torch.ones(32)}
    with pytest.raises(CheckpointError, match=r"key_proj\.bias"):
        load(as_the_authors(folder, tmp_path / "theirs", **more))


def test_two_texts_are_separated_twice_as_transformers_5_does() -> None:
    words = ["[CLS]", "[SEP]", "[PAD]", "[UNK]", "[MASK]", "a", "b", "\u0120"]
    files = {
        "vocab.json": json.dumps({word: i for i, word in enumerate(words)}).encode(),
        "merges.txt": b"#version: 0.2\n",
    }
    tokenizer = Tokenizer.from_files(files, model_type="deberta")
    encoded = tokenizer("a", "b", return_token_type_ids=True)
    assert encoded.tokens() == ["[CLS]", "a", "[SEP]", "[SEP]", "b", "[SEP]"]
    assert encoded.token_type_ids == [0, 0, 0, 0, 0, 0]
    assert tokenizer("a [MASK]").tokens() == ["[CLS]", "a", "\u0120", "[MASK]", "[SEP]"]


def test_the_stepwise_norm_is_torchs_up_to_rounding() -> None:
    norm = StepwiseNorm(24, eps=1e-7)
    with torch.no_grad():
        norm.weight.normal_()
        norm.bias.normal_()
    x = torch.randn(5, 24) * 3
    torch.testing.assert_close(norm(x), normalised(norm, x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norm(x), F.layer_norm(x, (24,), norm.weight, norm.bias, 1e-7), rtol=1e-5, atol=1e-5)

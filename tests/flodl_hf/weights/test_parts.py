"""Tensors of a file that hold several of ours: cut on load, joined on export, and multiplied as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

from flodl.errors import CheckpointError
from flodl_hf import load
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.heads.auto import head_named
from flodl_hf.nn.joined_tensors import join, joined, named_part, part_of, products, split


@given(count=st.integers(1, 4), groups=st.integers(1, 3), rows=st.integers(1, 3), width=st.integers(1, 3))
def test_parts_are_cut_and_joined_to_the_bit(count: int, groups: int, rows: int, width: int) -> None:
    whole = torch.randn(count * groups * rows, width)
    mark = f"[{{}}/{count} of {groups}]" if groups > 1 else f"[{{}}/{count}]"
    names = [f"a.b{mark.format(index)}.weight" for index in range(count)]
    found = [part_of(name) for name in names]
    assert all(part is not None and part.whole == "a.b.weight" for part in found)
    cut: Any = {name: split(whole, part) for name, part in zip(names, found, strict=True) if part is not None}
    assert all(len(piece) == groups * rows for piece in cut.values())
    again = joined({"before": 1, **cut, "after": 2})
    assert list(again) == ["before", "a.b.weight", "after"]
    assert torch.equal(again["a.b.weight"], whole)
    bias = torch.arange(count * groups * rows)
    assert torch.equal(join([split(bias, part) for part in found if part is not None], groups), bias)


def test_a_name_without_a_mark_is_a_whole() -> None:
    assert part_of("layers.0.attn.Wo.weight") is None
    assert named_part("x.Wqkv.bias", "model.layers.0.attn.Wqkv[1/3].bias") == "x.Wqkv[1/3].bias"


def test_neighbours_in_memory_are_joined_without_a_copy() -> None:
    whole = torch.randn(9, 4)
    parts: list[torch.Tensor] = [nn.Parameter(piece, requires_grad=False) for piece in whole.chunk(3)]
    with torch.no_grad():
        assert join(parts).data_ptr() == whole.data_ptr()
        assert join(parts[::-1]).data_ptr() != whole.data_ptr()
        assert torch.equal(join(parts[::-1]), torch.cat(parts[::-1]))
        assert torch.equal(join([parts[0], parts[2]]), torch.cat([parts[0], parts[2]]))
    assert join(parts).data_ptr() != whole.data_ptr()  # a gradient has to find its way to each


@pytest.mark.parametrize("bias", [True, False])
def test_one_product_gives_what_one_matrix_gives(bias: bool) -> None:
    linears = [nn.Linear(6, width, bias=bias) for width in (4, 4, 2)]
    states = torch.randn(5, 6, requires_grad=True)
    weight = torch.cat([linear.weight for linear in linears])
    offset = torch.cat([linear.bias for linear in linears]) if bias else None
    right = F.linear(states, weight, offset)
    assert torch.equal(torch.cat(products(states, *linears), -1), right)
    called = []
    linears[1].register_forward_hook(lambda *_: called.append(1))
    torch.testing.assert_close(torch.cat(products(states, *linears), -1), right)
    assert called == [1]


def made(folder: Path) -> Path:
    settings: dict[str, Any] = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = ModelConfig.for_model("modernbert", **settings, intermediate_size=24, pad_token_id=0)
    return head_named("tokcls").model.from_config(config).save_pretrained(folder)


def test_a_trained_model_is_written_with_whole_tensors(tmp_path: Path) -> None:
    source = made(tmp_path / "a")
    before = load_file(source / "model.safetensors")
    assert before["model.layers.1.attn.Wqkv.weight"].shape == (48, 16)
    assert before["model.layers.1.mlp.Wi.weight"].shape == (48, 16)
    assert not any("[" in name for name in before)
    model = load(source)
    with torch.no_grad():
        model.graph.get_parameter("encoder.layers.1.attention.key.weight").mul_(2)
    after = load_file(model.save_pretrained(tmp_path / "b") / "model.safetensors")
    assert list(after) == list(before)
    changed = before["model.layers.1.attn.Wqkv.weight"].clone()
    changed[16:32] *= 2
    assert torch.equal(after["model.layers.1.attn.Wqkv.weight"], changed)
    others = [name for name in before if not torch.equal(before[name], after[name])]
    assert others == ["model.layers.1.attn.Wqkv.weight"]


def test_a_whole_of_another_size_is_refused_by_its_parts(tmp_path: Path) -> None:
    source = made(tmp_path / "a")
    held = load_file(source / "model.safetensors")
    held["model.layers.0.attn.Wqkv.weight"] = torch.zeros(45, 16)
    del held["model.layers.1.mlp.Wi.weight"]
    save_file(held, source / "model.safetensors")
    with pytest.raises(CheckpointError) as fault:
        load(source)
    text = str(fault.value)
    assert "model.layers.0.attn.Wqkv[0/3].weight: found [15, 16]; expected [16, 16]" in text
    assert "model.layers.1.mlp.Wi[0/2].weight [24, 16]" in text

"""Folders of weights for the tests of reading and writing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor


def some_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        "bert.embeddings.word_embeddings.weight": torch.randn(11, 6, generator=generator),
        "bert.encoder.layer.0.attention.self.query.weight": torch.randn(6, 6, generator=generator),
        "bert.encoder.layer.0.attention.self.query.bias": torch.randn(6, generator=generator),
        "bert.embeddings.LayerNorm.gamma": torch.randn(6, generator=generator).bfloat16(),
        "classifier.weight": torch.randn(3, 6, generator=generator).half(),
        "classifier.bias": torch.randn(3, generator=generator).double(),
        "bert.embeddings.position_ids": torch.arange(5)[None],
    }


def save_single(folder: Path, tensors: Mapping[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def save_sharded(folder: Path, tensors: Mapping[str, Tensor], count: int = 3) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for place in range(count):
        file = f"model-{place + 1:05d}-of-{count:05d}.safetensors"
        part = {name: tensors[name] for name in names[place::count]}
        safetensors.torch.save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return folder


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return some_tensors()


@pytest.fixture
def single(tmp_path: Path, tensors: dict[str, Tensor]) -> Path:
    return save_single(tmp_path / "single", tensors)


@pytest.fixture
def sharded(tmp_path: Path, tensors: dict[str, Tensor]) -> Path:
    return save_sharded(tmp_path / "sharded", tensors)

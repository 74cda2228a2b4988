"""Tables of tensors, folders made of them, and what it means that two are the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from hypothesis import strategies as st
from torch import Tensor

from flodl_hf.checkpoints.weights.manifest import DTYPES

# The library's own reader knows no names for these.
DTYPE_LIST = [dtype for name, dtype in DTYPES.items() if "FNUZ" not in name and "E8M0" not in name]
NAMES = st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp")), min_size=1, max_size=20).filter(
    lambda name: name != "__metadata__"
)
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def same(one: Tensor, other: Tensor) -> bool:
    """Equal in dtype, shape and every byte: a NaN equals itself."""
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)


TABLES = st.dictionaries(
    NAMES,
    st.builds(random_tensor, st.sampled_from(DTYPE_LIST), SHAPES, st.integers(0, 2**31)),
    min_size=1,
    max_size=6,
)


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

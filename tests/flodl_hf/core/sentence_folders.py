"""Small files of sentence-transformers' folders, made for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

TEXTS = ["the cat sat on the mat", "ada lives in paris. good film!", "a dog"]
ST = "sentence_transformers.models."


def write(folder: Path, files: dict[str, Any]) -> Path:
    for name, value in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())
    return folder


def modules(*parts: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (kind, path) in enumerate(parts)]


def layer(out: int, size: int, activation: str = "activation.Tanh", *, bias: bool = True) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(out)
    tensors = {"linear.weight": torch.randn(out, size, generator=draw) / size**0.5}
    if bias:
        tensors["linear.bias"] = torch.randn(out, generator=draw)
    said = {
        "in_features": size,
        "out_features": out,
        "bias": bias,
        "activation_function": f"torch.nn.modules.{activation}",
    }
    return {"config.json": said, "model.safetensors": save(tensors, {"format": "pt"}), "tensors": tensors}


def states_of(model: Any, text: str) -> Tensor:
    encoded = model.tokenizer([text], return_tensors="pt")
    with torch.no_grad():
        return model(encoded["input_ids"])[0][0]

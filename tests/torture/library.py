"""The library under test, used as its users do: load a folder, answer texts, save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["answers", "ids", "load", "prepare", "save", "scores", "tensors"]


def prepare() -> None:
    """Import the modules that the cases need, before worker processes are forked."""
    for module in (
        "flodl_hf",
        "flodl_hf.tokenization.tokenizer",
        "flodl_hf.inference.pipeline",
        "flodl_hf.export",
        "flodl_hf.checkpoints.weights.torch_file",
    ):
        import_module(module)


def load(folder: Path | str, head: str, **options: Any) -> Any:
    """Return the model of a folder for a head, with its tokenizer."""
    from flodl_hf import load

    return load(folder, head=head, **options)


def tensors(model: Any) -> Mapping[str, Tensor]:
    """Return the model's weights by their names in the file."""
    return {stored: model.graph.get_parameter(name).detach() for name, stored in model.source.placed.items()}


def ids(model: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of texts."""
    return [list(model.tokenizer(text)["input_ids"]) for text in texts]


def scores(model: Any, ids: Tensor) -> Tensor:
    """Return the model's first output for ids, ``(batch, seq)``."""
    with torch.no_grad():
        return model(input_ids=ids)[0]


def answers(model: Any, texts: Sequence[str]) -> Tensor:
    """Return the model's first output for each text alone, flattened and concatenated."""
    found = []
    for text in texts:
        encoded = model.tokenizer(text, return_tensors="pt", truncation=True, max_length=32)
        with torch.no_grad():
            found.append(model(**encoded)[0].reshape(-1))
    return torch.cat(found)


def save(model: Any, folder: Path) -> None:
    """Write the model to a folder, replacing its contents."""
    model.save_pretrained(folder, overwrite=True)

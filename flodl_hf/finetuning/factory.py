"""The model of a run: opened with the right head and labels, some parts frozen, made ready to train.

Decides what of a model is touched for training alone, and undoes it. Which tensors a checkpoint gives is decided
in `flodl_hf.source`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flodl.errors import ConfigError, nearest

if TYPE_CHECKING:
    from flodl_hf.model import EncoderModel

__all__ = ["ModelFactory", "checkpoint_layers", "freeze", "frozen_paths", "restore_layers", "set_dropout"]


@dataclass(frozen=True)
class ModelFactory:
    """Opens the model of a run; every rank calls it with its device.

    Args:
        name: folder or Hub name.
        head: the head's name.
        labels: label names; None keeps the source's.
        problem_type: what the labels are.
        freeze: parts that do not learn.
        dropout: in place of the model's own.
        options: further options of ``from_pretrained``.
        new_head: draw the head anew, though the source has one.
    """

    name: str | Path
    head: str
    labels: tuple[str, ...] | None
    problem_type: str | None
    freeze: Sequence[str]
    dropout: float | None
    options: dict[str, Any]
    new_head: bool = False

    def __call__(self, device: torch.device) -> EncoderModel:
        """Return the model, on the CPU: the trainer moves it."""
        return self.ready(self.open())

    def open(self) -> EncoderModel:
        """Return the model as it is in its folder, with the head and labels of this run."""
        from flodl_hf.auto import head_named

        # Weights that learn are kept in float32; a run in half precision casts as it computes.
        model = head_named(self.head).model.from_pretrained(
            self.name,
            labels=self.labels,
            problem_type=self.problem_type,
            dtype=torch.float32,
            **self.options,
        )
        if self.new_head:
            from flodl_hf.model import initialise

            drawn = [name for name, _ in model.graph.named_parameters() if name.startswith("head.")]
            initialise(model.graph, drawn, float(model.config.source.get("initializer_range", 0.02)))
        return model

    def ready(self, model: EncoderModel) -> EncoderModel:
        """Return ``model`` with parts frozen and dropout set."""
        freeze(model, self.freeze)
        if self.dropout is not None:
            set_dropout(model, self.dropout)
        return model


@dataclass(frozen=True)
class Given:
    """Hands out a model that exists already."""

    model: Any

    def __call__(self, device: torch.device) -> Any:
        """Return the model."""
        return self.model


def frozen_paths(model: EncoderModel, paths: Sequence[str]) -> list[str]:
    """Return the full paths that short ones stand for: ``layers.0-2`` is three layers of the encoder.

    Raises:
        ConfigError: nothing lies at a path; ``problems`` lists these.
    """
    names = [name for name, _ in model.graph.named_parameters()]
    parents = {".".join(parts[:k]) for name in names for parts in [name.split(".")] for k in range(1, len(parts) + 1)}
    found, problems = [], []
    for path in paths:
        match = re.fullmatch(r"(.*?)(\d+)-(\d+)(.*)", path)
        wanted = [path]
        if match:
            head, first, last, tail = match.groups()
            wanted = [f"{head}{i}{tail}" for i in range(int(first), int(last) + 1)]
        for one in wanted:
            full = next((p for p in (one, f"encoder.{one}") if p in parents), None)
            if full is None:
                known = {p.removeprefix("encoder.") for p in parents} | parents
                problems.append(f"{one}{nearest(one, known)}")
            else:
                found.append(full)
    if problems:
        roots = sorted({name.split(".")[0] for name in names})
        raise ConfigError(
            f"freeze: nothing lies at {'; '.join(problems)}. Expected paths such as embeddings, layers.0-5, "
            f"layers.3.attention or one of {', '.join(roots)}",
            problems=problems,
        )
    return found


def freeze(model: EncoderModel, paths: Sequence[str]) -> None:
    """Exclude what lies at ``paths`` from training; see `frozen_paths`.

    Raises:
        ConfigError: nothing lies at a path, or nothing would be left to train.
    """
    if not paths:
        return
    places = frozen_paths(model, paths)
    for name, parameter in model.graph.named_parameters():
        if any(name == place or name.startswith(place + ".") for place in places):
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError(f"freeze: {', '.join(paths)} leave nothing to train", problems=list(paths))


def set_dropout(model: nn.Module, probability: float) -> list[tuple[Any, str, float]]:
    """Set every dropout of a model; return what they were, to be put back."""
    before: list[tuple[Any, str, float]] = []
    for module in model.modules():
        for name in ("p", "attention_dropout"):
            # Where the attribute is a module, that one's own probability is set.
            number = isinstance(getattr(module, name, None), (int, float))
            if (name == "p" and isinstance(module, nn.Dropout)) or (name != "p" and number):
                before.append((module, name, getattr(module, name)))
                setattr(module, name, probability)
    return before


def checkpoint_layers(model: Any) -> None:
    """Make every encoder layer keep only its input, and compute its inside again in the backward pass."""
    for layer in _layers(model):
        layer.forward = partial(checkpoint, type(layer).forward.__get__(layer), use_reentrant=False)


def restore_layers(model: Any) -> None:
    """Undo `checkpoint_layers`."""
    for layer in _layers(model):
        layer.__dict__.pop("forward", None)


def _layers(model: Any) -> list[nn.Module]:
    return list(dict.fromkeys(model.graph.get_submodule("encoder.layers").children()))

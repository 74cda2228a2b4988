"""The model of a run: opened with the right head and labels, some parts frozen, made ready to train.

Decides what of a model is touched for training alone, and undoes it. Which tensors a checkpoint gives is decided
in `flodl_hf.model.pretrained`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flodl_hf.model.freezing import freeze

if TYPE_CHECKING:
    from flodl_hf.adapters.settings import Settings
    from flodl_hf.model.encoder_model import EncoderModel

__all__ = ["ModelFactory", "checkpoint_layers", "restore_layers", "set_dropout"]


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
        adapter: added, to learn in place of the base; None for none.
        seed: of what is drawn; None leaves the generator as it is.
        start: gives the model further parts that learn; None for none.
    """

    name: str | Path
    head: str
    labels: tuple[str, ...] | None
    problem_type: str | None
    freeze: Sequence[str]
    dropout: float | None
    options: dict[str, Any]
    new_head: bool = False
    adapter: Settings | None = None
    seed: int | None = None
    start: Callable[[EncoderModel], Any] | None = None

    def __call__(self, device: torch.device) -> EncoderModel:
        """Return the model, on the CPU: the trainer moves it."""
        return self.ready(self.open())

    def open(self) -> EncoderModel:
        """Return the model as it is in its folder, with the head and labels of this run."""
        from flodl_hf.auto import head_named

        if self.seed is not None:
            torch.manual_seed(self.seed)  # every rank draws the same
        # Weights that learn are kept in float32; a run in half precision casts as it computes.
        model = head_named(self.head).model.from_pretrained(
            self.name,
            labels=self.labels,
            problem_type=self.problem_type,
            dtype=torch.float32,
            **{"weights": "memory", **self.options},
        )
        if self.new_head:
            from flodl_hf.model.building import initialise

            drawn = [name for name, _ in model.graph.named_parameters() if name.startswith("head.")]
            initialise(model.graph, drawn, float(model.config.source.get("initializer_range", 0.02)))
        if self.adapter is not None:
            model.add_adapter(self.adapter)
        if self.start is not None:
            self.start(model)
        return model

    def ready(self, model: EncoderModel) -> EncoderModel:
        """Return ``model`` with parts frozen and dropout set."""
        freeze(model, self.freeze)
        if self.dropout is not None:
            set_dropout(model, self.dropout)
        return model


@dataclass(frozen=True)
class FixedModel:
    """Hands out a model that exists already."""

    model: Any

    def __call__(self, device: torch.device) -> Any:
        """Return the model."""
        return self.model


def set_dropout(model: nn.Module, probability: float) -> list[tuple[Any, str, float]]:
    """Set every dropout of a model; return what they were, to be put back."""
    before: list[tuple[Any, str, float]] = []
    for module in model.modules():
        for name in ("p", "attention_dropout", "inner_dropout"):
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

"""Losses at several vector sizes, or after several layers.

Matryoshka (Kusupati et al. 2022, arXiv:2205.13147) and layer-wise learning (Li et al. 2024, arXiv:2402.14776).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["AdaptiveLayerLoss", "MatryoshkaLoss"]


@dataclass(frozen=True)
class _Wrapped:
    """Properties of the wrapped loss."""

    loss: Any

    @property
    def forms(self) -> Any:
        """The data that the loss takes."""
        return self.loss.forms

    @property
    def in_batch(self) -> bool:
        """Whether an example's loss depends on the others."""
        return self.loss.in_batch

    @property
    def by_guide(self) -> bool:
        """Whether labels are a guide's vectors."""
        return self.loss.by_guide


@dataclass(frozen=True)
class MatryoshkaLoss(_Wrapped):
    """Sum of a loss over several sizes of truncated, normalised vectors.

    Attributes:
        loss: the loss.
        dims: sizes.
        weights: of each size; None weighs all alike.
    """

    dims: tuple[int, ...]
    weights: tuple[float, ...] | None = None

    def faults(self) -> list[str]:
        """Return the problems of the settings."""
        wrong = [] if self.dims and min(self.dims) > 0 else [f"dims are {list(self.dims)}; expected numbers above 0"]
        if self.weights is not None and len(self.weights) != len(self.dims):
            wrong.append(f"{len(self.weights)} weights for {len(self.dims)} dims; expected one each")
        return wrong

    @property
    def ragged(self) -> bool:
        """Whether examples may have different numbers of texts."""
        return getattr(self.loss, "ragged", False)

    def __call__(
        self, vectors: Sequence[Tensor], labels: Tensor | None, own: slice | None = None, **further: Any
    ) -> Tensor:
        """Return the sum over the sizes; ``further`` is for the loss."""
        size = vectors[0].shape[-1]
        total = vectors[0].new_zeros(())
        pairs = zip(self.dims, self.weights or [1.0] * len(self.dims), strict=True)
        # from the largest on, each cut from the one before, as the reference does
        for dim, weight in sorted(pairs, reverse=True):
            vectors = [F.normalize(each[..., :dim], dim=-1) for each in vectors]
            cut = labels is not None and not self.by_guide and labels.dim() > 1 and labels.shape[-1] == size
            total = total + weight * self.loss(
                vectors, labels[..., :dim] if cut and labels is not None else labels, own, **further
            )
        return total


@dataclass(frozen=True)
class AdaptiveLayerLoss(_Wrapped):
    """Sum of a loss over all layers, and their distance from the last layer.

    It takes vectors of all layers, the embeddings' first and the last layer's last; all of them in each step.

    Attributes:
        loss: the loss.
        last_layer_weight: of the last layer.
        prior_layers_weight: of all others together.
        kl_div_weight: of the distance from the last layer's vectors.
        kl_temperature: that both are divided by.
        layer_weighting: "uniform", "log" or "linear": lower layers weigh alike, or more.
    """

    last_layer_weight: float = 1.0
    prior_layers_weight: float = 1.0
    kl_div_weight: float = 1.0
    kl_temperature: float = 0.3
    layer_weighting: str = "uniform"

    def faults(self) -> list[str]:
        """Return the problems of the settings."""
        known = ("uniform", "log", "linear")
        wrong = self.layer_weighting not in known
        return [f"layer_weighting is {self.layer_weighting!r}; expected one of {', '.join(known)}"] if wrong else []

    def __call__(self, layers: Sequence[Sequence[Tensor]], labels: Tensor | None, own: slice | None = None) -> Tensor:
        """Return the sum over the layers."""
        *prior, last = layers
        total = self.loss(last, labels, own) * self.last_layer_weight
        heat = self.kl_temperature
        goal = F.softmax(torch.cat(list(last)) / heat, -1).detach() if heat > 0 else None
        for index, vectors in enumerate(prior):
            share = self._weight(index) / len(prior) * self.prior_layers_weight
            total = total + self.loss(vectors, labels, own) * share
            if goal is not None:
                mine = F.log_softmax(torch.cat(list(vectors)) / heat, -1)
                total = total + F.kl_div(mine, goal, reduction="batchmean") * heat * self.kl_div_weight
        return total

    def _weight(self, index: int) -> float:
        return {"uniform": 1.0, "log": 1 / (1 + math.log(1 + index)), "linear": 1 / (1 + index)}[self.layer_weighting]

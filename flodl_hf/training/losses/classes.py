"""Losses of texts with classes: triplets that are found within the batch.

All triplets that are not easy yet, the hardest of each text (Hermans et al. 2017, arXiv:1703.07737), or semi-hard
triplets (Schroff et al. 2015, arXiv:1503.03832).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from flodl_hf.inference.similarity import MEASURES
from flodl_hf.training.losses.loss import Form, VectorLoss

__all__ = ["BatchAllTripletLoss", "BatchHardSoftMarginTripletLoss", "BatchHardTripletLoss", "BatchSemiHardTripletLoss"]


def _euclidean(vectors: Tensor) -> Tensor:
    """Return the distance of each vector from each, with a gradient of 0 where it is 0."""
    with torch.autocast(vectors.device.type, enabled=False):
        products = vectors.float() @ vectors.float().T if vectors.dtype != torch.float64 else vectors @ vectors.T
    lengths = products.diagonal()
    squared = (lengths[None] - 2.0 * products + lengths[:, None]).clamp(min=0)
    apart = squared > 0
    return torch.where(apart, torch.where(apart, squared, 1.0).sqrt(), 0.0)


TABLES: dict[str, Callable[[Tensor], Tensor]] = {
    "euclidean": _euclidean,
    "cosine": lambda vectors: 1 - MEASURES["cosine"](vectors, vectors),
}


@dataclass(frozen=True)
class _OfClasses(VectorLoss):
    """Base class of the losses of this module.

    Attributes:
        distance: "euclidean" or "cosine".
        margin: how much nearer a text of the same class shall be.
    """

    distance: str = "euclidean"
    margin: float = 5.0

    forms: ClassVar[tuple[Form, ...]] = ("classes",)
    in_batch: ClassVar[bool] = True

    def faults(self) -> list[str]:
        """Return the problems of the settings."""
        known = self.distance in TABLES
        return [] if known else [f"distance is {self.distance!r}; expected one of {', '.join(TABLES)}"]

    def tables(self, vectors: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return distances, which two are of one class, and which of those are two, each ``(texts, texts)``."""
        assert labels is not None
        same = labels[:, None] == labels[None]
        return (
            TABLES[self.distance](vectors),
            same,
            same & ~torch.eye(len(labels), dtype=torch.bool, device=same.device),
        )


class BatchAllTripletLoss(_OfClasses):
    """All triplets of the batch that are not easy yet."""

    def __call__(self, vectors: Sequence[Tensor], labels: Tensor | None, own: slice | None = None) -> Tensor:
        """Return the mean over those triplets."""
        far, same, positive = self.tables(vectors[0], labels)
        # one anchor after the other: a cube of all triplets would not fit
        total, count = far.new_zeros(()), far.new_zeros(())
        for near, row, partners, apart in zip(far, far, positive, ~same, strict=True):
            left = F.relu(near[:, None] - row[None] + self.margin) * (partners[:, None] & apart[None])
            total, count = total + left.sum(), count + (left > 1e-16).sum()
        return total / (count + 1e-16)


class BatchHardTripletLoss(_OfClasses):
    """For each text the farthest of its class and the nearest of another."""

    def __call__(self, vectors: Sequence[Tensor], labels: Tensor | None, own: slice | None = None) -> Tensor:
        """Return the mean over the texts."""
        return F.relu(self.gap(vectors, labels) + self.margin).mean()

    def gap(self, vectors: Sequence[Tensor], labels: Tensor | None) -> Tensor:
        """Return the distance of the hardest positive minus that of the hardest negative."""
        far, same, positive = self.tables(vectors[0], labels)
        most = far.amax(1, keepdim=True)
        return (far * positive).max(1).values - torch.where(same, far + most, far).min(1).values


class BatchHardSoftMarginTripletLoss(BatchHardTripletLoss):
    """The same without a margin: the softplus of the gap."""

    def __call__(self, vectors: Sequence[Tensor], labels: Tensor | None, own: slice | None = None) -> Tensor:
        """Return the mean over the texts."""
        return F.softplus(self.gap(vectors, labels)).mean()


class BatchSemiHardTripletLoss(_OfClasses):
    """For each two of a class the nearest other text that is farther than they are apart, or else the farthest."""

    def __call__(self, vectors: Sequence[Tensor], labels: Tensor | None, own: slice | None = None) -> Tensor:
        """Return the mean over two texts of a class."""
        far, same, positive = self.tables(vectors[0], labels)
        others = far.masked_fill(same, torch.inf)
        ordered, _ = others.sort(dim=1, stable=True)
        at = torch.searchsorted(ordered.detach(), far.detach().contiguous(), right=True)
        outside = ordered.gather(1, at.clamp(max=len(far) - 1))
        least = far.amin(1, keepdim=True)
        inside = ((far - least) * ~same).amax(1, keepdim=True) + least
        negative = torch.where(outside.isfinite(), outside, inside)
        return F.relu((far - negative + self.margin) * positive).sum() / positive.sum().clamp(min=1)

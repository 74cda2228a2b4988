"""Losses of pairs with a similarity, of pairs with a binary label, and of triplets.

CoSENT (Su 2022, kexue.fm/archives/8847) and AnglE (Li and Li 2023, arXiv:2309.12871) learn the order of a batch's
pairs; contrastive losses (Hadsell et al. 2006) and triplets (Schroff et al. 2015, arXiv:1503.03832) learn distances.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from flodl_hf.inference.similarity import PAIRWISE
from flodl_hf.training.losses.loss import Form, VectorLoss

__all__ = [
    "AnglELoss",
    "CoSENTLoss",
    "ContrastiveLoss",
    "CosineSimilarityLoss",
    "OnlineContrastiveLoss",
    "TripletLoss",
]

DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cosine": lambda a, b: 1 - F.cosine_similarity(a, b),
    "euclidean": lambda a, b: F.pairwise_distance(a, b, p=2),
    "manhattan": lambda a, b: F.pairwise_distance(a, b, p=1),
}


def _distance_faults(name: str) -> list[str]:
    return [] if name in DISTANCES else [f"distance is {name!r}; expected one of {', '.join(DISTANCES)}"]


@dataclass(frozen=True)
class CoSENTLoss(VectorLoss):
    """Ranking loss: of two pairs, the one with the higher label has the higher cosine.

    Attributes:
        scale: what similarities are multiplied by.
    """

    scale: float = 20.0

    forms: ClassVar[tuple[Form, ...]] = ("scored", "binary")
    in_batch: ClassVar[bool] = True

    def faults(self) -> list[str]:
        """Return the problems of the settings."""
        return [] if self.scale > 0 else [f"scale is {self.scale}; expected a number above 0"]

    def similarity(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the similarity of each pair."""
        return PAIRWISE["cosine"](a, b)

    def __call__(self, vectors: Sequence[Tensor], labels: Tensor | None, own: slice | None = None) -> Tensor:
        """Return the loss of all pairs of pairs together."""
        assert labels is not None
        scores = self.similarity(vectors[0], vectors[1]).float() * self.scale
        # the score of a pair minus the score of a pair with a higher label, for all combinations
        table = (scores[:, None] - scores[None]).masked_fill(labels[:, None] >= labels[None], -torch.inf)
        return torch.logsumexp(torch.cat([scores.new_zeros(1), table.flatten()]), 0)


@dataclass(frozen=True)
class AnglELoss(CoSENTLoss):
    """CoSENT with the angle of vectors as complex numbers, whose gradient does not vanish."""

    def similarity(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the similarity of each pair."""
        if a.shape[1] % 2:
            a, b = F.pad(a, (0, 1)), F.pad(b, (0, 1))
        a, b = F.normalize(a, dim=1), F.normalize(b, dim=1)
        (real_a, imaginary_a), (real_b, imaginary_b) = a.chunk(2, 1), b.chunk(2, 1)
        return ((a * b).sum(1) + (imaginary_a * real_b - real_a * imaginary_b).sum(1)).abs()


@dataclass(frozen=True)
class CosineSimilarityLoss(VectorLoss):
    """The squared difference of a pair's cosine and its number, which is between -1 and 1."""

    forms: ClassVar[tuple[Form, ...]] = ("scored", "binary")

    def __call__(self, vectors: Sequence[Tensor], labels: Tensor | None, own: slice | None = None) -> Tensor:
        """Return the mean over the pairs."""
        assert labels is not None
        return F.mse_loss(torch.cosine_similarity(vectors[0], vectors[1]), labels.to(vectors[0].dtype))


@dataclass(frozen=True)
class ContrastiveLoss(VectorLoss):
    """Contrastive loss: similar pairs are close, others at least a margin apart.

    Attributes:
        distance: "cosine", "euclidean" or "manhattan".
        margin: how far apart is far enough.
    """

    distance: str = "cosine"
    margin: float = 0.5

    forms: ClassVar[tuple[Form, ...]] = ("binary", "scored")

    def faults(self) -> list[str]:
        """Return the problems of the settings."""
        return _distance_faults(self.distance)

    def __call__(self, vectors: Sequence[Tensor], labels: Tensor | None, own: slice | None = None) -> Tensor:
        """Return the mean over the pairs."""
        assert labels is not None
        far = DISTANCES[self.distance](vectors[0], vectors[1])
        alike = labels.to(far.dtype)
        return (0.5 * (alike * far.pow(2) + (1 - alike) * F.relu(self.margin - far).pow(2))).mean()


@dataclass(frozen=True)
class OnlineContrastiveLoss(VectorLoss):
    """Contrastive loss of the hard pairs of a batch: similar and distant, or dissimilar and close.

    It is a sum over those pairs, as in sentence-transformers.

    Attributes:
        distance: "cosine", "euclidean" or "manhattan".
        margin: how far apart is far enough.
    """

    distance: str = "cosine"
    margin: float = 0.5

    forms: ClassVar[tuple[Form, ...]] = ("binary",)
    in_batch: ClassVar[bool] = True

    def faults(self) -> list[str]:
        """Return the problems of the settings."""
        return _distance_faults(self.distance)

    def __call__(self, vectors: Sequence[Tensor], labels: Tensor | None, own: slice | None = None) -> Tensor:
        """Return the sum over the hard pairs."""
        assert labels is not None
        far = DISTANCES[self.distance](vectors[0], vectors[1])
        alike, apart = labels == 1, labels == 0
        # the bounds are computed without counting pairs, which would synchronise with the device
        farthest = far.masked_fill(~alike, -torch.inf).max()
        nearest = far.masked_fill(~apart, torch.inf).min()
        mean = far.mean()  # of all, which are then of one kind
        hard_apart = apart & (far < torch.where(alike.any(), farthest, mean))
        hard_alike = alike & (far > torch.where(apart.any(), nearest, mean))
        near = F.relu(self.margin - far).pow(2)
        return torch.where(hard_alike, far.pow(2), 0.0).sum() + torch.where(hard_apart, near, 0.0).sum()


@dataclass(frozen=True)
class TripletLoss(VectorLoss):
    """The anchor is nearer to the positive than to the negative, by a margin.

    Attributes:
        distance: "euclidean", "cosine" or "manhattan".
        triplet_margin: how much nearer.
    """

    distance: str = "euclidean"
    triplet_margin: float = 5.0

    forms: ClassVar[tuple[Form, ...]] = ("triplets",)

    def faults(self) -> list[str]:
        """Return the problems of the settings."""
        return _distance_faults(self.distance)

    def __call__(self, vectors: Sequence[Tensor], labels: Tensor | None, own: slice | None = None) -> Tensor:
        """Return the mean over the triplets; of several negatives each makes one."""
        anchor, positive = vectors[:2]
        near = self._far(anchor, positive)
        return torch.stack([F.relu(near - self._far(anchor, far) + self.triplet_margin) for far in vectors[2:]]).mean()

    def _far(self, a: Tensor, b: Tensor) -> Tensor:
        return (1 if self.distance == "cosine" else 0) - PAIRWISE[self.distance](a, b)

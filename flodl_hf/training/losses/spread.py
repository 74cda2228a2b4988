"""A loss of how vectors lie among each other, whatever they belong to: texts of a batch shall be spread evenly.

Zhang et al. 2017 (arXiv:1708.06320): similarities of different texts shall be nothing on average, and vary as much as
those of directions drawn at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flodl_hf.inference.similarity import MEASURES
from flodl_hf.training.losses.loss import Form
from flodl_hf.training.losses.ranking import MultipleNegativesRankingLoss

__all__ = ["GlobalOrthogonalRegularizationLoss"]


@dataclass(frozen=True)
class GlobalOrthogonalRegularizationLoss:
    """How far texts of a batch are from being spread evenly; meant to be learned beside a ranking of partners.

    Attributes:
        mean_weight: of the squared mean of similarities.
        second_moment_weight: of what their mean square is above that of directions drawn at random.
        aggregation: "mean" or "sum" over anchors, partners and negatives.
        similarity: a name of `flodl_hf.inference.similarity.MEASURES`.
        ranking_weight: of multiple negatives ranking, added to it; 0 for the spread alone.
        scale: what the ranking multiplies similarities by.
    """

    mean_weight: float = 1.0
    second_moment_weight: float = 1.0
    aggregation: str = "mean"
    similarity: str = "cosine"
    ranking_weight: float = 0.0
    scale: float = 20.0

    forms: ClassVar[tuple[Form, ...]] = ("pairs", "triplets", "texts")
    in_batch: ClassVar[bool] = True
    by_guide: ClassVar[bool] = False

    def faults(self) -> list[str]:
        """Return what cannot be among the settings."""
        found = []
        if self.aggregation not in ("mean", "sum"):
            found.append(f"aggregation is {self.aggregation!r}; expected mean or sum")
        if self.similarity not in MEASURES:
            found.append(f"similarity is {self.similarity!r}; expected one of {', '.join(MEASURES)}")
        if not self.mean_weight and not self.second_moment_weight:
            found.append("mean_weight and second_moment_weight are 0; expected one of them above 0")
        if not self.scale > 0:
            found.append(f"scale is {self.scale}; expected a number above 0")
        return found

    def __call__(self, vectors: Sequence[Tensor], labels: Tensor | None, own: slice | None = None) -> Tensor:
        """Return the loss of the batch, in which each of an example's texts is spread among its like."""
        terms = torch.stack([self._of(column) for column in vectors])
        value = terms.sum() if self.aggregation == "sum" else terms.mean()
        if not self.ranking_weight:
            return value
        return value + self.ranking_weight * MultipleNegativesRankingLoss(self.scale)(vectors, labels, own)

    def _of(self, texts: Tensor) -> Tensor:
        """Return what texts of one kind cost, a scalar."""
        count, size = texts.shape
        near = MEASURES[self.similarity](texts, texts)
        near = near.masked_fill(torch.eye(count, dtype=torch.bool, device=near.device), 0.0)
        among = max(count * (count - 1), 1)
        mean, square = near.sum() / among, near.square().sum() / among
        return self.mean_weight * mean.square() + self.second_moment_weight * torch.relu(square - 1.0 / size)

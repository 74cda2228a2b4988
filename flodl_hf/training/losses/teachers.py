"""Losses against a teacher: its vectors, or its scores of candidates for a question.

Margin-MSE: Hofstätter et al. 2020 (arXiv:2010.02666).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from flodl.errors import TrainError
from flodl_hf.inference.similarity import PAIRWISE
from flodl_hf.training.losses.loss import Form, VectorLoss

__all__ = ["DistillKLDivLoss", "EmbedDistillLoss", "MSELoss", "MarginMSELoss"]


@dataclass(frozen=True)
class MSELoss(VectorLoss):
    """The squared difference from a teacher's vectors; of several texts, each against the same ones or its own."""

    forms: ClassVar[tuple[Form, ...]] = ("teacher_vectors",)

    def __call__(self, vectors: Sequence[Tensor], labels: Tensor | None, own: slice | None = None) -> Tensor:
        """Return the mean over all numbers."""
        assert labels is not None
        theirs = labels.unbind(1) if labels.dim() == 3 else [labels] * len(vectors)
        parts = [F.mse_loss(mine, their.to(mine.dtype)) for mine, their in zip(vectors, theirs, strict=True)]
        return torch.stack(parts).mean()


@dataclass(frozen=True)
class EmbedDistillLoss(MSELoss):
    """How far vectors are from a teacher's; of several texts, each against the same ones or its own.

    Attributes:
        distance_metric: "cosine", "l2" or "mse".
        projection_dim: size of the teacher's vectors, if it differs: an additional layer maps vectors to
            this size; it is trained in the run and discarded.
    """

    distance_metric: str = "cosine"
    projection_dim: int | None = None

    def faults(self) -> list[str]:
        """Return the problems of the settings."""
        found = []
        if self.distance_metric not in ("cosine", "l2", "mse"):
            found.append(f"distance_metric is {self.distance_metric!r}; expected cosine, l2 or mse")
        if self.projection_dim is not None and (not isinstance(self.projection_dim, int) or self.projection_dim < 1):
            found.append(f"projection_dim is {self.projection_dim!r}; expected an integer from 1")
        return found

    def __call__(self, vectors: Sequence[Tensor], labels: Tensor | None, own: slice | None = None) -> Tensor:
        """Return the mean over texts."""
        if self.distance_metric == "mse":
            return super().__call__(vectors, labels, own)
        assert labels is not None
        theirs = labels.unbind(1) if labels.dim() == 3 else [labels] * len(vectors)
        parts = []
        for mine, their in zip(vectors, theirs, strict=True):
            if self.distance_metric == "l2":
                parts.append(torch.linalg.vector_norm(mine - their.to(mine.dtype), dim=-1).mean())
            else:
                parts.append((1 - F.cosine_similarity(mine, their.to(mine.dtype), dim=-1)).mean())
        return torch.stack(parts).mean()


@dataclass(frozen=True)
class MarginMSELoss(VectorLoss):
    """How much better a question's passage is than others, as a teacher has it.

    Labels are the differences, or the scores of the passage and of each other.

    Attributes:
        similarity: a name of `flodl_hf.inference.similarity.PAIRWISE`.
    """

    similarity: str = "dot"

    forms: ClassVar[tuple[Form, ...]] = ("teacher_scores",)

    def faults(self) -> list[str]:
        """Return the problems of the settings."""
        return _similarity_faults(self.similarity)

    def __call__(self, vectors: Sequence[Tensor], labels: Tensor | None, own: slice | None = None) -> Tensor:
        """Return the mean over questions and candidates.

        Raises:
            TrainError: there are more or fewer scores than texts.
        """
        assert labels is not None
        measure = PAIRWISE[self.similarity]
        positive = measure(vectors[0], vectors[1])
        margins = torch.stack([positive - measure(vectors[0], other) for other in vectors[2:]], 1)
        labels = labels[:, None] if labels.dim() == 1 else labels
        if labels.shape[1] == len(vectors) - 1 and labels.shape[1] != margins.shape[1]:
            labels = labels[:, :1] - labels[:, 1:]
        _check_scores(labels, margins, "a difference for each negative, or a score for the positive and for each")
        return F.mse_loss(margins, labels.to(margins.dtype))


@dataclass(frozen=True)
class DistillKLDivLoss(VectorLoss):
    """The shares that a question's candidates have of its similarity, as a teacher's scores share them out.

    Attributes:
        similarity: a name of `flodl_hf.inference.similarity.PAIRWISE`.
        temperature: what scores of both are divided by.
    """

    similarity: str = "dot"
    temperature: float = 1.0

    forms: ClassVar[tuple[Form, ...]] = ("teacher_scores",)

    def faults(self) -> list[str]:
        """Return the problems of the settings."""
        wrong = [] if self.temperature > 0 else [f"temperature is {self.temperature}; expected a number above 0"]
        return wrong + _similarity_faults(self.similarity)

    def __call__(self, vectors: Sequence[Tensor], labels: Tensor | None, own: slice | None = None) -> Tensor:
        """Return the mean over questions.

        Raises:
            TrainError: there are more or fewer scores than candidates.
        """
        assert labels is not None
        measure = PAIRWISE[self.similarity]
        scores = torch.stack([measure(vectors[0], other) for other in vectors[1:]], 1)
        _check_scores(labels, scores, "a score for each candidate")
        mine = F.log_softmax(scores / self.temperature, 1)
        theirs = F.softmax(labels.to(mine.dtype) / self.temperature, 1)
        return F.kl_div(mine, theirs, reduction="batchmean") * self.temperature**2


def _similarity_faults(name: str) -> list[str]:
    return [] if name in PAIRWISE else [f"similarity is {name!r}; expected one of {', '.join(PAIRWISE)}"]


def _check_scores(labels: Tensor, mine: Tensor, expected: str) -> None:
    if labels.shape != mine.shape:
        raise TrainError(
            f"train: the teacher gave {tuple(labels.shape)} scores for a batch of {len(mine)} questions; expected "
            f"{expected}",
            found=tuple(labels.shape),
        )

"""Losses of sparse vectors: dense losses with the inner product, and a penalty on active words.

SPLADE (Formal et al. 2021, arXiv:2109.10086) with the FLOPS penalty (Paria et al. 2020, arXiv:2004.05665), which rises
over the first steps; names and values are equal to sentence-transformers' SparseEncoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flodl.errors import ConfigError
from flodl_hf.training.losses.loss import Form
from flodl_hf.training.losses.pairs import AnglELoss, CoSENTLoss, CosineSimilarityLoss, TripletLoss
from flodl_hf.training.losses.ranking import MultipleNegativesRankingLoss
from flodl_hf.training.losses.teachers import DistillKLDivLoss, MarginMSELoss, MSELoss

__all__ = ["PENALTIES", "SPARSE_LOSSES", "SPARSE_USUAL", "SpladeLoss", "flops", "penalties"]


@dataclass(frozen=True)
class SparseMultipleNegativesRankingLoss(MultipleNegativesRankingLoss):
    """The partner of a text against all others of the batch, by the inner product."""

    scale: float = 1.0
    similarity: str = "dot"


@dataclass(frozen=True)
class SparseMarginMSELoss(MarginMSELoss):
    """How much better a question's passage is than others, as a teacher has it."""


@dataclass(frozen=True)
class SparseDistillKLDivLoss(DistillKLDivLoss):
    """The shares of a question's candidates, as a teacher's scores share them out."""

    temperature: float = 2.0


@dataclass(frozen=True)
class SparseMSELoss(MSELoss):
    """The squared difference from a teacher's vectors."""


@dataclass(frozen=True)
class SparseCoSENTLoss(CoSENTLoss):
    """`CoSENTLoss` of sparse vectors."""


@dataclass(frozen=True)
class SparseAnglELoss(AnglELoss):
    """CoSENT by the angle of vectors as complex numbers."""


@dataclass(frozen=True)
class SparseCosineSimilarityLoss(CosineSimilarityLoss):
    """`CosineSimilarityLoss` of sparse vectors."""


@dataclass(frozen=True)
class SparseTripletLoss(TripletLoss):
    """`TripletLoss` of sparse vectors."""


SPARSE_LOSSES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        SparseMultipleNegativesRankingLoss, SparseMarginMSELoss, SparseDistillKLDivLoss, SparseCoSENTLoss,
        SparseAnglELoss, SparseCosineSimilarityLoss, SparseTripletLoss, SparseMSELoss,
    )
}  # fmt: skip
"""By name."""

SPARSE_USUAL: dict[Form, str] = {
    "pairs": "SparseMultipleNegativesRankingLoss",
    "triplets": "SparseMultipleNegativesRankingLoss",
    "texts": "SparseMultipleNegativesRankingLoss",
    "scored": "SparseCoSENTLoss",
    "binary": "SparseCoSENTLoss",
    "teacher_scores": "SparseMarginMSELoss",
    "teacher_vectors": "SparseMSELoss",
}
"""The loss of each form of data where none is named."""


def flops(vectors: Tensor, threshold: int | None = None) -> Tensor:
    """Return the penalty of some texts: the squares of the words' mean weights, summed.

    Args:
        vectors: ``(texts, words)``.
        threshold: texts with no more words than this cost nothing.
    """
    if threshold is not None:
        vectors = vectors * ((vectors != 0).sum(1) > threshold).to(vectors.dtype)[:, None]
    return vectors.mean(0).square().sum()


@dataclass(frozen=True)
class SpladeLoss:
    """A loss of sparse vectors and the FLOPS penalty of their words.

    Attributes:
        loss: the loss.
        document_regularizer_weight: of the penalty of all texts but the first of each example.
        query_regularizer_weight: of the first ones; None leaves them out.
        document_regularizer_threshold: documents with no more words cost nothing.
        query_regularizer_threshold: the same of queries.
        use_document_regularizer_only: all texts are documents.
        scheduler_type: how the weights rise: "quadratic" or "linear".
        warmup_ratio: share of the steps in which they do; 0 for none.
    """

    loss: Any
    document_regularizer_weight: float = 3e-5
    query_regularizer_weight: float | None = 5e-5
    document_regularizer_threshold: int | None = None
    query_regularizer_threshold: int | None = None
    use_document_regularizer_only: bool = False
    scheduler_type: str = "quadratic"
    warmup_ratio: float = 1 / 3

    in_batch = True
    by_guide = False

    @property
    def forms(self) -> Any:
        """The data that the loss takes."""
        return self.loss.forms

    def faults(self) -> list[str]:
        """Return the problems of the settings."""
        wrong = [
            f"{name} is {getattr(self, name)}; expected 0 or more"
            for name in ("document_regularizer_weight", "query_regularizer_weight")
            if (getattr(self, name) or 0) < 0
        ]
        if self.scheduler_type not in ("quadratic", "linear"):
            wrong.append(f"scheduler_type is {self.scheduler_type!r}; expected quadratic or linear")
        if not 0 <= self.warmup_ratio <= 1:
            wrong.append(f"warmup_ratio is {self.warmup_ratio}; expected 0 to 1")
        return wrong

    def strength(self, step: int, steps: int) -> float:
        """Return which share of the weights counts in a step, the first of which is 0."""
        rising = max(1, int(steps * self.warmup_ratio)) if self.warmup_ratio else 0
        if step >= rising:
            return 1.0
        share = step / rising
        return share if self.scheduler_type == "linear" else share**2

    def __call__(
        self, vectors: Sequence[Tensor], labels: Tensor | None, own: slice | None = None, strength: Any = 1.0
    ) -> Tensor:
        """Return the loss with the penalty.

        Args:
            vectors: one ``(examples, words)`` for each text of an example.
            labels: as the loss takes them.
            own: the examples of this rank; the penalty includes all examples.
            strength: the share of the penalty that counts, a number or a scalar.
        """
        total = self.loss(vectors, labels, own)
        documents = vectors if self.use_document_regularizer_only else vectors[1:]
        if len(documents):
            cost = flops(torch.cat(list(documents)), self.document_regularizer_threshold)
            total = total + cost * (self.document_regularizer_weight * strength)
        if self.query_regularizer_weight is not None and not self.use_document_regularizer_only:
            cost = flops(vectors[0], self.query_regularizer_threshold)
            total = total + cost * (self.query_regularizer_weight * strength)
        return total


PENALTIES: dict[str, type] = {
    "document_regularizer_weight": float, "query_regularizer_weight": float, "document_regularizer_threshold": int,
    "query_regularizer_threshold": int, "use_document_regularizer_only": bool, "scheduler_type": str,
    "warmup_ratio": float,
}  # fmt: skip
"""Settings of `SpladeLoss` other than its loss."""


def penalties(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of the penalty, and the remaining settings for the loss.

    Raises:
        ConfigError: a value cannot be; ``problems`` lists all.
    """
    found: dict[str, Any] = {}
    problems = []
    for name in PENALTIES.keys() & settings.keys():
        value = settings[name]
        kind = PENALTIES[name]
        if value is None or str(value).lower() in ("none", ""):
            found[name] = None
            continue
        try:
            if kind is bool:
                found[name] = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[
                    str(value).lower()
                ]
            else:
                found[name] = kind(value)
        except (ValueError, TypeError, KeyError):
            problems.append(f"{name}: found {value!r}; expected {kind.__name__}")
    if problems:
        raise ConfigError(f"loss_options of SpladeLoss: {'; '.join(problems)}", problems=problems)
    return found, {name: value for name, value in settings.items() if name not in PENALTIES}

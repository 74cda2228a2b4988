"""Losses of texts with a vector for each token, compared late: a query's tokens by their best matches (MaxSim).

ColBERT (Khattab and Zaharia 2020, arXiv:2004.12832), its distillation (Santhanam et al. 2022, arXiv:2112.01488); names
and values are equal to sentence-transformers' MultiVectorEncoder. A row of zeros is a position without a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from flodl.errors import TrainError
from flodl_hf.training.losses.loss import Form, VectorLoss

__all__ = ["MULTIVECTOR_LOSSES", "MULTIVECTOR_USUAL", "scores_of_all", "scores_of_pairs"]

AT_ONCE = 1 << 26
"""Maximum number of token products in memory; larger sets of queries are processed in parts."""
SIMILARITIES = ("maxsim", "meanmaxsim")


def scores_of_all(queries: Tensor, documents: Tensor, similarity: str = "maxsim") -> Tensor:
    """Return the score of each query with each document, ``(queries, documents)``, in float32.

    Args:
        queries: ``(queries, tokens, size)``.
        documents: ``(documents, tokens, size)``.
        similarity: "maxsim", or "meanmaxsim", which divides by the vectors of the query.
    """
    rows = max(1, AT_ONCE // max(1, queries.shape[1] * documents.shape[0] * documents.shape[1]))
    absent = ~_present(documents)
    parts = []
    for part in queries.split(rows):
        products = torch.einsum("ash,bth->abst", part, documents)
        parts.append(_summed(products, absent[None, :, None], _present(part)[:, None], similarity))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def scores_of_pairs(queries: Tensor, documents: Tensor, similarity: str = "maxsim") -> Tensor:
    """Return the score of each query with the document in its place, ``(queries,)``; arguments as of all."""
    products = torch.einsum("bsh,bth->bst", queries, documents)
    return _summed(products, ~_present(documents)[:, None], _present(queries), similarity)


def _present(vectors: Tensor) -> Tensor:
    return (vectors != 0).any(-1)


def _summed(products: Tensor, absent: Tensor, asked: Tensor, similarity: str) -> Tensor:
    best = products.masked_fill(absent, torch.finfo(products.dtype).min).max(-1).values.float()
    found = (best * asked).sum(-1)
    return found / asked.sum(-1) if similarity == "meanmaxsim" else found


def _faults(similarity: str, **positive: float | None) -> list[str]:
    wrong = [
        f"{name} is {value}; expected a number above 0" for name, value in positive.items() if not (value or 0) > 0
    ]
    if similarity not in SIMILARITIES:
        wrong.append(f"similarity is {similarity!r}; expected one of {', '.join(SIMILARITIES)}")
    return wrong


@dataclass(frozen=True)
class MultiVectorMultipleNegativesRankingLoss(VectorLoss):
    """The document of a query against all other documents, and all negatives, of the batch.

    Attributes:
        scale: what scores are multiplied by, 1 / temperature.
        similarity: "maxsim", or "meanmaxsim" for the mean over a query's tokens.
    """

    scale: float = 1.0
    similarity: str = "maxsim"

    forms: ClassVar[tuple[Form, ...]] = ("pairs", "triplets")
    in_batch: ClassVar[bool] = True

    def faults(self) -> list[str]:
        """Return the problems of the settings."""
        return _faults(self.similarity, scale=self.scale)

    def __call__(self, vectors: Sequence[Tensor], labels: Tensor | None, own: slice | None = None) -> Tensor:
        """Return the mean over the queries; with ``own`` over those alone, against the documents of all.

        Args:
            vectors: one ``(examples, tokens, size)`` for each text of an example.
            labels: nothing.
            own: the examples of this rank.
        """
        queries, *documents = vectors
        first, last = (0, len(queries)) if own is None else (own.start, own.stop)
        columns = [scores_of_all(queries[first:last], each, self.similarity) for each in documents]
        # the documents of an example are adjacent
        scores = torch.stack(columns, 2).reshape(last - first, -1)
        right = torch.arange(first, last, device=scores.device) * len(documents)
        return F.cross_entropy(scores * self.scale, right)


@dataclass(frozen=True)
class MultiVectorMarginMSELoss(VectorLoss):
    """How much better a query's document is than others, as a teacher has it.

    Labels are the differences, or the scores of the document and of each other.

    Attributes:
        similarity: "maxsim" or "meanmaxsim".
    """

    similarity: str = "maxsim"

    forms: ClassVar[tuple[Form, ...]] = ("teacher_scores",)

    def faults(self) -> list[str]:
        """Return the problems of the settings."""
        return _faults(self.similarity)

    def __call__(self, vectors: Sequence[Tensor], labels: Tensor | None, own: slice | None = None) -> Tensor:
        """Return the mean over queries and other documents.

        Raises:
            TrainError: there are more or fewer scores than texts.
        """
        assert labels is not None
        right, *others = (scores_of_pairs(vectors[0], each, self.similarity) for each in vectors[1:])
        margins = torch.stack([right - other for other in others], 1)
        labels = labels[:, None] if labels.dim() == 1 else labels
        if labels.shape[1] == len(others) + 1:
            labels = labels[:, :1] - labels[:, 1:]
        _check(labels, margins, "a difference for each negative, or a score for the positive and for each")
        return F.mse_loss(margins, labels.to(margins.dtype))


@dataclass(frozen=True)
class MultiVectorDistillKLDivLoss(VectorLoss):
    """The shares that a query's documents have of its scores, as a teacher's scores share them out.

    Attributes:
        similarity: "maxsim" or "meanmaxsim".
        temperature: what scores of both are divided by.
        student_temperature: divisor of the scores of the model; overrides ``temperature``.
        teacher_temperature: divisor of the scores of the teacher; overrides ``temperature``.
    """

    similarity: str = "maxsim"
    temperature: float = 1.0
    student_temperature: float | None = None
    teacher_temperature: float | None = None

    forms: ClassVar[tuple[Form, ...]] = ("teacher_scores",)

    @property
    def _student(self) -> float:
        return self.temperature if self.student_temperature is None else float(self.student_temperature)

    @property
    def _teacher(self) -> float:
        return self.temperature if self.teacher_temperature is None else float(self.teacher_temperature)

    def faults(self) -> list[str]:
        """Return the problems of the settings."""
        try:
            given = {"temperature": self.temperature, "student_temperature": self._student}
            return _faults(self.similarity, **given, teacher_temperature=self._teacher)
        except ValueError as fault:
            return [f"a temperature is no number: {fault}"]

    def __call__(self, vectors: Sequence[Tensor], labels: Tensor | None, own: slice | None = None) -> Tensor:
        """Return the mean over queries.

        Raises:
            TrainError: there are more or fewer scores than documents.
        """
        assert labels is not None
        scores = torch.stack([scores_of_pairs(vectors[0], each, self.similarity) for each in vectors[1:]], 1)
        _check(labels, scores, "a score for each document")
        mine = F.log_softmax(scores / self._student, -1)
        theirs = F.log_softmax(labels.to(mine.dtype) / self._teacher, -1)
        return F.kl_div(mine, theirs, reduction="batchmean", log_target=True) * self._student**2


def _check(labels: Tensor, mine: Tensor, expected: str) -> None:
    if labels.shape != mine.shape:
        raise TrainError(
            f"train: the teacher gave {tuple(labels.shape)} scores for a batch of {len(mine)} queries; expected "
            f"{expected}",
            found=tuple(labels.shape),
        )


MULTIVECTOR_LOSSES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (MultiVectorMultipleNegativesRankingLoss, MultiVectorMarginMSELoss, MultiVectorDistillKLDivLoss)
}
"""By name."""

MULTIVECTOR_USUAL: dict[Form, str] = {
    "pairs": "MultiVectorMultipleNegativesRankingLoss",
    "triplets": "MultiVectorMultipleNegativesRankingLoss",
    "teacher_scores": "MultiVectorMarginMSELoss",
}
"""The loss of each form of data where none is named."""

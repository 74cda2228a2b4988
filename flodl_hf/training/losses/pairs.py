"""Losses of vectors: similarity and binary labels of pairs, triplets, classes, and teachers.

CoSENT (Su 2022, kexue.fm/archives/8847) and AnglE (Li and Li 2023, arXiv:2309.12871) learn the order of a batch's
pairs; contrastive losses (Hadsell et al. 2006) and triplets (Schroff et al. 2015, arXiv:1503.03832) learn distances.
Texts with classes form triplets within the batch (Hermans et al. 2017, arXiv:1703.07737). Margin-MSE: Hofstätter et al.
2020 (arXiv:2010.02666).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from flodl.errors import TrainError
from flodl_hf.inference.similarity import MEASURES, PAIRWISE

Form = Literal[
    "pairs",
    "triplets",
    "scored",
    "binary",
    "pair_classes",
    "classes",
    "texts",
    "teacher_scores",
    "teacher_vectors",
]
"""Form of an example: related texts; related and unrelated texts; two texts with a similarity; two texts that are
similar (1) or not (0); two texts with a class name; a text with a class; a text; a question with candidates and
scores of a teacher; texts with vectors of a teacher."""


class CheckedSettings:
    """Settings with valid values.

    Attributes:
        choices: mapping of settings to their valid values.
        positive: settings that are numbers above 0, or None.
    """

    choices: ClassVar[Mapping[str, Collection[Any]]] = {}
    positive: ClassVar[tuple[str, ...]] = ()

    def faults(self) -> list[str]:
        """Return the problems of the settings."""
        found = []
        for name, valid in self.choices.items():
            if getattr(self, name) not in valid:
                found.append(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(map(str, valid))}")
        for name in self.positive:
            value: Any = getattr(self, name)
            if value is not None and (isinstance(value, str) or not value > 0):
                found.append(f"{name} is {value}; expected a number above 0")
        return found


class VectorLoss(CheckedSettings):
    """Base class of losses of the vectors of a batch.

    Attributes:
        forms: accepted forms of data.
        in_batch: whether the loss of an example depends on the other examples of its batch. If not, a step is the same
            for any micro-batch size; if so, the same batch gives the same step on any number of ranks.
        by_guide: whether labels are the vectors of a guide, ``(examples, texts, size)``.
        ragged: whether examples may have different numbers of texts; the keyword ``there``, ``(examples, texts)``, is
            false for missing texts.
    """

    forms: ClassVar[tuple[Form, ...]] = ()
    in_batch: ClassVar[bool] = False
    by_guide: ClassVar[bool] = False
    ragged: ClassVar[bool] = False

    def __call__(self, vectors: Sequence[Tensor], labels: Any, own: slice | None = None) -> Tensor:
        """Return the mean loss, a scalar.

        Args:
            vectors: one ``(examples, size)`` for each text of an example: anchors, positives, negatives.
            labels: one for each example, if there are any.
            own: the examples of this rank, whose mean is sufficient; a loss may return the mean of all.
        """
        raise NotImplementedError


DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cosine": lambda a, b: 1 - F.cosine_similarity(a, b),
    "euclidean": lambda a, b: F.pairwise_distance(a, b, p=2),
    "manhattan": lambda a, b: F.pairwise_distance(a, b, p=1),
}


@dataclass(frozen=True)
class CoSENTLoss(VectorLoss):
    """Ranking loss: of two pairs, the one with the higher label has the higher cosine.

    Attributes:
        scale: what similarities are multiplied by.
    """

    scale: float = 20.0

    forms: ClassVar[tuple[Form, ...]] = ("scored", "binary")
    in_batch: ClassVar[bool] = True
    positive = ("scale",)

    def similarity(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the similarity of each pair."""
        return PAIRWISE["cosine"](a, b)

    def __call__(self, vectors: Sequence[Tensor], labels: Any, own: slice | None = None) -> Tensor:
        """Return the loss of all pairs of pairs together."""
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

    def __call__(self, vectors: Sequence[Tensor], labels: Any, own: slice | None = None) -> Tensor:
        """Return the mean over the pairs."""
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
    choices: ClassVar[Mapping[str, Collection[Any]]] = {"distance": DISTANCES}

    def __call__(self, vectors: Sequence[Tensor], labels: Any, own: slice | None = None) -> Tensor:
        """Return the mean over the pairs."""
        far = DISTANCES[self.distance](vectors[0], vectors[1])
        alike = labels.to(far.dtype)
        return (0.5 * (alike * far.pow(2) + (1 - alike) * F.relu(self.margin - far).pow(2))).mean()


@dataclass(frozen=True)
class OnlineContrastiveLoss(ContrastiveLoss):
    """Contrastive loss of the hard pairs of a batch: similar and distant, or dissimilar and close.

    It is a sum over those pairs, as in sentence-transformers.
    """

    forms: ClassVar[tuple[Form, ...]] = ("binary",)
    in_batch: ClassVar[bool] = True

    def __call__(self, vectors: Sequence[Tensor], labels: Any, own: slice | None = None) -> Tensor:
        """Return the sum over the hard pairs."""
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
    choices: ClassVar[Mapping[str, Collection[Any]]] = {"distance": DISTANCES}

    def __call__(self, vectors: Sequence[Tensor], labels: Any, own: slice | None = None) -> Tensor:
        """Return the mean over the triplets; of several negatives each makes one."""
        anchor, positive = vectors[:2]
        offset = 1 if self.distance == "cosine" else 0
        near, *far = [offset - PAIRWISE[self.distance](anchor, other) for other in (positive, *vectors[2:])]
        return torch.stack([F.relu(near - each + self.triplet_margin) for each in far]).mean()


@dataclass(frozen=True)
class MSELoss(VectorLoss):
    """The squared difference from a teacher's vectors; of several texts, each against the same ones or its own."""

    forms: ClassVar[tuple[Form, ...]] = ("teacher_vectors",)

    def __call__(self, vectors: Sequence[Tensor], labels: Any, own: slice | None = None) -> Tensor:
        """Return the mean over all numbers.

        Raises:
            TrainError: the teacher's vectors have another size.
        """
        theirs = labels.unbind(1) if labels.dim() == 3 else [labels] * len(vectors)
        size, found = vectors[0].shape[-1], theirs[0].shape
        if found != vectors[0].shape:
            raise TrainError(
                f"train: the teacher's vectors have {found[-1]} numbers, the model's {size}; expected equal sizes. "
                f"Pass loss='EmbedDistill', loss_options={{'projection_dim': {found[-1]}}} to train with another size",
                found=tuple(found),
            )
        parts = [self.distance(mine, their.to(mine.dtype)) for mine, their in zip(vectors, theirs, strict=True)]
        return torch.stack(parts).mean()

    def distance(self, mine: Tensor, theirs: Tensor) -> Tensor:
        """Return the mean distance of vectors from a teacher's, a scalar."""
        return F.mse_loss(mine, theirs)


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

    choices: ClassVar[Mapping[str, Collection[Any]]] = {"distance_metric": ("cosine", "l2", "mse")}
    positive = ("projection_dim",)

    def distance(self, mine: Tensor, theirs: Tensor) -> Tensor:
        """Return the mean distance of vectors from a teacher's, a scalar."""
        if self.distance_metric == "mse":
            return super().distance(mine, theirs)
        if self.distance_metric == "l2":
            return torch.linalg.vector_norm(mine - theirs, dim=-1).mean()
        return (1 - F.cosine_similarity(mine, theirs, dim=-1)).mean()


@dataclass(frozen=True)
class MarginMSELoss(VectorLoss):
    """How much better a question's passage is than others, as a teacher has it.

    Labels are the differences, or the scores of the passage and of each other.

    Attributes:
        similarity: a name of `flodl_hf.inference.similarity.PAIRWISE`.
    """

    similarity: str = "dot"

    forms: ClassVar[tuple[Form, ...]] = ("teacher_scores",)
    choices: ClassVar[Mapping[str, Any]] = {"similarity": PAIRWISE}

    def __call__(self, vectors: Sequence[Tensor], labels: Any, own: slice | None = None) -> Tensor:
        """Return the mean over questions and candidates.

        Raises:
            TrainError: there are more or fewer scores than texts.
        """
        positive, *others = self.scores(vectors)
        margins = torch.stack([positive - other for other in others], 1)
        labels = labels[:, None] if labels.dim() == 1 else labels
        if labels.shape[1] == len(vectors) - 1 and labels.shape[1] != margins.shape[1]:
            labels = labels[:, :1] - labels[:, 1:]
        check_scores(labels, margins, "a difference for each negative, or a score for the positive and for each")
        return F.mse_loss(margins, labels.to(margins.dtype))

    def scores(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Return the similarity of each question and its candidates, ``(questions,)`` for each candidate."""
        return [self.choices["similarity"][self.similarity](vectors[0], other) for other in vectors[1:]]


@dataclass(frozen=True)
class DistillKLDivLoss(MarginMSELoss):
    """The shares that a question's candidates have of its similarity, as a teacher's scores share them out.

    Attributes:
        similarity: a name of `flodl_hf.inference.similarity.PAIRWISE`.
        temperature: what scores of both are divided by.
    """

    temperature: float = 1.0

    positive = ("temperature",)

    def __call__(self, vectors: Sequence[Tensor], labels: Any, own: slice | None = None) -> Tensor:
        """Return the mean over questions.

        Raises:
            TrainError: there are more or fewer scores than candidates.
        """
        scores = torch.stack(self.scores(vectors), 1)
        check_scores(labels, scores, "a score for each candidate")
        mine = F.log_softmax(scores / self.temperature, 1)
        theirs = F.softmax(labels.to(mine.dtype) / self.temperature, 1)
        return F.kl_div(mine, theirs, reduction="batchmean") * self.temperature**2


def check_scores(labels: Tensor, mine: Tensor, expected: str) -> None:
    """Raise a `TrainError` if the scores of a teacher have another shape than those of the model."""
    if labels.shape != mine.shape:
        raise TrainError(
            f"train: the teacher gave {tuple(labels.shape)} scores for a batch of {len(mine)} questions; expected "
            f"{expected}",
            found=tuple(labels.shape),
        )


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
    choices: ClassVar[Mapping[str, Collection[Any]]] = {"distance": TABLES}

    def tables(self, vectors: Tensor, labels: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return distances, which two are of one class, and which of those are two, each ``(texts, texts)``."""
        same = labels[:, None] == labels[None]
        return (
            TABLES[self.distance](vectors),
            same,
            same & ~torch.eye(len(labels), dtype=torch.bool, device=same.device),
        )


class BatchAllTripletLoss(_OfClasses):
    """All triplets of the batch that are not easy yet."""

    def __call__(self, vectors: Sequence[Tensor], labels: Any, own: slice | None = None) -> Tensor:
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

    def __call__(self, vectors: Sequence[Tensor], labels: Any, own: slice | None = None) -> Tensor:
        """Return the mean over the texts."""
        return F.relu(self.gap(vectors, labels) + self.margin).mean()

    def gap(self, vectors: Sequence[Tensor], labels: Any) -> Tensor:
        """Return the distance of the hardest positive minus that of the hardest negative."""
        far, same, positive = self.tables(vectors[0], labels)
        most = far.amax(1, keepdim=True)
        return (far * positive).max(1).values - torch.where(same, far + most, far).min(1).values


class BatchHardSoftMarginTripletLoss(BatchHardTripletLoss):
    """The same without a margin: the softplus of the gap."""

    def __call__(self, vectors: Sequence[Tensor], labels: Any, own: slice | None = None) -> Tensor:
        """Return the mean over the texts."""
        return F.softplus(self.gap(vectors, labels)).mean()


class BatchSemiHardTripletLoss(_OfClasses):
    """For each two of a class the nearest other text that is farther than they are apart, or else the farthest."""

    def __call__(self, vectors: Sequence[Tensor], labels: Any, own: slice | None = None) -> Tensor:
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

"""Losses with an additional layer, which is trained in the run and discarded after it.

The layer receives the vectors of a batch, ``(examples, texts, size)``, and returns the input of the loss: scores of
classes of a pair (Reimers and Gurevych 2019, arXiv:1908.10084), or vectors of the size of a teacher's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flodl_hf.training.losses.loss import Form, VectorLoss
from flodl_hf.training.losses.teachers import EmbedDistillLoss

__all__ = ["AUXILIARY_LOSSES", "SoftmaxLoss", "classifies", "needs_layer"]

OF_CLASSES: Form = "pair_classes"


class PairClassifier(nn.Module):
    """Class scores of two texts, from their vectors, the absolute difference, and the product.

    Args:
        size: of a vector.
        classes: how many there are.
        parts: which of the three.
    """

    def __init__(self, size: int, classes: int, parts: Sequence[bool]) -> None:
        super().__init__()
        self.parts = tuple(parts)
        both, apart, product = self.parts
        self.classifier = nn.Linear((2 * both + apart + product) * size, classes)

    def forward(self, vectors: Tensor) -> Tensor:
        """Return ``(examples, 1, classes)`` of ``(examples, 2, size)``."""
        first, second = vectors.unbind(1)
        found = ([first, second], [(first - second).abs()], [first * second])
        features = torch.cat([one for wanted, part in zip(self.parts, found, strict=True) if wanted for one in part], 1)
        return self.classifier(features)[:, None]


@dataclass(frozen=True)
class SoftmaxLoss(VectorLoss):
    """Cross-entropy of the class of a pair, from the scores of an additional layer.

    Attributes:
        concatenation_sent_rep: the layer sees both vectors.
        concatenation_sent_difference: it sees how far they are apart in each number.
        concatenation_sent_multiplication: it sees their product.
    """

    concatenation_sent_rep: bool = True
    concatenation_sent_difference: bool = True
    concatenation_sent_multiplication: bool = False

    forms: ClassVar[tuple[Form, ...]] = (OF_CLASSES,)

    @property
    def _parts(self) -> tuple[bool, bool, bool]:
        return (
            self.concatenation_sent_rep,
            self.concatenation_sent_difference,
            self.concatenation_sent_multiplication,
        )

    def faults(self) -> list[str]:
        """Return the problems of the settings."""
        return [] if any(self._parts) else ["all of concatenation_sent_* are off; expected one of them"]

    def layer(self, size: int, classes: int) -> PairClassifier:
        """Return the layer for vectors of a size."""
        return PairClassifier(size, classes, self._parts)

    def __call__(self, vectors: Sequence[Tensor], labels: Tensor | None, own: slice | None = None) -> Tensor:
        """Return the mean over pairs, of their scores."""
        assert labels is not None
        return F.cross_entropy(vectors[0].float(), labels)


@dataclass(frozen=True)
class ProjectedDistillLoss(EmbedDistillLoss):
    """Distance to vectors of a teacher of another size, after a linear layer."""

    def layer(self, size: int, classes: int) -> nn.Linear:
        """Return the layer for vectors of a size."""
        return nn.Linear(size, self.projection_dim or size)


AUXILIARY_LOSSES: dict[str, Any] = {"SoftmaxLoss": SoftmaxLoss, "EmbedDistillLoss": ProjectedDistillLoss}
"""By name."""


def _is(word: Any, name: str) -> bool:
    return isinstance(word, str) and word.lower().replace("_", "").replace("-", "").removesuffix("loss") == name


def classifies(word: Any) -> bool:
    """Return whether a word names the loss of classes of pairs."""
    return _is(word, "softmax")


def needs_layer(word: Any, settings: Mapping[str, Any] | None) -> bool:
    """Return whether a loss with these settings has an additional layer."""
    return classifies(word) or (_is(word, "embeddistill") and (settings or {}).get("projection_dim") is not None)

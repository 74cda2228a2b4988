"""Embeddings trained with an additional layer, which is discarded after the run.

The layer receives the vectors of a batch, ``(examples, texts, size)``, and returns the input of the loss: scores of
classes of a pair (Reimers and Gurevych 2019, arXiv:1908.10084), or vectors of the size of a teacher's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flodl.errors import DataError
from flodl.metrics import Accuracy
from flodl_hf.training.losses import is_named
from flodl_hf.training.losses.pairs import EmbedDistillLoss, Form, VectorLoss
from flodl_hf.training.options import Options
from flodl_hf.training.task import Examples, Scorer
from flodl_hf.training.vectors.step import VectorObjective
from flodl_hf.training.vectors.tables import HeldOut, TextTable, VectorScorer
from flodl_hf.training.vectors.task import EmbeddingTask

if TYPE_CHECKING:
    from flodl_hf.models.encoder_model import EncoderModel

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

    def faults(self) -> list[str]:
        """Return the problems of the settings."""
        return [] if any(astuple(self)) else ["all of concatenation_sent_* are off; expected one of them"]

    def layer(self, size: int, classes: int) -> PairClassifier:
        """Return the layer for vectors of a size."""
        return PairClassifier(size, classes, astuple(self))

    def __call__(self, vectors: Sequence[Tensor], labels: Any, own: slice | None = None) -> Tensor:
        """Return the mean over pairs, of their scores."""
        return F.cross_entropy(vectors[0].float(), labels)


@dataclass(frozen=True)
class ProjectedDistillLoss(EmbedDistillLoss):
    """Distance to vectors of a teacher of another size, after a linear layer."""

    def layer(self, size: int, classes: int) -> nn.Linear:
        """Return the layer for vectors of a size."""
        return nn.Linear(size, self.projection_dim or size)


AUXILIARY_LOSSES: dict[str, Any] = {"SoftmaxLoss": SoftmaxLoss, "EmbedDistillLoss": ProjectedDistillLoss}
"""By name."""


def needs_layer(word: Any, settings: Mapping[str, Any] | None) -> bool:
    """Return whether a loss with these settings has an additional layer."""
    return is_named(word, "softmax") or (
        is_named(word, "embeddistill") and (settings or {}).get("projection_dim") is not None
    )


def attach_layer(model: EncoderModel, loss: Any, classes: int, pooling: str | None, seed: int) -> None:
    """Attach the layer of a loss to a model, unless it has one; drawn as torch draws linear layers.

    Args:
        model: receives the layer.
        loss: the loss.
        classes: how many classes pairs have.
        pooling: as in the options of the run.
        seed: of the layer.
    """
    if model.beside is not None:
        return
    recipe = model.sentence_recipe
    poolings = pooling.split("+") if pooling else recipe.pooling if recipe else ("mean",)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.beside = loss.layer(model.config.encoder.hidden_size * len(poolings), classes)


@dataclass(frozen=True)
class AuxiliaryObjective(VectorObjective):
    """The loss of the outputs of the layer; arguments as for `VectorObjective`."""

    def score(self, model: Any, batch: Any) -> Tensor:
        """Return the outputs of the layer, ``(examples, texts or 1, size or classes)``."""
        return model.beside(super().score(model, batch)).float()


class ClassScorer(Scorer):
    """Accuracy of the classes of pairs."""

    def __init__(self, truth: HeldOut) -> None:
        super().__init__(Accuracy())
        self.truth = truth

    def update(self, example: int, scores: Sequence[Tensor]) -> None:
        """Add the scores of one pair, ``[(1, classes)]``."""
        labels: Any = self.truth.labels
        self.parts[0].update(scores[0], torch.tensor([int(labels[example])]))


def scorer_of(truth: HeldOut) -> Scorer:
    """Return a scorer of classes, or of vectors."""
    return ClassScorer(truth) if truth.form == OF_CLASSES else VectorScorer(truth)


@dataclass
class AuxiliaryTask(EmbeddingTask):
    """Embeddings trained with an additional layer; arguments as for `EmbeddingTask`."""

    usual: ClassVar[Mapping[Any, str]] = {OF_CLASSES: "SoftmaxLoss", "teacher_vectors": "EmbedDistillLoss"}
    table: ClassVar[Mapping[str, Any]] = AUXILIARY_LOSSES
    refused: ClassVar[tuple[str, ...]] = ("matryoshka",)
    trained: ClassVar[type[VectorObjective]] = AuxiliaryObjective
    scores = staticmethod(scorer_of)

    @classmethod
    def read(cls, examples: Examples, options: Options, source: str) -> TextTable:
        """Return a table; integers are classes where the loss is of classes."""
        table = super().read(examples, options, source)
        whole = table.labels is not None and table.labels.dtype.kind == "i" and table.labels.min() >= 0
        if is_named(options.vector_loss, "softmax") and table.form in ("scored", "binary") and whole:
            return replace(table, form=OF_CLASSES)
        return table

    def held_out(self, examples: Examples) -> TextTable:
        """Return evaluation examples, with classes numbered as in training.

        Raises:
            DataError: there are classes that training does not have.
        """
        table = self.read(examples, self.options, "eval")
        if table.form != OF_CLASSES or table.labels is None:
            return table
        known = self.first.names or tuple(map(str, range(self._classes)))
        names = table.names or tuple(map(str, range(int(table.labels.max()) + 1)))
        strange = sorted({*names} - {*known})
        if strange or bool(self.first.names) != bool(table.names):
            raise DataError(
                f"found the classes {strange or table.names} of pairs, which training does not have; expected "
                f"{', '.join(known)}",
                names=strange,
            )
        numbers = np.asarray([known.index(name) for name in names], np.int64)
        return replace(table, labels=numbers[table.labels])

    @property
    def _classes(self) -> int:
        first = self.first
        if first.form != OF_CLASSES or first.labels is None:
            return 0
        return len(first.names) or int(first.labels.max()) + 1

    @property
    def start(self) -> Callable[[EncoderModel], None]:
        """Attaches the layer to a model, on every rank."""
        options = self.options
        return partial(
            attach_layer, loss=self.losses[0], classes=self._classes, pooling=options.pooling, seed=options.seed
        )

    def _fitting(self, form: Any) -> list[Any]:
        return [loss for loss in self.losses if form in loss.forms]

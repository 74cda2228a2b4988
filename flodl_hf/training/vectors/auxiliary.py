"""Embeddings trained with an additional layer: classes of pairs, and teachers with another vector size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from flodl.errors import DataError
from flodl.metrics import Metric
from flodl_hf.training.eval_predictions import CollectedPredictions
from flodl_hf.training.losses import USUAL, make_loss
from flodl_hf.training.losses.auxiliary import AUXILIARY_LOSSES, OF_CLASSES, classifies
from flodl_hf.training.options import Options
from flodl_hf.training.task import Examples, Prepared
from flodl_hf.training.vectors.scorer import VectorScorer
from flodl_hf.training.vectors.step import VectorObjective
from flodl_hf.training.vectors.tables import TextTable
from flodl_hf.training.vectors.task import EmbeddingTask

if TYPE_CHECKING:
    from flodl_hf.models.encoder_model import EncoderModel

__all__ = ["AuxiliaryTask", "LayerStart"]


@dataclass(frozen=True)
class LayerStart:
    """Attach the layer of a loss to a model, unless it has one.

    Args:
        loss: the loss.
        classes: how many classes pairs have.
        pooling: as in the options of the run.
        seed: of the layer.
    """

    loss: Any
    classes: int
    pooling: str | None
    seed: int

    def __call__(self, model: EncoderModel) -> None:
        """Give the model the layer, drawn as torch draws linear layers."""
        if model.beside is not None:
            return
        recipe = model.sentence_recipe
        poolings = self.pooling.split("+") if self.pooling else recipe.pooling if recipe else ("mean",)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model.beside = self.loss.layer(model.config.encoder.hidden_size * len(poolings), self.classes)


@dataclass(frozen=True)
class AuxiliaryTask(EmbeddingTask):
    """Embeddings trained with an additional layer; arguments as for `EmbeddingTask`."""

    usual: ClassVar[Mapping[Any, str]] = {OF_CLASSES: "SoftmaxLoss", "teacher_vectors": "EmbedDistillLoss"}
    table: ClassVar[Mapping[str, Any]] = AUXILIARY_LOSSES
    refused: ClassVar[tuple[str, ...]] = ("matryoshka",)

    @classmethod
    def read(cls, examples: Examples, options: Options, where: str) -> TextTable:
        """Return a table; integers are classes where the loss is of classes."""
        table = super().read(examples, options, where)
        whole = table.labels is not None and table.labels.dtype.kind == "i" and table.labels.min() >= 0
        if classifies(options.vector_loss) and table.form in ("scored", "binary") and whole:
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
        known = self._first.names
        names = table.names if known else tuple(str(number) for number in range(int(table.labels.max()) + 1))
        strange = sorted(set(names) - set(known or map(str, range(self._classes))))
        if strange or bool(known) != bool(table.names):
            raise DataError(
                f"eval: classes {strange or table.names} of pairs are none of training's; expected "
                f"{', '.join(known) if known else f'numbers below {self._classes}'}",
                names=strange,
            )
        if not known:
            return table
        places = {name: number for number, name in enumerate(known)}
        told = [table.names[number] for number in table.labels.tolist()]
        return replace(table, labels=np.asarray([places[name] for name in told], np.int64))

    @property
    def _classes(self) -> int:
        first = self._first
        if first.form != OF_CLASSES or first.labels is None:
            return 0
        return len(first.names) or int(first.labels.max()) + 1

    @property
    def start(self) -> LayerStart:
        """Attaches the layer to a model, on every rank."""
        return LayerStart(self.losses[0], self._classes, self.options.pooling, self.options.seed)

    def settle(self, model: EncoderModel) -> list[str]:
        """Configure the embeddings of the model, and attach the layer; return notes for the user."""
        notes = super().settle(model)
        self.start(model)
        return notes

    def conclude(self, model: EncoderModel) -> None:
        """Take the layer away."""
        model.beside = None

    def objective(self) -> AuxiliaryObjective:
        """Return the loss of training."""
        recipe, options = self._guides["recipe"], self.options
        return AuxiliaryObjective(
            self.losses, recipe.pooling, recipe.normalize, shared=options.ranks > 1, cache_tokens=options.cache_tokens
        )

    def of_held_out(self, prepared: Prepared) -> VectorObjective:
        """Return the loss of evaluation data: the loss of training if it accepts such data, else the default."""
        form, recipe = prepared.truth.form, self._guides["recipe"]
        if form in self.losses[0].forms:
            return AuxiliaryObjective(self.losses, recipe.pooling, recipe.normalize)
        return VectorObjective((make_loss(USUAL[form]),), recipe.pooling, recipe.normalize)

    def scorer(self, prepared: Prepared) -> Any:
        """Return a new scorer."""
        return ClassScorer(prepared.truth.labels) if prepared.truth.form == OF_CLASSES else VectorScorer(prepared.truth)


@dataclass(frozen=True)
class AuxiliaryObjective(VectorObjective):
    """The loss of the outputs of the layer; arguments as for `VectorObjective`."""

    def score(self, model: Any, batch: Any) -> Tensor:
        """Return the outputs of the layer, ``(examples, texts or 1, size or classes)``."""
        return model.beside(super().score(model, batch)).float()


class ClassScorer:
    """Accuracy of the classes of pairs.

    Args:
        labels: the class of each pair.
    """

    def __init__(self, labels: Any) -> None:
        self.labels, self.kept = labels, CollectedPredictions()

    def update(self, example: int, scores: Sequence[Tensor]) -> None:
        """Add the scores of one pair, ``[(1, classes)]``."""
        self.kept.update(example, int(scores[0].reshape(-1).argmax()), int(self.labels[example]))

    def metrics(self) -> Sequence[Metric]:
        """Return the metrics."""
        return [self.kept]

    def compute(self) -> dict[str, float]:
        """Return the accuracy."""
        found = list(self.kept.items.values())
        return {"accuracy": sum(a == b for a, b in found) / len(found) if found else float("nan")}

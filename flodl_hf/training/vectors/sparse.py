"""``task="sparse"``: weights of words by a masked-word head, with the losses of sparse vectors.

Dense losses with the inner product, and a penalty on active words: SPLADE (Formal et al. 2021, arXiv:2109.10086) with
the FLOPS penalty (Paria et al. 2020, arXiv:2004.05665), which rises over the first steps; names and values are equal to
sentence-transformers' SparseEncoder.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from flodl.data import Where
from flodl_hf.checkpoints.sentence.recipe import SentenceTransformerConfig
from flodl_hf.checkpoints.sentence.vectors import SpladePooling
from flodl_hf.nn.layout import largest_of_texts
from flodl_hf.training.batching import epoch_ends
from flodl_hf.training.losses import USUAL, make_loss, with_settings
from flodl_hf.training.losses.pairs import (
    AnglELoss,
    CheckedSettings,
    CoSENTLoss,
    CosineSimilarityLoss,
    DistillKLDivLoss,
    MarginMSELoss,
    MSELoss,
    TripletLoss,
)
from flodl_hf.training.losses.ranking import MultipleNegativesRankingLoss, Wrapped
from flodl_hf.training.options import Options
from flodl_hf.training.rows import CollateRows
from flodl_hf.training.vectors.step import CollateTexts, TextRows, VectorObjective
from flodl_hf.training.vectors.tables import HeldOut, VectorScorer
from flodl_hf.training.vectors.task import EmbeddingTask

if TYPE_CHECKING:
    from flodl_hf.models.encoder_model import EncoderModel


@dataclass(frozen=True)
class SparseMultipleNegativesRankingLoss(MultipleNegativesRankingLoss):
    """The partner of a text against all others of the batch, by the inner product."""

    scale: float = 1.0
    similarity: str = "dot"


@dataclass(frozen=True)
class SparseDistillKLDivLoss(DistillKLDivLoss):
    """The shares of a question's candidates, as a teacher's scores share them out."""

    temperature: float = 2.0


SPARSE_LOSSES: dict[str, Any] = {
    f"Sparse{kind.__name__.removeprefix('Sparse')}": kind
    for kind in (
        SparseMultipleNegativesRankingLoss, MarginMSELoss, SparseDistillKLDivLoss, CoSENTLoss, AnglELoss,
        CosineSimilarityLoss, TripletLoss, MSELoss,
    )
}  # fmt: skip
"""By name."""

SPARSE_USUAL: dict[Any, str] = {
    form: f"Sparse{name}"
    for form, name in {**USUAL, "binary": "CoSENTLoss"}.items()
    if f"Sparse{name}" in SPARSE_LOSSES
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
class SpladeLoss(Wrapped, CheckedSettings):
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

    document_regularizer_weight: float = 3e-5
    query_regularizer_weight: float | None = 5e-5
    document_regularizer_threshold: int | None = None
    query_regularizer_threshold: int | None = None
    use_document_regularizer_only: bool = False
    scheduler_type: str = "quadratic"
    warmup_ratio: float = 1 / 3

    in_batch = True
    ragged: ClassVar[bool] = False
    choices: ClassVar[Mapping[str, Collection[Any]]] = {"scheduler_type": ("quadratic", "linear")}

    def faults(self) -> list[str]:
        """Return the problems of the settings."""
        numbers = {name: getattr(self, name) for name in ("document_regularizer_weight", "query_regularizer_weight")}
        wrong = [f"{name} is {value}; expected 0 or more" for name, value in numbers.items() if (value or 0) < 0]
        if not 0 <= self.warmup_ratio <= 1:
            wrong.append(f"warmup_ratio is {self.warmup_ratio}; expected 0 to 1")
        return wrong + super().faults()

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


STRENGTH = "strength"
BY_COSINE = ("scored", "binary")
WORDS = ("words_first", "words_others")


class SparseScorer(VectorScorer):
    """Metrics of sparse vectors, with the number of active words."""

    def __init__(self, truth: HeldOut) -> None:
        super().__init__(truth)
        self.measure = "cosine" if truth.form in BY_COSINE else "dot"

    def compute(self) -> dict[str, float]:
        """Return the figures, with the mean number of words of first texts and of the others."""
        figures = super().compute()
        kept = self.kept.items.values()
        for name, part in zip(WORDS, (slice(0, 1), slice(1, None)), strict=True):
            counts = [int((vectors[part] != 0).sum()) / max(1, len(vectors[part])) for vectors in kept]
            figures[name] = sum(counts) / len(counts) if counts else float("nan")
        return figures


@dataclass
class SparseTask(EmbeddingTask):
    """Weights of words; arguments as of `EmbeddingTask`."""

    name = "sparse"
    head = "masked_lm"

    usual: ClassVar[Mapping[Any, str]] = SPARSE_USUAL
    evaluated: ClassVar[Mapping[Any, str]] = SPARSE_USUAL
    table: ClassVar[Mapping[str, Any]] = SPARSE_LOSSES
    scores: ClassVar[Any] = SparseScorer
    refused: ClassVar[tuple[str, ...]] = ("matryoshka", "pooling", "normalize", "guide")

    @classmethod
    def loss_named(cls, word: str, options: Options) -> Any:
        """Return the loss with this name and its penalty; the settings of the run include both."""
        settings, known = dict(options.loss_options or {}), {f.name for f in fields(SpladeLoss)}
        penalty = {name: settings.pop(name) for name in [*settings] if name in known}
        return with_settings(SpladeLoss, penalty, make_loss(word, settings, SPARSE_LOSSES))

    def settle(self, model: EncoderModel) -> list[str]:
        """Configure sparse vectors as in the folder of the model, or as in SPLADE."""
        before = model.sentence_recipe
        if before is None or before.splade is None:
            before = SentenceTransformerConfig(max_tokens=self.options.max_length, splade=SpladePooling())
        model.sentence_recipe = self.recipe = before
        return self._prompt_notes()

    def _usual(self, form: Any) -> Any:
        loss, trained = super()._usual(form), self.losses[0]
        return replace(trained, loss=loss) if isinstance(trained, SpladeLoss) else loss

    def _objective(self, losses: tuple[Any, ...], **further: Any) -> SparseObjective:
        return SparseObjective(losses, splade=self.recipe.splade, **further)

    def collate(self, usual: CollateRows, rows: TextRows, batches: Any, accumulate: int) -> CollateTexts:
        """Return the collate function, which adds the share of the penalty."""
        ends = epoch_ends(self.options, batches, accumulate)
        further = partial(strength_of_batch, self.losses[0], ends, accumulate)
        return replace(super().collate(usual, rows, batches, accumulate), further=further)


def strength_of_batch(loss: Any, ends: Sequence[int], accumulate: int, position: Where) -> dict[str, Any]:
    """Return the share of the penalty that counts in a batch, a scalar; ``ends`` are the last steps of epochs."""
    step = ends[min(position.epoch, len(ends) - 2)] + position.number // accumulate
    return {STRENGTH: torch.tensor(loss.strength(step, ends[-1]) if isinstance(loss, SpladeLoss) else 1.0)}


@dataclass(frozen=True)
class SparseObjective(VectorObjective):
    """The loss of sparse vectors; arguments as of `VectorObjective`.

    Args:
        splade: how scores of words become weights.
    """

    splade: SpladePooling = field(default_factory=SpladePooling)

    def _pooled(self, states: Tensor, part: Any) -> Tensor:
        """Return the weights of all words, ``(texts, words)``, of their scores at each token."""
        most = self.splade.strategy == "max"
        # the largest score has the largest weight, so that only that one is put through the logarithm
        values = states if most else self.splade.activated(states.float())
        if "places" in part:
            if most:
                found = largest_of_texts(values, part["cu_seqlens"])
            else:
                lengths = part["cu_seqlens"].to(torch.int64).diff()
                found = torch.segment_reduce(values, "sum", lengths=lengths, axis=0, unsafe=True)
        elif "cu_seqlens" in part:
            pieces = values.split(part["row_lengths"])
            found = torch.stack([piece.amax(0) if most else piece.sum(0) for piece in pieces])
        else:
            real = part["attention_mask"].bool()[:, :, None]
            found = values.masked_fill(~real, -torch.inf).max(1).values if most else (values * real).sum(1)
        return self.splade.activated(found.float()) if most else found

    def _value(self, loss: Any, texts: list[Tensor], labels: Tensor | None, own: slice | None, batch: Any) -> Tensor:
        # batches of evaluation have no share, and the whole penalty
        penalty = {"strength": batch.get(STRENGTH, 1.0)} if isinstance(loss, SpladeLoss) else {}
        return loss(texts, labels, own, **penalty)

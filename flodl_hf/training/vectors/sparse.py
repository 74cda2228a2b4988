"""``task="sparse"``: weights of words by a masked-word head, as SPLADE makes them, with a penalty of their number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from flodl.data import Where
from flodl.errors import ConfigError
from flodl_hf.checkpoints.sentence.recipe import SentenceRecipe
from flodl_hf.checkpoints.sentence.sparse import SpladePooling
from flodl_hf.nn.layout.segments import largest_of_texts
from flodl_hf.training.losses import make_loss
from flodl_hf.training.losses.sparse import SPARSE_LOSSES, SPARSE_USUAL, SpladeLoss, penalties
from flodl_hf.training.options import Options
from flodl_hf.training.rows import CollateRows
from flodl_hf.training.task import Prepared
from flodl_hf.training.vectors.rows import CollateTexts, TextRows
from flodl_hf.training.vectors.scorer import VectorScorer
from flodl_hf.training.vectors.step import VectorObjective
from flodl_hf.training.vectors.task import EmbeddingTask

if TYPE_CHECKING:
    from flodl_hf.models.encoder_model import EncoderModel

__all__ = ["SparseTask"]

STRENGTH = "strength"
BY_COSINE = ("scored", "binary")
WORDS = ("words_first", "words_others")


@dataclass(frozen=True)
class SparseTask(EmbeddingTask):
    """Weights of words; arguments as of `EmbeddingTask`."""

    name: str = "sparse"
    head: str = "masked_lm"

    usual: ClassVar[Mapping[Any, str]] = SPARSE_USUAL
    table: ClassVar[Mapping[str, Any]] = SPARSE_LOSSES
    refused: ClassVar[tuple[str, ...]] = ("matryoshka", "pooling", "normalize", "guide")
    takes_ragged: ClassVar[bool] = False

    @classmethod
    def loss_named(cls, word: str, options: Options) -> Any:
        """Return the loss with this name and its penalty; the settings of the run include both."""
        penalty, settings = penalties(options.loss_options or {})
        loss = SpladeLoss(make_loss(word, settings, SPARSE_LOSSES), **penalty)
        problems = loss.faults()
        if problems:
            raise ConfigError(f"loss_options of SpladeLoss: {'; '.join(problems)}", problems=problems)
        return loss

    def settle(self, model: EncoderModel) -> list[str]:
        """Configure sparse vectors as in the folder of the model, or as in SPLADE."""
        before = model.sentence_recipe
        if before is None or before.splade is None:
            before = SentenceRecipe(max_tokens=self.options.max_length, splade=SpladePooling())
        model.sentence_recipe = before
        self._guides["recipe"] = before
        return self._prompt_notes()

    def objective(self) -> SparseObjective:
        """Return the loss of training."""
        options = self.options
        return SparseObjective(
            self.losses, shared=options.ranks > 1, cache_tokens=options.cache_tokens, splade=self._pooling
        )

    def of_held_out(self, prepared: Prepared) -> SparseObjective:
        """Return the loss of evaluation data, with the whole penalty."""
        form = prepared.truth.form
        fitting = [loss for loss in self.losses if form in loss.forms]
        loss = (
            fitting[0] if fitting else replace(self.losses[0], loss=make_loss(SPARSE_USUAL[form], None, SPARSE_LOSSES))
        )
        return SparseObjective((loss,), splade=self._pooling, rising=False)

    @property
    def _pooling(self) -> SpladePooling:
        return self._guides["recipe"].splade

    def collate(self, usual: CollateRows, rows: TextRows) -> CollateTexts:
        """Return the collate function, which adds the share of the penalty."""
        options, plan = self.options, self.batches(rows)
        starts, steps = [], 0
        for epoch in range(options.epochs):
            starts.append(steps)
            steps += -(-len(plan.plan(epoch)) // options.accumulate)
            if options.max_steps is not None and steps >= options.max_steps:
                steps = options.max_steps
                break
        return replace(
            super().collate(usual, rows), further=Rising(self.losses[0], tuple(starts), options.accumulate, steps)
        )

    def collate_held_out(self, usual: CollateRows, rows: TextRows) -> CollateTexts:
        """Return the collate function for evaluation, with the whole penalty."""
        return super().collate(usual, rows)

    def scorer(self, prepared: Prepared) -> SparseScorer:
        """Return a new scorer."""
        form = prepared.truth.form
        return SparseScorer(prepared.truth, "cosine" if form in BY_COSINE else "dot")


@dataclass(frozen=True)
class Rising:
    """How much of the penalty counts in a batch.

    Args:
        loss: knows by its step.
        starts: the first step of each epoch.
        accumulate: batches of a step.
        steps: of the whole run.
    """

    loss: Any
    starts: tuple[int, ...]
    accumulate: int
    steps: int

    def __call__(self, where: Where) -> dict[str, Any]:
        """Return the share, a scalar."""
        step = self.starts[min(where.epoch, len(self.starts) - 1)] + where.number // self.accumulate
        return {
            STRENGTH: torch.tensor(self.loss.strength(step, self.steps) if isinstance(self.loss, SpladeLoss) else 1.0)
        }


@dataclass(frozen=True)
class SparseObjective(VectorObjective):
    """The loss of sparse vectors; arguments as of `VectorObjective`.

    Args:
        splade: how scores of words become weights.
        rising: the batch contains the share of the penalty.
    """

    splade: SpladePooling = field(default_factory=SpladePooling)
    rising: bool = True

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

    def _value(self, loss: Any, vectors: Tensor, labels: Tensor | None, own: slice | None, batch: Any) -> Tensor:
        if not isinstance(loss, SpladeLoss):
            return loss(list(vectors.unbind(1)), labels, own)
        return loss(list(vectors.unbind(1)), labels, own, batch[STRENGTH] if self.rising else 1.0)


class SparseScorer(VectorScorer):
    """Metrics of sparse vectors, with the number of active words."""

    def compute(self) -> dict[str, float]:
        """Return the figures, with the mean number of words of first texts and of the others."""
        figures = super().compute()
        kept = self.kept.items.values()
        for name, part in zip(WORDS, (slice(0, 1), slice(1, None)), strict=True):
            counts = [int((vectors[part] != 0).sum()) / max(1, len(vectors[part])) for vectors in kept]
            figures[name] = sum(counts) / len(counts) if counts else float("nan")
        return figures

"""``task="multivector"``: a vector for each token of a text, compared late, as ColBERT has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from flodl_hf.checkpoints.sentence.multivector import LateRecipe, marker_id
from flodl_hf.training.losses import make_loss
from flodl_hf.training.losses.multivector import MULTIVECTOR_LOSSES, MULTIVECTOR_USUAL
from flodl_hf.training.rows import CollateRows, EncodedRows, RowBuilder
from flodl_hf.training.task import CHUNK, LengthLimits, Prepared
from flodl_hf.training.vectors.multivector_scorer import LateScorer
from flodl_hf.training.vectors.multivector_step import CollateLate, LateObjective
from flodl_hf.training.vectors.projection import LateStart, take_out
from flodl_hf.training.vectors.rows import PARTS, Laid, TextRows
from flodl_hf.training.vectors.task import EmbeddingTask

if TYPE_CHECKING:
    from flodl_hf.models.encoder_model import EncoderModel
    from flodl_hf.tokenization.tokenizer import Tokenizer

__all__ = ["MultiVectorTask"]


@dataclass(frozen=True)
class MultiVectorTask(EmbeddingTask):
    """Vectors of tokens; arguments as of `EmbeddingTask`."""

    name: str = "multivector"

    usual: ClassVar[Mapping[Any, str]] = MULTIVECTOR_USUAL
    table: ClassVar[Mapping[str, Any]] = MULTIVECTOR_LOSSES
    refused: ClassVar[tuple[str, ...]] = ("matryoshka", "adaptive_layers", "pooling", "normalize", "guide")
    takes_ragged: ClassVar[bool] = False

    @property
    def start(self) -> LateStart:
        """What puts the projection into a model, on every rank."""
        options = self.options
        return LateStart(options.projection, options.max_length, options.seed)

    def settle(self, model: EncoderModel) -> list[str]:
        """Have the model make vectors of tokens, as its folder says or anew; return what is to be said of it."""
        notes = self.start(model)
        self._guides["recipe"] = model.sentence_recipe
        self._guides["most"] = model.max_tokens
        tokenizer = model.tokenizer
        skipped = {marker_id(tokenizer, word, None) for word in self._late.skipped} - {None}
        self._guides["skipped"] = tuple(sorted(skipped))
        self._guides["mask"] = tokenizer.mask_token_id if tokenizer is not None and self._late.expanded else None
        return notes

    def bounds(self, model: EncoderModel) -> list[int]:
        """Return the most tokens of a document."""
        return [self._late.document_length] if self._late.document_length else []

    def conclude(self, model: EncoderModel) -> None:
        """Keep the projection in the model's recipe."""
        take_out(model)

    @property
    def _late(self) -> LateRecipe:
        return self._guides["recipe"].late

    def encode(
        self, rows: Sequence[Sequence[str]], tokenizer: Tokenizer, limits: LengthLimits
    ) -> tuple[EncodedRows, int]:
        """Return rows of tokens with the lengths of their texts, the first of each a query, and how many documents were
        cut.
        """
        late, width = self._late, len(rows[0])
        builder, lengths, cut = RowBuilder(limits.types), [], 0
        queries = min((n for n in (late.query_length, self._guides["most"]) if n), default=None)
        for start in range(0, len(rows), max(1, CHUNK // width)):
            part = rows[start : start + max(1, CHUNK // width)]
            asked = late.rows(tokenizer, [row[0] for row in part], queries, query=True)
            found = [text for row in part for text in row[1:]]
            others = iter(late.rows(tokenizer, found, limits.max_tokens, query=False))
            for query in asked:
                documents = [next(others) for _ in range(width - 1)]
                for row in (query, *documents):
                    builder.add(row, len(lengths))
                    lengths.append(len(row.ids))
                cut += sum(row.truncated for row in documents)
        parts = np.asarray(lengths, np.int64).reshape(-1, width)
        return EncodedRows(builder.build().columns, parts.sum(1).tolist(), {PARTS: parts}), cut

    def laid(self, rows: TextRows) -> Laid:
        """Return what lies in a batch: documents alone."""
        parts = [table.values[PARTS][:, 1:] for table in rows.tables]
        sums, widest = (np.concatenate([count(part, 1) for part in parts]) for count in (np.sum, np.max))
        return Laid(sums, widest, rows.width - 1)

    def collate(self, usual: CollateRows, rows: TextRows) -> CollateLate:
        """Return what makes batches, queries apart from documents."""
        late, mask = self._late, self._guides["mask"]
        filled = min((n for n in (late.query_length, self._guides["most"]) if n), default=None)
        return CollateLate(
            usual.pad_id, usual.layout, shapes=usual.shapes, widths=usual.widths, mask_id=mask,
            query_tokens=filled, attended=late.attended, skipped=self._guides["skipped"], first=late.first,
        )  # fmt: skip

    def objective(self) -> LateObjective:
        """Return the loss of training."""
        options = self.options
        return self._objective(self.losses, shared=options.ranks > 1, cache_tokens=options.cache_tokens)

    def of_held_out(self, prepared: Prepared) -> LateObjective:
        """Return the loss of held-out data: that of training where it takes such data."""
        form = prepared.truth.form
        fitting = [loss for loss in self.losses if form in loss.forms]
        return self._objective((fitting[0] if fitting else make_loss(self.usual[form], None, self.table),))

    def _objective(self, losses: tuple[Any, ...], **further: Any) -> LateObjective:
        return LateObjective(losses, **further)

    def scorer(self, prepared: Prepared) -> LateScorer:
        """Return a scorer that has seen nothing."""
        return LateScorer(prepared.truth)

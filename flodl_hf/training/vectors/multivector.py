"""``task="multivector"``: a vector for each token of a text, compared late, as ColBERT has them."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flodl.metrics import Metric
from flodl_hf.checkpoints.sentence.multivector import LateRecipe, marker_id
from flodl_hf.inference.similarity import max_sim
from flodl_hf.training.eval_predictions import CollectedValues
from flodl_hf.training.evaluators import figures_of_found
from flodl_hf.training.losses import make_loss
from flodl_hf.training.losses.multivector import MULTIVECTOR_LOSSES, MULTIVECTOR_USUAL
from flodl_hf.training.rows import CollateRows, EncodedRows, RowBuilder
from flodl_hf.training.task import CHUNK, LengthLimits, Prepared
from flodl_hf.training.vectors.multivector_step import CollateLate, LateObjective
from flodl_hf.training.vectors.projection import LateStart, take_out
from flodl_hf.training.vectors.rows import PARTS, Laid, TextRows
from flodl_hf.training.vectors.scorer import NAMES, RETRIEVAL, HeldOut
from flodl_hf.training.vectors.task import EmbeddingTask

if TYPE_CHECKING:
    from flodl_hf.models.encoder_model import EncoderModel
    from flodl_hf.tokenization.tokenizer import Tokenizer

__all__ = ["LateScorer", "MultiVectorTask"]


@dataclass(frozen=True)
class MultiVectorTask(EmbeddingTask):
    """Vectors of tokens; arguments as of `EmbeddingTask`."""

    name: str = "multivector"

    usual: ClassVar[Mapping[Any, str]] = MULTIVECTOR_USUAL
    table: ClassVar[Mapping[str, Any]] = MULTIVECTOR_LOSSES
    refused: ClassVar[tuple[str, ...]] = ("matryoshka", "pooling", "normalize", "guide")
    takes_ragged: ClassVar[bool] = False

    @property
    def start(self) -> LateStart:
        """What puts the projection into a model, on every rank."""
        options = self.options
        return LateStart(options.projection, options.max_length, options.seed)

    def settle(self, model: EncoderModel) -> list[str]:
        """Configure token vectors as in the folder of the model, or new ones; return notes for the user."""
        notes = self.start(model)
        self._guides["recipe"] = model.sentence_recipe
        self._guides["most"] = model.max_tokens
        tokenizer = model.tokenizer
        skipped = {marker_id(tokenizer, word, None) for word in self._late.skipped} - {None}
        self._guides["skipped"] = tuple(sorted(skipped))
        self._guides["mask"] = tokenizer.mask_token_id if tokenizer is not None and self._late.expanded else None
        return notes

    def bounds(self, model: EncoderModel) -> list[int]:
        """Return the maximum number of tokens of a document."""
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
        """Return the lengths of documents in a batch."""
        parts = [table.values[PARTS][:, 1:] for table in rows.tables]
        sums, widest = (np.concatenate([count(part, 1) for part in parts]) for count in (np.sum, np.max))
        return Laid(sums, widest, rows.width - 1)

    def collate(self, usual: CollateRows, rows: TextRows) -> CollateLate:
        """Return the collate function, with separate queries and documents."""
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
        """Return the loss of evaluation data: the loss of training if it accepts such data."""
        form = prepared.truth.form
        fitting = [loss for loss in self.losses if form in loss.forms]
        return self._objective((fitting[0] if fitting else make_loss(self.usual[form], None, self.table),))

    def _objective(self, losses: tuple[Any, ...], **further: Any) -> LateObjective:
        return LateObjective(losses, **further)

    def scorer(self, prepared: Prepared) -> LateScorer:
        """Return a new scorer."""
        return LateScorer(prepared.truth)


QUERIES = 64
"""Number of queries that are scored together."""


class _CollectedScores(CollectedValues):
    """Vectors of tokens by example, a `flodl.metrics.Metric` that ranks exchange."""

    def update(self, example: int, vectors: Tensor) -> None:
        """Add the vectors of one example, ``(texts, tokens, size)``; zeros mark missing vectors."""
        self.items[example] = [text[(text != 0).any(-1)].numpy() for text in vectors]

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as JSON values."""
        whole = [text for texts in self.items.values() for text in texts]
        data = np.concatenate(whole) if whole else np.zeros((0, 0), np.float32)
        return {
            "examples": list(self.items),
            "texts": len(whole) // max(1, len(self.items)),
            "tokens": [len(text) for text in whole],
            "size": data.shape[1],
            "data": base64.b64encode(data.tobytes()).decode(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state."""
        self.reset()
        if not state["examples"]:
            return
        data = np.frombuffer(base64.b64decode(state["data"]), np.float32).reshape(-1, state["size"])
        texts = np.split(data, np.cumsum(state["tokens"])[:-1])
        for place, example in enumerate(state["examples"]):
            self.items[example] = texts[place * state["texts"] : (place + 1) * state["texts"]]


class LateScorer:
    """Metrics of token vectors with MaxSim.

    Args:
        truth: the gold labels of the examples.
    """

    def __init__(self, truth: HeldOut) -> None:
        self.truth, self.kept = truth, _CollectedScores()

    def update(self, example: int, scores: Sequence[Tensor]) -> None:
        """Add the vectors of one example, ``[(texts, tokens, size)]``."""
        self.kept.update(example, scores[0])

    def metrics(self) -> Sequence[Metric]:
        """Return the metrics."""
        return [self.kept]

    def compute(self) -> dict[str, float]:
        """Return the metrics; NaN without examples."""
        names = NAMES[self.truth.form]
        if not self.kept.items:
            return dict.fromkeys(names, math.nan)
        examples = sorted(self.kept.items)
        vectors = [[torch.from_numpy(text.copy()) for text in self.kept.items[i]] for i in examples]
        figures: dict[str, float] = {}
        if "ndcg@10" in names:
            figures |= _retrieval(vectors, self.truth.texts[examples])
        if "triplet_accuracy" in names:
            figures["triplet_accuracy"] = _triplets(vectors)
        return figures


def _retrieval(vectors: Sequence[Sequence[Tensor]], texts: NDArray[np.int64]) -> dict[str, float]:
    """Return how well queries find their documents among all documents, each distinct text once."""
    corpus, places = np.unique(texts[:, 1:], return_inverse=True)
    places = places.reshape(texts[:, 1:].shape)
    documents: list[Any] = [None] * len(corpus)
    for row, at in zip(vectors, places, strict=True):
        for vector, place in zip(row[1:], at.tolist(), strict=True):
            documents[place] = vector
    queries, first, group = np.unique(texts[:, 0], return_index=True, return_inverse=True)
    relevant: list[set[int]] = [set() for _ in queries]
    for query, place in zip(group.tolist(), places[:, 0].tolist(), strict=True):
        relevant[query].add(place)
    deepest = max(k for numbers in RETRIEVAL.values() for k in numbers)
    found = []
    for start in range(0, len(first), QUERIES):
        scores = max_sim([vectors[i][0] for i in first[start : start + QUERIES]], documents)
        found += scores.topk(min(deepest, len(documents)), dim=1).indices.tolist()
    return figures_of_found(found, relevant, RETRIEVAL)


def _triplets(vectors: Sequence[Sequence[Tensor]]) -> float:
    """Return how often a query is nearer to its first document than to each other one."""
    won = []
    for query, right, *others in vectors:
        scores = max_sim([query], [right, *others])[0]
        won.append((scores[0] > scores[1:]).double().mean().item())
    return float(np.mean(won))

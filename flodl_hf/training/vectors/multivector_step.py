"""One batch of texts through the model to a vector for each token, and its loss.

Queries are padded with mask tokens to one length. These tokens have vectors although no other token attends to them,
which needs a mask, so queries are padded rows; documents have the layout of other tasks. The batch contains
which tokens have a vector, so that no synchronisation with the device is necessary.

Texts are compared late: a query's tokens by their best matches (MaxSim). ColBERT (Khattab and Zaharia 2020,
arXiv:2004.12832), its distillation (Santhanam et al. 2022, arXiv:2112.01488); names and values are equal to
sentence-transformers' MultiVectorEncoder. A row of zeros is a position without a vector.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from flodl.data import Where
from flodl_hf.nn.buckets import round_up
from flodl_hf.training.losses import USUAL
from flodl_hf.training.losses.pairs import DistillKLDivLoss, Form, MarginMSELoss, VectorLoss, check_scores
from flodl_hf.training.rows import TakenRows
from flodl_hf.training.step import score
from flodl_hf.training.vectors.step import (
    PARTS,
    CollateTexts,
    VectorObjective,
    over_ranks,
    widened,
)

MAX_SCORES = 1 << 26
"""Maximum number of token products in memory; larger sets of queries are processed in parts."""


def scores_of_all(queries: Tensor, documents: Tensor, similarity: str = "maxsim") -> Tensor:
    """Return the score of each query with each document, ``(queries, documents)``, in float32.

    Args:
        queries: ``(queries, tokens, size)``.
        documents: ``(documents, tokens, size)``.
        similarity: "maxsim", or "meanmaxsim", which divides by the vectors of the query.
    """
    rows = max(1, MAX_SCORES // max(1, queries.shape[1] * documents.shape[0] * documents.shape[1]))
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


SIMILARITIES = {"maxsim": scores_of_pairs, "meanmaxsim": partial(scores_of_pairs, similarity="meanmaxsim")}


def _present(vectors: Tensor) -> Tensor:
    return (vectors != 0).any(-1)


def _summed(products: Tensor, absent: Tensor, present: Tensor, similarity: str) -> Tensor:
    best = products.masked_fill(absent, torch.finfo(products.dtype).min).max(-1).values.float()
    found = (best * present).sum(-1)
    return found / present.sum(-1) if similarity == "meanmaxsim" else found


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
    positive = ("scale",)
    choices: ClassVar[Mapping[str, Collection[Any]]] = {"similarity": SIMILARITIES}

    def __call__(self, vectors: Sequence[Tensor], labels: Any, own: slice | None = None) -> Tensor:
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
class MultiVectorMarginMSELoss(MarginMSELoss):
    """`MarginMSELoss` of MaxSim; ``similarity`` is "maxsim" or "meanmaxsim"."""

    similarity: str = "maxsim"

    choices: ClassVar[Mapping[str, Any]] = {"similarity": SIMILARITIES}


@dataclass(frozen=True)
class MultiVectorDistillKLDivLoss(DistillKLDivLoss):
    """The shares that a query's documents have of its scores, as a teacher's scores share them out.

    Attributes:
        similarity: "maxsim" or "meanmaxsim".
        temperature: what scores of both are divided by.
        student_temperature: divisor of the scores of the model; overrides ``temperature``.
        teacher_temperature: divisor of the scores of the teacher; overrides ``temperature``.
    """

    similarity: str = "maxsim"
    student_temperature: float | None = None
    teacher_temperature: float | None = None

    choices: ClassVar[Mapping[str, Any]] = {"similarity": SIMILARITIES}
    positive = ("temperature", "student_temperature", "teacher_temperature")

    def __call__(self, vectors: Sequence[Tensor], labels: Any, own: slice | None = None) -> Tensor:
        """Return the mean over queries.

        Raises:
            TrainError: there are more or fewer scores than documents.
        """
        scores = torch.stack(self.scores(vectors), 1)
        check_scores(labels, scores, "a score for each document")
        student, teacher = (one or self.temperature for one in (self.student_temperature, self.teacher_temperature))
        mine = F.log_softmax(scores / student, -1)
        theirs = F.log_softmax(labels.to(mine.dtype) / teacher, -1)
        return F.kl_div(mine, theirs, reduction="batchmean", log_target=True) * student**2


MULTIVECTOR_LOSSES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (MultiVectorMultipleNegativesRankingLoss, MultiVectorMarginMSELoss, MultiVectorDistillKLDivLoss)
}
"""By name."""

MULTIVECTOR_USUAL: dict[Form, str] = {
    form: f"MultiVector{name}" for form, name in USUAL.items() if form in ("pairs", "triplets", "teacher_scores")
}
"""The loss of each form of data where none is named."""


QUERY_PARTS = ("query_ids", "query_mask", "query_types", "query_counted")
COUNTED = "counted"
QUERY_STEPS, LEAST_QUERY = 2, 16
"""Lengths that queries as long as they are are filled up to: steps from one power of two to the next, and the least."""


@dataclass(frozen=True)
class CollateLate(CollateTexts):
    """Makes a batch of queries and documents.

    The documents of all examples are collated by `CollateTexts`, with ``counted``, a mask of tokens with a
    vector; further parts are ``query_ids``, ``query_mask`` (the attention mask), ``query_counted`` (tokens with a
    vector), all ``(examples, tokens)``.

    Args:
        mask_id: what queries are filled up with; None leaves them as they are.
        query_tokens: length of padded queries, and the maximum length of a query; None for the longest query.
        attended: other tokens attend to the padding.
        skipped: tokens of which documents keep no vector.
        first: whether the first token of a document keeps its vector.
    """

    mask_id: int | None = None
    query_tokens: int | None = None
    attended: bool = False
    skipped: tuple[int, ...] = ()
    first: bool = True

    def __call__(self, rows: Sequence[Mapping[str, Any]], position: Where) -> dict[str, Any]:
        """Return the parts of one batch."""
        taken = TakenRows.of(rows)
        parts = np.asarray(taken.values[PARTS])
        lengths = parts.reshape(-1)
        asked = np.arange(len(lengths)) % parts.shape[1] == 0
        token = np.repeat(asked, lengths)
        columns = {name: column[~token] for name, column in taken.columns.items()}
        columns[COUNTED] = ~np.isin(columns["input_ids"], self.skipped)
        if not self.first:
            columns[COUNTED][np.cumsum(lengths[~asked]) - lengths[~asked]] = False
        documents = TakenRows(columns, lengths[~asked], {**taken.values, PARTS: parts[:, 1:]})
        batch = super().__call__(documents, position)
        longest = int(parts[:, 0].max())
        if self.settled and self.mask_id is None:
            longest = min(round_up(longest, QUERY_STEPS, LEAST_QUERY), self.query_tokens or 1 << 30)
        if self.mask_id is not None:
            longest = self.query_tokens or longest
        place = np.arange(longest) < parts[:, :1]
        ids = np.full(place.shape, self.pad_id if self.mask_id is None else self.mask_id, np.int64)
        ids[place] = taken.columns["input_ids"][token]
        whole = np.ones_like(place)
        queries = {
            "query_ids": ids,
            "query_mask": (whole if self.attended and self.mask_id is not None else place).astype(np.int64),
            "query_counted": place if self.mask_id is None else whole,
        }
        if "token_type_ids" in taken.columns:
            queries["query_types"] = np.zeros_like(ids)
        made = {name: torch.from_numpy(value) for name, value in queries.items()}
        return {**batch, **made, "width": parts.shape[1]}


@dataclass(frozen=True)
class LateObjective(VectorObjective):
    """The loss of vectors of tokens; arguments as of `VectorObjective`."""

    per_token = (*VectorObjective.per_token, COUNTED)

    def score(self, model: Any, batch: Any) -> Tensor:
        """Return the vectors, ``(examples, texts, tokens, size)``; zeros for missing ones."""
        count, width = batch["examples"], batch["width"]
        queries = self._through(model, self._query_parts(batch))
        others = {name: part for name, part in {**batch}.items() if name not in QUERY_PARTS}
        documents = self._through(model, self._parts({**others, "width": width - 1}))[: count * (width - 1)]
        tokens = max(queries.shape[1], documents.shape[1])
        queries, documents = widened(queries, tokens), widened(documents, tokens)
        return torch.cat([queries[:, None], documents.view(count, width - 1, tokens, -1)], 1)

    def _compared(self, vectors: Tensor, batch: Any, shared: bool) -> list[Tensor]:
        longest = batch["input_ids"].shape[-1]
        if "cu_seqlens" in batch:
            longest = batch["longest"] if "places" in batch else max(batch["row_lengths"])
        parts = [vectors[:, :1, : batch["query_ids"].shape[1]], vectors[:, 1:, :longest]]
        if not shared:
            return parts
        most = over_ranks([part.shape[2] for part in parts], dist.ReduceOp.MAX, vectors.device)
        return [widened(part, tokens) for part, tokens in zip(parts, most, strict=True)]

    def _query_parts(self, batch: Any) -> Iterator[tuple[Tensor, Any]]:
        """Yield the queries of a batch in parts, each as a padded batch."""
        count, tokens = batch["query_ids"].shape
        step = count if self.cache_tokens is None else max(1, self.cache_tokens // tokens)
        named = {"query_ids": "input_ids", "query_mask": "attention_mask", "query_types": "token_type_ids"}
        for start in range(0, count, step):
            part = {name: batch[name][start : start + step] for name in QUERY_PARTS if name in batch}
            yield torch.arange(start, start + len(part["query_ids"])), {named.get(k, k): v for k, v in part.items()}

    def _vectors(self, model: Any, part: Any) -> Tensor:
        late = model.sentence_recipe.late
        return self._kept(late.vectors(score(model, part)), part)

    def _kept(self, vectors: Tensor, part: Any) -> Tensor:
        """Return the vectors that count, zeros in place of others, ``(texts, tokens, size)``."""
        if "query_counted" in part:
            return vectors.masked_fill(~part["query_counted"][..., None], 0.0)
        vectors = vectors.masked_fill(~part[COUNTED][..., None], 0.0)
        if "cu_seqlens" not in part:
            return vectors
        if "places" in part:
            most, count = part["longest"], len(part["cu_seqlens"]) - 1
            tokens = torch.arange(len(vectors), device=vectors.device, dtype=part["cu_seqlens"].dtype)
            owners = torch.searchsorted(part["cu_seqlens"][1:].contiguous(), tokens, right=True)
            places = owners * most + part["places"]
        else:
            lengths = torch.tensor(part["row_lengths"])
            most, count = int(lengths.max()), len(lengths)
            starts = torch.arange(count) * most - (lengths.cumsum(0) - lengths)
            places = torch.arange(len(vectors)) + torch.repeat_interleave(starts, lengths)
        padded = vectors.new_zeros(count * most, vectors.shape[-1])
        return padded.index_copy(0, places.to(vectors.device), vectors).view(count, most, -1)

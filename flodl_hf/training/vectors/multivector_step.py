"""One batch of texts through the model to a vector for each token, and its loss.

Queries are padded with mask tokens to one length. These tokens have vectors although no other token attends to them,
which needs a mask, so queries are padded rows; documents have the layout of other tasks. The batch contains
which tokens have a vector, so that no synchronisation with the device is necessary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from flodl.data import Where
from flodl.train import Loss
from flodl_hf.nn.layout.buckets import round_up
from flodl_hf.training.rows import CollateRows, TakenRows
from flodl_hf.training.step import score
from flodl_hf.training.vectors.all_gather import gather, max_over_ranks, rows_per_rank
from flodl_hf.training.vectors.rows import PARTS, TABLE, CollateTexts
from flodl_hf.training.vectors.step import VectorObjective

__all__ = ["CollateLate", "LateObjective"]

QUERIES = ("query_ids", "query_mask", "query_types", "query_counted")
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

    def __call__(self, rows: Sequence[Mapping[str, Any]], where: Where) -> dict[str, Any]:
        """Return the parts of one batch."""
        taken = rows if isinstance(rows, TakenRows) else TakenRows.of(rows)
        parts = np.asarray(taken.values[PARTS])
        lengths = parts.reshape(-1)
        asked = np.arange(len(lengths)) % parts.shape[1] == 0
        token = np.repeat(asked, lengths)
        columns = {name: column[~token] for name, column in taken.columns.items()}
        columns[COUNTED] = ~np.isin(columns["input_ids"], self.skipped)
        if not self.first:
            columns[COUNTED][np.cumsum(lengths[~asked]) - lengths[~asked]] = False
        batch = CollateRows.__call__(self, TakenRows(columns, lengths[~asked], {}), where)
        longest = int(parts[:, 0].max())
        if not self.settled:
            batch["row_lengths"] = lengths[~asked].tolist()
        elif self.mask_id is None:
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
        further = {"labels": np.asarray(taken.values["labels"])} if "labels" in taken.values else {}
        made = {name: torch.from_numpy(value) for name, value in (queries | further).items()}
        table = int(np.asarray(taken.values[TABLE])[0])
        return {**batch, **made, "examples": len(parts), "width": parts.shape[1], TABLE: table}


@dataclass(frozen=True)
class LateObjective(VectorObjective):
    """The loss of vectors of tokens; arguments as of `VectorObjective`."""

    per_token = (*VectorObjective.per_token, COUNTED)

    def score(self, model: Any, batch: Any) -> Tensor:
        """Return the vectors, ``(examples, texts, tokens, size)``; zeros for missing ones."""
        count, width = batch["examples"], batch["width"]
        queries = self._through(model, self._query_parts(batch))
        others = {name: part for name, part in {**batch}.items() if name not in QUERIES}
        documents = self._through(model, self._parts({**others, "width": width - 1}))[: count * (width - 1)]
        tokens = max(queries.shape[1], documents.shape[1])
        queries, documents = _widened(queries, tokens), _widened(documents, tokens)
        return torch.cat([queries[:, None], documents.view(count, width - 1, tokens, -1)], 1)

    def of(self, vectors: Tensor, batch: Any) -> Loss:
        """Return the loss of computed vectors: a mean over the examples of this rank."""
        loss, own = self.losses[batch[TABLE]], None
        count, labels = len(vectors), batch.get("labels")
        queries = vectors[:, 0, : batch["query_ids"].shape[1]]
        longest = batch["input_ids"].shape[-1]
        if "cu_seqlens" in batch:
            longest = batch["longest"] if "places" in batch else max(batch["row_lengths"])
        documents = vectors[:, 1:, :longest]
        # half precision cannot represent small differences of similarities
        with torch.autocast(vectors.device.type, enabled=False):
            if self.shared and loss.in_batch:
                shares = rows_per_rank(count, vectors.device)
                start = sum(shares[: torch.distributed.get_rank()])
                own = slice(start, start + count)
                most = max_over_ranks([queries.shape[1], documents.shape[2]], vectors.device)
                queries = gather(_widened(queries, most[0]), shares)
                documents = gather(_widened(documents, most[1]), shares)
                labels = labels if labels is None else gather(labels, shares)
            return Loss.mean(loss([queries, *documents.unbind(1)], labels, own), count)

    # --- texts to vectors ---------------------------------------------------------------------------------------

    def _through(self, model: Any, parts: Iterator[tuple[Tensor, Any]]) -> Tensor:
        """Return the vectors of some texts, ``(texts, tokens, size)``."""
        found, order = [], []
        for rows, part in parts:
            if self.cache_tokens is not None and torch.is_grad_enabled():
                vectors: Any = checkpoint(self._vectors, model, part, use_reentrant=False)
            else:
                vectors = self._vectors(model, part)
            found.append(vectors)
            order.append(rows)
        if len(found) == 1:
            return found[0]
        tokens = max(part.shape[1] for part in found)
        places = torch.argsort(torch.cat(order)).to(found[0].device)
        return torch.cat([_widened(part, tokens) for part in found])[places]

    def _query_parts(self, batch: Any) -> Iterator[tuple[Tensor, Any]]:
        """Yield the queries of a batch in parts, each as a padded batch."""
        count, tokens = batch["query_ids"].shape
        step = count if self.cache_tokens is None else max(1, self.cache_tokens // tokens)
        named = {"query_ids": "input_ids", "query_mask": "attention_mask", "query_types": "token_type_ids"}
        for start in range(0, count, step):
            part = {name: batch[name][start : start + step] for name in QUERIES if name in batch}
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


def _widened(vectors: Tensor, tokens: int) -> Tensor:
    """Return vectors with zeros behind them, up to so many tokens."""
    short = tokens - vectors.shape[-2]
    return F.pad(vectors, (0, 0, 0, short)) if short else vectors

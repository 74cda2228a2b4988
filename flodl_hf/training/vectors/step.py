"""One batch of texts through the model, pooled to vectors, and its loss.

A batch is processed as a whole or in parts of a number of tokens; a part keeps only its vectors,
and each part is computed again for its gradient (Gao et al. 2021, arXiv:2101.06983), with the same dropout. On a
CPU, the columns of padded batches are processed separately, since questions and passages differ in length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flodl.train import Loss
from flodl_hf.inference.decode.pooling import finish_embeddings, pool_bucketed, pool_packed, pool_padded
from flodl_hf.inference.graph_model.hidden_states import watched
from flodl_hf.training.step import score
from flodl_hf.training.vectors.all_gather import gather, rows_per_rank
from flodl_hf.training.vectors.rows import TABLE

__all__ = ["VectorObjective"]


@dataclass(frozen=True)
class VectorObjective:
    """The loss of vectors; called with a model and a batch it is a training step.

    Args:
        losses: for each table its loss; see `flodl_hf.training.losses`.
        pooling: as in `flodl_hf.inference.decode.pooling`.
        normalize: scale vectors to length 1.
        layers: take vectors after each layer, for `AdaptiveLayerLoss`.
        shared: ranks share a batch, and each has all of its texts.
        cache_tokens: maximum number of tokens per forward pass.
        dense: dense layers of the folder behind the pooling, in evaluation.
        prompted: each text occurs twice: first with the prompt of the loss, then with the prompt of the metrics.
    """

    losses: tuple[Any, ...]
    pooling: tuple[str, ...] = ("mean",)
    normalize: bool = True
    layers: bool = False
    shared: bool = False
    cache_tokens: int | None = None
    dense: tuple[Any, ...] = ()
    prompted: bool = False

    per_token: ClassVar[tuple[str, ...]] = ("input_ids", "token_type_ids")

    @property
    def weights(self) -> None:
        """Weights of labels, which vectors do not have."""
        return

    reads_num_rows = False  # counts are taken from the labels, so captured steps serve batches of any number of rows

    def __call__(self, model: Any, batch: Any) -> Loss:
        """Return the loss of a batch."""
        return self.of(self.score(model, batch), batch)

    def score(self, model: Any, batch: Any) -> Tensor:
        """Return the vectors, ``(examples, texts, size)``; with `layers` ``(examples, texts, layers, size)``.

        The vector of a missing text is 0.
        """
        found, order = [], []
        for rows, part in self._parts(batch):
            if self.cache_tokens is not None and torch.is_grad_enabled():
                vectors: Any = checkpoint(self._vectors, model, part, use_reentrant=False)
            else:
                vectors = self._vectors(model, part)
            found.append(vectors)
            order.append(rows)
        there = batch.get("there")
        count = batch["examples"] * batch["width"] if there is None else int(there.sum())
        if len(found) == 1:
            whole = found[0][:count]
        else:
            places = torch.argsort(torch.cat(order)).to(found[0].device)
            whole = torch.cat(found)[places]
        if there is not None:
            empty = whole.new_zeros(there.numel(), *whole.shape[1:])
            whole = empty.index_put((there.flatten().nonzero()[:, 0].to(whole.device),), whole)
        return whole.view(batch["examples"], batch["width"], *whole.shape[1:])

    def of(self, vectors: Tensor, batch: Any) -> Loss:
        """Return the loss of computed vectors: a mean over the examples of this rank."""
        loss, own = self.losses[batch[TABLE]], None
        count = len(vectors)
        labels = batch["guide"] if loss.by_guide else batch.get("labels")
        there = batch.get("there")
        if self.prompted:
            vectors, there = vectors[:, ::2], there if there is None else there[:, ::2]
        # half precision cannot represent small differences of similarities
        with torch.autocast(vectors.device.type, enabled=False):
            if self.shared and loss.in_batch:
                shares = rows_per_rank(count, vectors.device)
                start = sum(shares[: torch.distributed.get_rank()])
                own = slice(start, start + count)
                vectors = gather(vectors, shares)
                labels = labels if labels is None else gather(labels, shares)
                there = there if there is None else gather(there.to(vectors), shares) > 0
            if there is not None:
                loss = partial(loss, there=there.to(vectors.device))
            value = self._value(loss, vectors, labels, own, batch)
        return Loss.mean(value, count)

    def by_row(self, vectors: Tensor, batch: Any) -> Tensor:
        """Return the vectors that metrics are computed from."""
        return vectors[:, 1::2] if self.prompted else vectors

    def _value(self, loss: Any, vectors: Tensor, labels: Tensor | None, own: slice | None, batch: Any) -> Tensor:
        if self.layers:
            return loss([list(layer.unbind(1)) for layer in vectors.unbind(2)], labels, own)
        return loss(list(vectors.unbind(1)), labels, own)

    # --- texts to vectors ---------------------------------------------------------------------------------------

    def _vectors(self, model: Any, part: Any) -> Tensor:
        """Return the vectors of some texts, ``(texts, size)`` or ``(texts, layers, size)``."""
        if not self.layers:
            return self._pooled(score(model, part), part)
        with watched(model.graph, hidden_states=True, attentions=False) as seen:
            score(model, part)
        return torch.stack([self._pooled(states, part) for states in seen["hidden_states"]], 1)

    def _pooled(self, states: Tensor, part: Any) -> Tensor:
        names: Any = self.pooling
        if "places" in part:
            vectors = pool_bucketed(states, part["cu_seqlens"], part["opens"], part["places"], names)
        elif "cu_seqlens" in part:
            vectors = pool_packed(states, part["cu_seqlens"], names)
        else:
            vectors = pool_padded(states, part["attention_mask"], names)
        for layer in self.dense:
            vectors = layer(vectors)
        return finish_embeddings(vectors, normalize=self.normalize)

    # --- parts of a batch ---------------------------------------------------------------------------------------

    def _parts(self, batch: Any) -> Iterator[tuple[Tensor, Any]]:
        """Yield the texts of a batch in parts: which they are, and the part of the batch."""
        lengths = batch.get("row_lengths")
        packed = "cu_seqlens" in batch
        columns = (
            not packed
            and batch.get("there") is None
            and batch["input_ids"].device.type == "cpu"
            and lengths is not None
        )
        if lengths is None or (self.cache_tokens is None and not columns):
            yield torch.arange(batch["examples"] * batch["width"]), batch
            return
        known = np.asarray(lengths)
        starts = known.cumsum() - known
        for rows in _cut(known, batch["width"] if columns else 1, self.cache_tokens, packed):
            if packed:
                part = _of_packed(batch, self.per_token, starts[rows], known[rows])
            else:
                part = _of_padded(batch, (*self.per_token, "attention_mask"), rows, known[rows])
            yield torch.from_numpy(rows), part


def _cut(lengths: NDArray[np.int64], columns: int, most: int | None, packed: bool) -> list[NDArray[np.int64]]:
    """Return which texts go through the model together: of one column, and so many tokens at most, padding counted."""
    groups = [np.arange(column, len(lengths), columns) for column in range(columns)]
    if most is None:
        return groups
    parts: list[NDArray[np.int64]] = []
    for group in groups:
        longest = group[np.argsort(-lengths[group], kind="stable")]
        costs = lengths[longest]
        ends, first = costs.cumsum(), 0
        while first < len(longest):
            if packed:
                last = int(np.searchsorted(ends, ends[first] - costs[first] + most, "right"))
            else:
                last = first + most // max(1, int(costs[first]))
            last = min(max(last, first + 1), len(longest))
            parts.append(longest[first:last])
            first = last
    return parts


def _of_padded(batch: Any, names: Sequence[str], rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> dict[str, Any]:
    places = torch.from_numpy(rows).to(batch["input_ids"].device)
    return {name: batch[name][places, : int(lengths.max())] for name in names if name in batch}


def _of_packed(
    batch: Any, names: Sequence[str], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> dict[str, Any]:
    ends = lengths.cumsum()
    places = torch.from_numpy(np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths))
    device = batch["input_ids"].device
    offsets = torch.from_numpy(np.concatenate([[0], ends])).to(device, torch.int32)
    taken = {name: batch[name][places.to(device)] for name in names if name in batch}
    return {**taken, "cu_seqlens": offsets, "row_lengths": lengths.tolist()}

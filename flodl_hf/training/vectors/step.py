"""Examples of several texts as rows and batches, their vectors, and the loss of a batch.

A row is an example: its texts end to end, with the length of each. In a batch the texts are rows of the model, in the
order of the examples, so that padding, packing and shapes are the same as for all other tasks. Batches have examples of
one table each, without repeated texts; tables are mixed in proportion or alternate, as a function of seed and epoch.

A batch is processed as a whole or in parts of a number of tokens; a part keeps only its vectors,
and each part is computed again for its gradient (Gao et al. 2021, arXiv:2101.06983), with the same dropout. On a
CPU, the columns of padded batches are processed separately, since questions and passages differ in length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from flodl.data import Where
from flodl.data.batches import EpochPlan, digest
from flodl.data.rng import Rng
from flodl.train import Loss
from flodl_hf.inference.hidden_states import watched
from flodl_hf.inference.pooling import finish_embeddings, pool_packed, pool_padded
from flodl_hf.training.rows import CollateRows, EncodedRows, Laid, RowBuilder, TakenRows
from flodl_hf.training.step import Scoring, score


def over_ranks(numbers: Sequence[int], operation: Any, device: torch.device) -> list[int]:
    """Return the sums or maxima over ranks of numbers that every rank has."""
    place = torch.device("cpu") if "gloo" in dist.get_backend() else device
    found = torch.tensor(numbers, dtype=torch.int64, device=place)
    dist.all_reduce(found, operation)
    return found.tolist()


def gather(own: Tensor, shares: list[int]) -> Tensor:
    """Return the rows of all ranks, ``(sum of shares, ...)``, in the order of ranks.

    Gradients are summed over ranks, each of which computes its own loss.

    Args:
        own: this rank's rows.
        shares: how many rows each rank has.
    """
    return _Gathered.apply(own, shares)  # type: ignore[return-value]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, shares: list[int]) -> Tensor:
        ctx.shares = shares
        padded = own.new_zeros(max(shares), *own.shape[1:])
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in shares]
        dist.all_gather(parts, padded)
        return torch.cat([part[:count] for part, count in zip(parts, shares, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        summed = grad_outputs[0].contiguous().clone()
        dist.all_reduce(summed)
        start = sum(ctx.shares[: dist.get_rank()])
        return summed[start : start + ctx.shares[dist.get_rank()]], None


TABLE = "table"
PARTS = "parts"


class TextRows:
    """The rows of several tables, one table after the other.

    Args:
        tables: rows of each, with the lengths of their texts as the value ``parts``, ``(rows, texts)``; 0 for one that
            is missing.
        texts: for each table which text each one is, ``(rows, texts)``: equal numbers are equal texts, -1 is none.

    Attributes:
        columns: per-token values of each table, by table and name.
        values: values of rows of each table, by table and name.
        width: most texts of an example.
    """

    def __init__(self, tables: Sequence[EncodedRows], texts: Sequence[NDArray[np.int64]]) -> None:
        self.tables, self.texts = list(tables), list(texts)
        self.starts = np.cumsum([0, *(len(table) for table in tables)])
        self.lengths = np.concatenate([table.lengths for table in tables])
        self.owners = np.arange(len(self.lengths))
        self.columns = {f"{i}.{name}": part for i, table in enumerate(tables) for name, part in table.columns.items()}
        self.values = {f"{i}.{name}": part for i, table in enumerate(tables) for name, part in table.values.items()}
        self.width = max(table.values[PARTS].shape[1] for table in tables)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def laid(self) -> Laid:
        """Lengths of all texts of each row."""
        return Laid(self.lengths, np.concatenate([table.values[PARTS].max(1) for table in self.tables]), self.width)

    def get(self, index: int) -> dict[str, Any]:
        """Return one row."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int] | NDArray[np.int64]) -> TakenRows:
        """Return several rows of one table."""
        at = int(np.searchsorted(self.starts, int(indices[0]), side="right")) - 1
        taken = self.tables[at].__getitems__(np.asarray(indices) - self.starts[at])
        return TakenRows(taken.columns, taken.lengths, {**taken.values, TABLE: np.full(len(taken), at)})


def rows_of_texts(
    builder: RowBuilder, lengths: Sequence[int], counts: Sequence[int], values: Mapping[str, Any] | None = None
) -> EncodedRows:
    """Return tokens as rows of several texts.

    Args:
        builder: contains a row for each text.
        lengths: tokens of each text.
        counts: texts of each row.
        values: further values of rows.
    """
    there = np.arange(max(counts)) < np.asarray(counts)[:, None]
    parts = np.zeros(there.shape, np.int64)
    parts[there] = lengths
    return EncodedRows(builder.build().columns, parts.sum(1).tolist(), {PARTS: parts, **(values or {})})


@dataclass(frozen=True)
class CollateTexts(CollateRows):
    """Makes a batch of the texts of some examples.

    In addition to the parts of `CollateRows` there are ``examples``, their number, ``width``, the texts of each, and
    ``table``, all numbers; ``labels`` and ``guide``, ``(examples, ...)``, where there are any. If examples have
    different numbers of texts, ``there``, ``(examples, width)``, is true for the texts that an example has.

    Args:
        lengths: add the length of each text, for batches that are processed in parts.
        is_ragged: whether some examples have fewer texts than others; every rank's batches contain ``there`` then.
        further: gives parts that depend on the place of a batch in the run.
    """

    lengths: bool = False
    further: Callable[[Where], Mapping[str, Any]] | None = None
    is_ragged: bool = False

    def __call__(self, rows: Sequence[Mapping[str, Any]], position: Where) -> dict[str, Any]:
        """Return the parts of one batch."""
        taken = TakenRows.of(rows)
        parts = np.asarray(taken.values[PARTS])
        lengths = parts[parts > 0]
        batch = super().__call__(TakenRows(taken.columns, lengths, {}), position)
        if self.lengths:
            batch["row_lengths"] = lengths.tolist()
        found = {name: np.asarray(taken.values[name]) for name in ("labels", "guide") if name in taken.values}
        if self.is_ragged or not parts.all():
            found["there"] = parts > 0
        named = {name: torch.from_numpy(value) for name, value in found.items()}
        table = int(np.asarray(taken.values[TABLE])[0])
        further = {} if self.further is None else self.further(position)
        return {**batch, **named, **further, "examples": len(parts), "width": parts.shape[1], TABLE: table}


@dataclass(frozen=True)
class TextBatches:
    """Batches for losses over the whole batch.

    Args:
        texts: for each table the text numbers, ``(rows, texts)``; -1 for a missing text.
        batch_size: examples of a batch.
        seed: decides the order.
        apart: for each table whether no text may come twice in a batch.
        mixing: "proportional" takes all batches of all tables in random order; "round_robin" one of each table in
            turn, until one is used up.
        least: minimum number of examples in a batch; a smaller rest of an epoch is dropped.
    """

    texts: Sequence[NDArray[np.int64]] = field(repr=False)
    batch_size: int
    seed: int = 42
    apart: Sequence[bool] = ()
    mixing: str = "proportional"
    least: int = 1

    def plan(self, epoch: int) -> EpochPlan:
        """Return the batches of ``epoch``."""
        found = self.by_table(epoch)
        if len(found) == 1:
            return EpochPlan.of(found[0])
        if self.mixing == "round_robin":
            return EpochPlan.of([part for turn in zip(*found, strict=False) for part in turn])
        batches = [part for parts in found for part in parts]
        return EpochPlan.of([batches[k] for k in Rng(self.seed, "tables", epoch).permutation(len(batches))])

    def by_table(self, epoch: int) -> list[list[NDArray[np.int64]]]:
        """Return the batches of ``epoch`` for each table, before they are mixed."""
        starts = np.cumsum([0, *(len(one) for one in self.texts)])
        found = []
        for i, texts in enumerate(self.texts):
            order = Rng(self.seed, "order", epoch, i).permutation(len(texts))
            cut = _cut_apart(order, texts, self.batch_size) if self.apart and self.apart[i] else None
            cut = cut or [order[k : k + self.batch_size] for k in range(0, len(order), self.batch_size)]
            found.append([np.asarray(part) + starts[i] for part in cut if len(part) >= self.least])
        return found

    def notes(self) -> tuple[str, ...]:
        """Return, as a note, how many rows of the first epoch are skipped because of repeated texts."""
        skipped = 0
        for texts, parts in zip(self.texts, self.by_table(0), strict=True):
            rest = len(texts) % self.batch_size
            skipped += len(texts) - sum(map(len, parts)) - (rest if rest < self.least else 0)
        if skipped <= 0:
            return ()
        return (
            f"no_duplicates: {skipped:,} of {sum(map(len, self.texts)):,} rows are skipped in the first epoch, because "
            f"no {self.least} of them have different texts; no_duplicates=False keeps them",
        )

    def identity(self) -> dict[str, Any]:
        """Return the definition of the batches as JSON values."""
        return {
            "batches": "texts",
            "batch_size": self.batch_size,
            "batch_seed": self.seed,
            "apart": list(self.apart),
            "mixing": self.mixing,
            "least": self.least,
            "texts": [digest(one) for one in self.texts],
        }


def _cut_apart(order: NDArray[np.int64], texts: NDArray[np.int64], size: int) -> list[list[int]] | None:
    """Return batches in which no text comes twice, as near to the order as that allows; None where none ever would.

    A postponed example is the first candidate for the next batch.
    """
    there = texts[texts >= 0]
    if len(np.unique(there)) == there.size:
        return None
    rows = {row: {*texts[row].tolist()} - {-1} for row in order.tolist()}
    waiting, batches = deque(order.tolist()), list[list[int]]()
    while waiting:
        batch, held, seen = list[int](), list[int](), set[int]()
        while waiting and len(batch) < size:
            row = waiting.popleft()
            if rows[row] & seen:
                held.append(row)
                continue
            batch.append(row)
            seen |= rows[row]
        waiting.extendleft(reversed(held))
        batches.append(batch)
    return batches


@dataclass(frozen=True)
class VectorObjective(Scoring):
    """The loss of vectors.

    Args:
        losses: for each table its loss; see `flodl_hf.training.losses`.
        pooling: as in `flodl_hf.inference.pooling`.
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

    def score(self, model: Any, batch: Any) -> Tensor:
        """Return the vectors, ``(examples, texts, size)``; with `layers` ``(examples, texts, layers, size)``.

        The vector of a missing text is 0.
        """
        there = batch.get("there")
        count = batch["examples"] * batch["width"] if there is None else int(there.sum())
        whole = self._through(model, self._parts(batch))[:count]
        if there is not None:
            empty = whole.new_zeros(there.numel(), *whole.shape[1:])
            whole = empty.index_put((there.flatten().nonzero()[:, 0].to(whole.device),), whole)
        return whole.view(batch["examples"], batch["width"], *whole.shape[1:])

    def of(self, vectors: Tensor, batch: Any) -> Loss:
        """Return the loss of computed vectors: a mean over the examples of this rank."""
        loss, own, there, count = self.losses[batch[TABLE]], None, batch.get("there"), len(vectors)
        labels, shared = batch["guide"] if loss.by_guide else batch.get("labels"), self.shared and loss.in_batch
        parts = self._compared(vectors, batch, shared)
        if self.prompted and there is not None:
            there = there[:, ::2]
        # half precision cannot represent small differences of similarities
        with torch.autocast(vectors.device.type, enabled=False):
            if shared:
                at = dist.get_rank()
                mine = [count if rank == at else 0 for rank in range(dist.get_world_size())]
                shares = over_ranks(mine, dist.ReduceOp.SUM, vectors.device)
                own = slice(sum(shares[:at]), sum(shares[: at + 1]))
                parts = [gather(part, shares) for part in parts]
                labels = labels if labels is None else gather(labels, shares)
                there = there if there is None else gather(there.to(vectors), shares) > 0
            if there is not None and getattr(loss, "ragged", False):
                loss = partial(loss, there=there.to(vectors.device))
            value = self._value(loss, [text for part in parts for text in part.unbind(1)], labels, own, batch)
        return Loss.mean(value, count)

    def _compared(self, vectors: Tensor, batch: Any, shared: bool) -> list[Tensor]:
        """Return the vectors that the loss takes, each part ``(examples, texts, ...)``; shared ones as on all ranks."""
        return [vectors[:, ::2] if self.prompted else vectors]

    def by_row(self, vectors: Tensor, batch: Any) -> Tensor:
        """Return the vectors that metrics are computed from."""
        return vectors[:, 1::2] if self.prompted else vectors

    def _value(self, loss: Any, texts: list[Tensor], labels: Tensor | None, own: slice | None, batch: Any) -> Tensor:
        if self.layers:
            return loss([list(layer) for layer in zip(*(text.unbind(1) for text in texts), strict=True)], labels, own)
        return loss(texts, labels, own)

    # --- texts to vectors ---------------------------------------------------------------------------------------

    def _through(self, model: Any, parts: Iterator[tuple[Tensor, Any]]) -> Tensor:
        """Return the vectors of texts that go through the model in parts, in the order of the texts."""
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
        if found[0].dim() == 3:  # of vectors of tokens, shorter texts get zeros
            most = max(part.shape[1] for part in found)
            found = [widened(part, most) for part in found]
        return torch.cat(found)[torch.argsort(torch.cat(order)).to(found[0].device)]

    def _vectors(self, model: Any, part: Any) -> Tensor:
        """Return the vectors of some texts, ``(texts, size)`` or ``(texts, layers, size)``."""
        if not self.layers:
            return self._pooled(score(model, part), part)
        with watched(model.graph, hidden_states=True, attentions=False) as seen:
            score(model, part)
        return torch.stack([self._pooled(states, part) for states in seen["hidden_states"]], 1)

    def _pooled(self, states: Tensor, part: Any) -> Tensor:
        names: Any = self.pooling
        if "cu_seqlens" in part:
            opens, places = part.get("opens"), part.get("places")
            vectors = pool_packed(states, part["cu_seqlens"], names, opens=opens, places=places)
        else:
            vectors = pool_padded(states, part["attention_mask"], names)
        for layer in self.dense:
            vectors = layer(vectors)
        return finish_embeddings(vectors, normalize=self.normalize)

    # --- parts of a batch ---------------------------------------------------------------------------------------

    def _parts(self, batch: Any) -> Iterator[tuple[Tensor, Any]]:
        """Yield the texts of a batch in parts: which they are, and the part of the batch."""
        lengths, packed = batch.get("row_lengths"), "cu_seqlens" in batch
        columns = not packed and batch.get("there") is None and batch["input_ids"].device.type == "cpu"
        if lengths is None or (self.cache_tokens is None and not columns):
            yield torch.arange(batch["examples"] * batch["width"]), batch
            return
        known = np.asarray(lengths)
        starts = known.cumsum() - known
        for rows in _cut(known, batch["width"] if columns else 1, self.cache_tokens, packed):
            if packed:
                part = _of_packed(batch, self.per_token, starts[rows], known[rows])
            else:
                names, places = (
                    (*self.per_token, "attention_mask"),
                    torch.from_numpy(rows).to(batch["input_ids"].device),
                )
                part = {name: batch[name][places, : int(known[rows].max())] for name in names if name in batch}
            yield torch.from_numpy(rows), part


def widened(vectors: Tensor, tokens: int) -> Tensor:
    """Return vectors of tokens with zeros behind them, up to so many tokens."""
    short = tokens - vectors.shape[-2]
    return F.pad(vectors, (0, 0, 0, short)) if short else vectors


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


def _of_packed(
    batch: Any, names: Sequence[str], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> dict[str, Any]:
    ends = lengths.cumsum()
    places = torch.from_numpy(np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths))
    device = batch["input_ids"].device
    offsets = torch.from_numpy(np.concatenate([[0], ends])).to(device, torch.int32)
    taken = {name: batch[name][places.to(device)] for name in names if name in batch}
    return {**taken, "cu_seqlens": offsets, "row_lengths": lengths.tolist()}

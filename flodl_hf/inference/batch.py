"""One forward pass of some rows: what it computes, the rows, and results that may still be running.

A computation (`Work`) is called with a prepared graph, ids, token types and a layout. Everything in it depends on
tensors and shapes alone, so it can be recorded. Where an adapter puts virtual tokens before texts, a computation puts
them there and returns only the texts' own states: vectors are pooled of those alone, as in training.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from flodl_hf.errors import PredictError
from flodl_hf.inference.token_table import TokenTable
from flodl_hf.nn.layout import Layout, Padded
from flodl_hf.nn.prompts import prefix_of

if TYPE_CHECKING:
    from flodl.graph import Graph
    from flodl_hf.checkpoints.sentence.vectors import SpladePooling

HEARD: ContextVar[Callable[[float], None] | None] = ContextVar("HEARD", default=None)
"""Called after each batch with the share of rows that have results."""

COUNTED: ContextVar[Callable[[int], None] | None] = ContextVar("COUNTED", default=None)
"""Called with the number of tokens of each window that is sent, and with 0 after each batch."""

TRUNCATED: ContextVar[Callable[[int, int], None] | None] = ContextVar("TRUNCATED", default=None)
"""Called with the numbers of truncated texts and of their dropped tokens, instead of a warning."""


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Values of the tokens of many rows, in whatever order they were computed.

    Attributes:
        values: ``(tokens, ...)``.
        starts: where each row's first token is in ``values``, ``(rows,)``.
    """

    values: Tensor
    starts: np.ndarray

    @classmethod
    def of(cls, parts: Sequence[Tensor]) -> Placed:
        """Return the values of rows that are given one by one, in float32 on the CPU."""
        sizes = np.array([len(part) for part in parts], np.int64)
        return cls(torch.cat(list(parts)).detach().float().cpu(), np.cumsum(sizes) - sizes)

    def rows(self, table: TokenTable) -> list[Tensor]:
        """Return the values of each row, ``(tokens of the row, ...)``, in the order of the rows."""
        starts = zip(self.starts.tolist(), table.lengths.tolist(), strict=True)
        return [self.values[start : start + size] for start, size in starts]


class Pending:
    """Results of a pass that may still be running; wait for them when needed.

    Args:
        rows: how many rows there are.
    """

    def __init__(self, rows: int) -> None:
        self._rows, self._ready = rows, 0
        self._parts: list[tuple[np.ndarray, np.ndarray, Tensor, Any]] = []
        self.threads: list[Thread] = []
        self.faults: list[BaseException] = []
        self._heard, self._counted = HEARD.get(), COUNTED.get()

    def add(self, rows: np.ndarray, sizes: np.ndarray, values: Tensor, event: Any) -> None:
        """Note a batch.

        Args:
            rows: its rows.
            sizes: how many results each has.
            values: where they will be, float32 on the CPU.
            event: signals that they are complete; None if they are.
        """
        self._parts.append((rows, sizes, values, event))
        if self._heard is not None:
            self._ready += len(rows)
            self._heard(self._ready / self._rows)
        if self._counted is not None:
            self._counted(0)

    def parts(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield rows, sizes and results, ``(results, ...)``, of each batch as they arrive.

        The exception of another thread is raised.
        """
        # Other threads may still be adding batches.
        for thread in self.threads:
            thread.join()
        if self.faults:
            raise self.faults[0]
        for rows, sizes, values, event in self._parts:
            if event is not None:
                event.synchronize()
            yield rows, sizes, values.numpy()

    def placed(self) -> Placed:
        """Return the results of all tokens, in float32 on the CPU, and where each row's begin."""
        starts, found, at = np.zeros(self._rows, np.int64), [], 0
        for rows, sizes, values in self.parts():
            starts[rows] = at + np.cumsum(sizes) - sizes
            at += len(values)
            found.append(values)
        return Placed(torch.from_numpy(found[0] if len(found) == 1 else np.concatenate(found)), starts)

    def stacked(self) -> Tensor:
        """Return the result of each row in the order of the rows, ``(rows, ...)``, in float32 on the CPU."""
        found: np.ndarray | None = None
        for rows, _, values in self.parts():
            if found is None:
                found = np.empty((self._rows, *values.shape[1:]), np.float32)
            found[rows] = values
        assert found is not None
        return torch.from_numpy(found)


# Tokens of a batch by the type of the device: small batches keep activations in a processor's cache, an accelerator
# wants large products.
BUDGETS: dict[str, int] = defaultdict(lambda: 1024, cuda=65_536)


def plan_batches(
    lengths: Sequence[int] | np.ndarray, budget: int, *, equal: bool = False, alone: bool = False
) -> list[np.ndarray]:
    """Return the rows' indices in batches, longest rows first, each batch of at most ``budget`` tokens.

    Sorting puts rows of one length side by side, which is what attention over a packed batch wants;
    the longest run first so that memory reaches its peak immediately. A row above the budget runs alone.

    Args:
        lengths: tokens of each row.
        budget: most tokens of a batch.
        equal: rows of one batch have one length.
        alone: each row is a batch.
    """
    if len(lengths) == 1:
        return [np.zeros(1, np.int64)]
    sizes = np.asarray(lengths, np.int64)
    order = np.argsort(-sizes, kind="stable")
    if alone or not len(order):
        return [order[i : i + 1] for i in range(len(order))]
    ends = np.cumsum(sizes[order])
    ordered = sizes[order]
    # The start of the next length, for each row; without ``equal`` only the budget ends a batch.
    limits = np.searchsorted(-ordered, -ordered, side="right") if equal else np.full(len(order), len(order))
    batches = []
    start = 0
    while start < len(order):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + budget, side="right"))
        stop = min(max(stop, start + 1), int(limits[start]))
        batches.append(order[start:stop])
        start = stop
    return batches


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The tokens of some rows.

    Attributes:
        work: what to compute.
        ids: token ids, rows end to end, ``(tokens,)``.
        types: token types, ``(tokens,)``; None where all are 0 or the graph reads none.
        lengths: tokens of each row, ``(rows,)``.
        sizes: results of each row, ``(rows,)``.
        at: which tokens are wanted, ``(results,)``, for `ScoresAt`; None for all.
        count: results of all rows together.
    """

    work: Work
    ids: np.ndarray
    types: np.ndarray | None
    lengths: np.ndarray
    sizes: np.ndarray
    at: np.ndarray | None
    count: int


_FIRST = np.zeros(1, np.int64)
_ONE = np.ones(1, np.int64)


def batch_of(
    table: TokenTable, rows: np.ndarray, work: Work, places: Sequence[Sequence[int]] | None, *, types: bool
) -> Batch:
    """Return the batch of some rows.

    Args:
        table: all rows.
        rows: which of them, ``(rows,)``.
        work: what to compute.
        places: for `ScoresAt`: which tokens of each row of the table.
        types: whether the graph reads token types.
    """
    if len(table) == 1:
        # A single text: the caller waits for it, and sorting or gathering would change nothing.
        lengths, starts, ids = table.lengths, _FIRST, table.ids
        kinds = table.types if types else None
        if places is None and work.per_text:
            return Batch(work, ids, kinds, lengths, _ONE, None, 1)
    else:
        lengths = table.lengths[rows]
        starts = np.cumsum(lengths) - lengths
        begins = np.cumsum(table.lengths) - table.lengths
        tokens = np.arange(int(lengths.sum())) + np.repeat(begins[rows] - starts, lengths)
        ids = table.ids[tokens]
        kinds = table.types[tokens] if types and table.types is not None else None
    at = None
    if work.per_text:
        sizes = np.ones(len(rows), np.int64)
    elif places is not None:
        sizes = np.fromiter((len(places[i]) for i in rows), np.int64, len(rows))
    else:
        sizes = lengths
    if isinstance(work, ScoresAt):
        assert places is not None
        at = np.concatenate([start + np.asarray(places[i], np.int64) for start, i in zip(starts, rows, strict=True)])
    return Batch(work, ids, kinds, lengths, sizes, at, int(sizes.sum()))


def without_tokens(table: TokenTable) -> PredictError:
    """Return the error for rows of which one has no token."""
    at = int(np.argmin(table.lengths))
    return PredictError(f"row {at} has no tokens; expected at least one, such as a special token", row=at)


# ---- computations -------------------------------------------------------------------------------------


def scored(graph: Graph, ids: Tensor, types: Tensor | None, layout: Layout, *, per_text: bool) -> Tensor:
    """Return the head's scores: one a text, or one a token."""
    lead = prefix_of(graph)
    if lead is None:
        return graph(ids, token_type_ids=types, layout=layout)
    ids, types, led = lead.rows(ids, types, layout)
    found = graph(ids, token_type_ids=types, layout=led)
    return found if per_text else layout.behind(lead.count, found)


def all_states(graph: Graph, ids: Tensor, types: Tensor | None, layout: Layout) -> tuple[Tensor, Layout]:
    """Return the states of all tokens, including an adapter's virtual tokens, and their layout."""
    lead = prefix_of(graph)
    if lead is not None:
        ids, types, layout = lead.rows(ids, types, layout)
    return graph.get_submodule("encoder")(ids, token_type_ids=types, layout=layout), layout


def _own(graph: Graph, layout: Layout, states: Tensor) -> Tensor:
    """Return the states of the texts' own tokens; ``layout`` covers the texts alone."""
    lead = prefix_of(graph)
    return states if lead is None else layout.behind(lead.count, states)


def headed(graph: Graph, states: Tensor, layout: Layout) -> Tensor:
    """Return the head's scores of token states; parity checks replace this function."""
    return graph.get_submodule("head")(states, layout=layout)


@dataclass(frozen=True)
class Scores:
    """The head's scores.

    Args:
        per_text: whether there is one result a text rather than one a token.
    """

    per_text: bool

    def __call__(self, graph: Graph, ids: Tensor, types: Tensor | None, layout: Layout, at: Tensor | None) -> Tensor:
        """Return ``(texts, ...)`` or ``(tokens, ...)``."""
        found = scored(graph, ids, types, layout, per_text=self.per_text)
        return found if self.per_text else _flat(found, layout)


@dataclass(frozen=True)
class States:
    """The token states.

    Args:
        shares: numbers of hidden states with their shares of the result; nothing for the last state alone.
    """

    shares: tuple[tuple[int, float], ...] = ()
    per_text: bool = False

    def __call__(self, graph: Graph, ids: Tensor, types: Tensor | None, layout: Layout, at: Tensor | None) -> Tensor:
        """Return ``(tokens, hidden)``."""
        if not self.shares:
            return _flat(_own(graph, layout, all_states(graph, ids, types, layout)[0]), layout)
        from flodl_hf.inference.hidden_states import watched

        with watched(graph, hidden_states=True, attentions=False) as seen:
            all_states(graph, ids, types, layout)
        states = seen["hidden_states"]
        total = sum((states[place].float() * share for place, share in self.shares), states[0].new_zeros(()).float())
        return _flat(_own(graph, layout, total), layout)


@dataclass(frozen=True)
class Pooled:
    """One vector a text, in float32.

    Args:
        names: poolings to concatenate, see `flodl_hf.inference.pooling`; "pooler" is the model's own.
        size: keep so many features; None for all.
        norm: give each vector's length as one more feature: the host divides by it once windows are put together.
    """

    names: tuple[str, ...]
    size: int | None = None
    norm: bool = False
    per_text: bool = True

    def __call__(self, graph: Graph, ids: Tensor, types: Tensor | None, layout: Layout, at: Tensor | None) -> Tensor:
        """Return ``(texts, features)``."""
        from flodl_hf.inference.pooling import finish_embeddings, length_of, pool

        whole, led = all_states(graph, ids, types, layout)
        pooled = graph.get_submodule("pooler")(whole, layout=led) if "pooler" in self.names else None
        found = finish_embeddings(pool(_own(graph, layout, whole), layout, self.names, pooled), truncate_dim=self.size)
        return torch.cat([found, length_of(found)], -1) if self.norm else found


@dataclass(frozen=True)
class Splade:
    """The weights of all words in each text, from a masked-word head's scores at its tokens, in float32.

    Args:
        pooling: how.
    """

    pooling: SpladePooling
    per_text: bool = True

    def __call__(self, graph: Graph, ids: Tensor, types: Tensor | None, layout: Layout, at: Tensor | None) -> Tensor:
        """Return ``(texts, words)``."""
        from flodl_hf.inference.pooling import over_texts

        found = self.pooling.activated(scored(graph, ids, types, layout, per_text=False).float())
        return over_texts(found, layout, self.pooling.strategy)


@dataclass(frozen=True)
class Related:
    """Scores of the relation of two texts, by the head next to a masked-word head."""

    per_text: bool = True

    def __call__(self, graph: Graph, ids: Tensor, types: Tensor | None, layout: Layout, at: Tensor | None) -> Tensor:
        """Return ``(texts, labels)``."""
        states, led = all_states(graph, ids, types, layout)
        pooled = graph.get_submodule("pooler")(states, layout=led)
        return graph.get_submodule("relation")(states, pooled)


@dataclass(frozen=True)
class ScoresAt:
    """The head's scores at chosen tokens; for the others they are never computed."""

    per_text: bool = False

    def __call__(self, graph: Graph, ids: Tensor, types: Tensor | None, layout: Layout, at: Tensor | None) -> Tensor:
        """Return ``(chosen tokens, ...)``."""
        assert at is not None
        states = _flat(_own(graph, layout, all_states(graph, ids, types, layout)[0]), layout)
        return headed(graph, states.index_select(0, at), layout)


@dataclass(frozen=True)
class BestAt(ScoresAt):
    """The best classes at chosen tokens, of which there may be a whole vocabulary: scores of all stay on the device.

    Args:
        top_k: how many of each token.
    """

    top_k: int = 5

    def __call__(self, graph: Graph, ids: Tensor, types: Tensor | None, layout: Layout, at: Tensor | None) -> Tensor:
        """Return probabilities, class numbers, and 1 where all scores are finite, ``(chosen tokens, 2 top_k + 1)``."""
        found = super().__call__(graph, ids, types, layout, at).float()
        best, index = found.topk(min(self.top_k, found.shape[1]), dim=1)
        scores = torch.exp(best - found.logsumexp(1, keepdim=True))
        # Numbers of classes are whole in float32 up to 16 million.
        return torch.cat([scores, index.float(), torch.isfinite(found).all(1, keepdim=True).float()], 1)


Work = Scores | States | Pooled | Related | Splade | ScoresAt


def _flat(values: Tensor, layout: Layout) -> Tensor:
    return values.flatten(0, 1) if isinstance(layout, Padded) else values

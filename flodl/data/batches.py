"""How the order of an epoch is cut into batches: by rows, by similar length, or by a budget of tokens.

Everything here is a pure function of the order, the lengths and the epoch. Nothing is dropped unless asked,
and the ragged end is a batch like the others. Which rank takes which batch is decided in ``distributed``.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from flodl.data.rng import Rng
from flodl.data.samplers import RandomSampler, Sampler, SequentialSampler, digest
from flodl.errors import DataError

__all__ = [
    "BatchSource",
    "EpochPlan",
    "FixedBatches",
    "LengthGroupedBatches",
    "TokenBudgetBatches",
    "cut_fixed",
    "fill_budget",
    "group_by_length",
    "source_of_rows",
]

Layout = Literal["padded", "packed"]
Indices = NDArray[np.int64]


class EpochPlan:
    """The batches of one epoch: ``plan[k]`` holds the row numbers of batch ``k``, shape ``(rows,)``.

    Args:
        order: all row numbers, batch after batch.
        ends: where each batch ends in ``order``, ascending; the last end is ``len(order)``.
    """

    def __init__(self, order: Indices, ends: NDArray[Any]) -> None:
        self.order = np.asarray(order, dtype=np.int64)
        self.ends = np.asarray(ends, dtype=np.int64)

    @staticmethod
    def of(batches: Sequence[Sequence[int] | Indices]) -> EpochPlan:
        """Return a plan made of ready batches."""
        parts = [np.asarray(batch, dtype=np.int64) for batch in batches]
        order = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        return EpochPlan(order, np.cumsum([part.size for part in parts], dtype=np.int64))

    def __len__(self) -> int:
        return self.ends.size

    def __getitem__(self, number: int) -> Indices:
        if not -len(self) <= number < len(self):
            raise IndexError(f"batch {number} of a plan with {len(self)} batches")
        number %= len(self)
        start = self.ends[number - 1] if number else 0
        return self.order[start : self.ends[number]]

    def __iter__(self) -> Iterator[Indices]:
        return (self[k] for k in range(len(self)))

    def select(self, numbers: NDArray[Any] | Sequence[int]) -> EpochPlan:
        """Return a plan with only the given batches, in the given order."""
        return EpochPlan.of([self[int(k)] for k in numbers])


@runtime_checkable
class BatchSource(Protocol):
    """Anything that cuts an epoch into batches; a loader asks it once per epoch."""

    def plan(self, epoch: int) -> EpochPlan:
        """Return the batches of ``epoch``; the same whenever it is asked."""
        ...

    def identity(self) -> dict[str, Any]:
        """Return what defines the batches, JSON-able: a resumed run compares it."""
        ...


# ---------------------------------------------------------------------------------------------- pure
# functions


def cut_fixed(order: Indices, batch_size: int, *, drop_last: bool = False) -> EpochPlan:
    """Return batches of ``batch_size`` rows in the given order; the last may be shorter unless dropped."""
    _at_least_one("batch_size", batch_size)
    ends = np.arange(batch_size, order.size + 1, batch_size, dtype=np.int64)
    whole = int(ends[-1]) if ends.size else 0
    if whole == order.size or drop_last:
        return EpochPlan(order[:whole], ends)
    return EpochPlan(order, np.append(ends, order.size))


def group_by_length(
    order: Indices, lengths: NDArray[Any], batch_size: int, *, window: int, rng: Rng, drop_last: bool = False
) -> EpochPlan:
    """Return batches of rows of similar length.

    The order is cut into windows of ``window`` batches; inside a window rows are sorted by length and cut;
    then all batches of the epoch are put in random order. A larger window pads less and mixes less. The
    ragged batch is cut from the end of the order before sorting, so that every other batch is full.

    Args:
        order: row numbers, already shuffled.
        lengths: tokens per row, indexed by row number.
        batch_size: rows in a batch.
        window: batches sorted together.
        rng: decides the order of batches.
        drop_last: leave out the ragged batch.
    """
    _at_least_one("batch_size", batch_size)
    _at_least_one("window", window)
    lengths = _checked_lengths(lengths, order)
    whole = order.size // batch_size * batch_size
    batches: list[Indices] = []
    for start in range(0, whole, window * batch_size):
        part = order[start : min(start + window * batch_size, whole)]
        part = part[np.argsort(-lengths[part], kind="stable")]
        batches += [part[k : k + batch_size] for k in range(0, part.size, batch_size)]
    if whole < order.size and not drop_last:
        batches.append(order[whole:])
    return EpochPlan.of(batches).select(rng.permutation(len(batches)))


def fill_budget(
    order: Indices,
    lengths: NDArray[Any],
    budget: int,
    *,
    window: int,
    rng: Rng,
    layout: Layout = "padded",
    max_rows: int | None = None,
    multiple_of: int = 1,
) -> EpochPlan:
    """Return batches that cost at most ``budget`` tokens each; only a row longer than the budget exceeds
    it, alone.

    A padded batch costs rows times the longest row (rounded up to ``multiple_of``); a packed one costs the
    sum of its rows. Padded batches are filled from a window sorted by length; packed ones by best fit,
    longest rows first. What does not fill a batch at the end of a window moves on to the next window, so
    only the end of the epoch is ragged. All batches of the epoch are put in random order.

    Args:
        order: row numbers, already shuffled.
        lengths: tokens per row, indexed by row number.
        budget: tokens per batch.
        window: rows looked at together.
        rng: decides the order of batches.
        layout: how the batch will lie in memory.
        max_rows: rows per batch at most.
        multiple_of: padded widths are rounded up to this.
    """
    _at_least_one("budget", budget)
    _at_least_one("window", window)
    _at_least_one("multiple_of", multiple_of)
    if max_rows is not None:
        _at_least_one("max_rows", max_rows)
    if layout not in ("padded", "packed"):
        raise DataError(f"fill_budget: layout is {layout!r}; expected 'padded' or 'packed'", layout=layout)
    lengths = np.maximum(_checked_lengths(lengths, order), 1)
    if layout == "padded":
        lengths = -(-lengths // multiple_of) * multiple_of
    limit = order.size if max_rows is None else max_rows
    batches: list[list[int]] = []
    held: list[int] = []
    for start in range(0, order.size, window):
        part = np.concatenate([np.asarray(held, dtype=np.int64), order[start : start + window]])
        part = part[np.argsort(-lengths[part], kind="stable")]
        fill = _fill_padded if layout == "padded" else _fill_packed
        filled = fill(part.tolist(), lengths[part].tolist(), budget, limit)
        # the emptiest batch waits for the next window, where it may still be filled
        held = filled.pop() if start + window < order.size else []
        batches += filled
    return EpochPlan.of(batches).select(rng.permutation(len(batches)))


def _fill_padded(rows: list[int], costs: list[int], budget: int, limit: int) -> list[list[int]]:
    batches: list[list[int]] = []
    widest = 0
    for row, cost in zip(rows, costs, strict=True):
        # rows come longest first, so the first row of a batch sets its width
        if batches and len(batches[-1]) < limit and (len(batches[-1]) + 1) * widest <= budget:
            batches[-1].append(row)
        else:
            batches.append([row])
            widest = cost
    return batches


def _fill_packed(rows: list[int], costs: list[int], budget: int, limit: int) -> list[list[int]]:
    batches: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, batch), ascending: the tightest fit is found by bisection
    for row, cost in zip(rows, costs, strict=True):
        at = bisect_left(free, (cost, -1))
        if at < len(free):
            left, number = free.pop(at)
        else:
            left, number = max(budget, cost), len(batches)
            batches.append([])
        batches[number].append(row)
        if len(batches[number]) < limit and left > cost:
            insort(free, (left - cost, number))
    if free:
        emptiest = free[-1][1]
        batches.append(batches.pop(emptiest))
    return batches


# ------------------------------------------------------------------------------------------------------
# sources


@dataclass(frozen=True)
class FixedBatches:
    """Batches of a fixed number of rows, in the sampler's order.

    Args:
        sampler: gives the order.
        batch_size: rows in a batch.
        drop_last: leave out the ragged last batch. Off: nothing is dropped.
    """

    sampler: Sampler
    batch_size: int
    drop_last: bool = False

    def plan(self, epoch: int) -> EpochPlan:
        """Return the batches of ``epoch``."""
        return cut_fixed(_order(self.sampler, epoch), self.batch_size, drop_last=self.drop_last)

    def identity(self) -> dict[str, Any]:
        """Return what defines the batches; JSON-able."""
        return {
            **_identity(self.sampler),
            "batches": "fixed",
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
        }


@dataclass(frozen=True)
class LengthGroupedBatches:
    """Batches of rows of similar length, put in random order: little padding, still mixed.

    Args:
        sampler: gives the order.
        lengths: tokens per row, indexed by row number.
        batch_size: rows in a batch.
        window: batches that are sorted together.
        seed: decides the order of batches.
        drop_last: leave out the ragged batch.
    """

    sampler: Sampler
    lengths: NDArray[Any] = field(repr=False)
    batch_size: int
    window: int = 50
    seed: int = 42
    drop_last: bool = False

    def plan(self, epoch: int) -> EpochPlan:
        """Return the batches of ``epoch``."""
        return group_by_length(
            _order(self.sampler, epoch),
            np.asarray(self.lengths),
            self.batch_size,
            window=self.window,
            rng=Rng(self.seed, "batches", epoch),
            drop_last=self.drop_last,
        )

    def identity(self) -> dict[str, Any]:
        """Return what defines the batches, the lengths as a hash; JSON-able."""
        return {
            **_identity(self.sampler),
            "batches": "length-grouped",
            "batch_size": self.batch_size,
            "window": self.window,
            "batch_seed": self.seed,
            "drop_last": self.drop_last,
            "lengths": digest(np.asarray(self.lengths, dtype=np.int64)),
        }


@dataclass(frozen=True)
class TokenBudgetBatches:
    """Batches that cost at most ``budget`` tokens: many short rows or few long ones, the same work each.

    Args:
        sampler: gives the order.
        lengths: tokens per row, indexed by row number.
        budget: tokens per batch; padding counts when ``layout`` is ``"padded"``.
        layout: ``"padded"`` or ``"packed"``.
        window: rows that are looked at together.
        max_rows: rows per batch at most.
        multiple_of: padded widths are rounded up to this.
        seed: decides the order of batches.
    """

    sampler: Sampler
    lengths: NDArray[Any] = field(repr=False)
    budget: int
    layout: Layout = "padded"
    window: int = 4096
    max_rows: int | None = None
    multiple_of: int = 1
    seed: int = 42

    def plan(self, epoch: int) -> EpochPlan:
        """Return the batches of ``epoch``; their number may change from epoch to epoch."""
        return fill_budget(
            _order(self.sampler, epoch),
            np.asarray(self.lengths),
            self.budget,
            window=self.window,
            rng=Rng(self.seed, "batches", epoch),
            layout=self.layout,
            max_rows=self.max_rows,
            multiple_of=self.multiple_of,
        )

    def identity(self) -> dict[str, Any]:
        """Return what defines the batches, the lengths as a hash; JSON-able."""
        return {
            **_identity(self.sampler),
            "batches": "token-budget",
            "budget": self.budget,
            "layout": self.layout,
            "window": self.window,
            "max_rows": self.max_rows,
            "multiple_of": self.multiple_of,
            "batch_seed": self.seed,
            "lengths": digest(np.asarray(self.lengths, dtype=np.int64)),
        }


def source_of_rows(
    num_rows: int,
    batch_size: int | None,
    batches: BatchSource | None,
    sampler: Sampler | None,
    shuffle: bool,
    seed: int,
    drop_last: bool,
) -> BatchSource:
    """Return ``batches``, or fixed batches in the order that the other arguments describe.

    Raises:
        DataError: ``batch_size`` is missing or not positive, or both ways are used at once.
    """
    if batches is not None:
        if batch_size is not None or sampler is not None or drop_last:
            raise DataError(
                "DataLoader: batches= already says which rows come together; drop batch_size, sampler and drop_last"
            )
        return batches
    if batch_size is None or isinstance(batch_size, bool) or int(batch_size) != batch_size or batch_size < 1:
        raise DataError(
            f"DataLoader: batch_size is {batch_size!r}; expected an integer above 0, or batches=...",
            batch_size=batch_size,
        )
    if sampler is None:
        sampler = RandomSampler(num_rows, seed) if shuffle else SequentialSampler(num_rows)
    return FixedBatches(sampler, int(batch_size), drop_last)


def _identity(sampler: Sampler) -> dict[str, Any]:
    own = getattr(sampler, "identity", None)
    return own() if own is not None else {"sampler": type(sampler).__name__, "rows": len(sampler)}


def _order(sampler: Sampler, epoch: int) -> Indices:
    order = np.asarray(sampler.indices(epoch), dtype=np.int64)
    if order.ndim != 1:
        raise DataError(
            f"{type(sampler).__name__}.indices({epoch}) has shape {order.shape}; expected one dimension",
            shape=order.shape,
        )
    return order


def _checked_lengths(lengths: NDArray[Any], order: Indices) -> NDArray[np.int64]:
    lengths = np.asarray(lengths, dtype=np.int64)
    needed = int(order.max()) + 1 if order.size else 0
    if lengths.ndim != 1 or lengths.size < needed:
        raise DataError(
            f"batch planning: lengths has shape {lengths.shape}, the order names row {needed - 1}; "
            "expected one length per row",
            shape=lengths.shape,
            needed=needed,
        )
    if lengths.size and int(lengths.min()) < 0:
        row = int(lengths.argmin())
        raise DataError(f"batch planning: row {row} has length {lengths[row]}; expected 0 or more", row=row)
    return lengths


def _at_least_one(name: str, value: int) -> None:
    if isinstance(value, bool) or int(value) != value or value < 1:
        raise DataError(
            f"batch planning: {name} is {value!r}; expected an integer above 0",
            argument=name,
            value=value,
        )

"""Samplers, the order in which an epoch visits the rows, and batch sources, which cut this order into batches.

A sampler is a pure function of the epoch: ``indices(epoch)`` returns the same array in every process and on every
machine, so only the numbers that define the sampler are saved. A source cuts by number of rows, by similar length, or
by a budget of tokens. It is a pure function of the order, the lengths and the epoch. No row is dropped unless
requested: the incomplete last batch is a batch like the others.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from flodl.data.rng import Rng
from flodl.errors import DataError

Layout = Literal["padded", "packed"]
Indices = NDArray[np.int64]


@runtime_checkable
class Sampler(Protocol):
    """Interface of an order of rows.

    The method ``identity()`` is optional. If a sampler has it, a run refuses to resume with another order.
    """

    def __len__(self) -> int:
        """Return the number of indices of an epoch."""
        ...

    def indices(self, epoch: int) -> NDArray[np.int64]:
        """Return the row numbers of ``epoch`` in the order of use, shape ``(len(self),)``."""
        ...


class SequentialSampler:
    """Every row once, in file order.

    Args:
        num_rows: rows in the data set.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = at_least_one("SequentialSampler: num_rows", num_rows)

    def __len__(self) -> int:
        return self.num_rows

    def indices(self, epoch: int) -> NDArray[np.int64]:
        """Return ``0 .. num_rows-1``, the same for every epoch, shape ``(num_rows,)``."""
        return np.arange(self.num_rows, dtype=np.int64)

    def identity(self) -> dict[str, Any]:
        """Return the JSON values that define the order."""
        return {"sampler": "sequential", "rows": self.num_rows}


class RandomSampler:
    """Every row once, in an order that depends only on the seed and the epoch.

    Args:
        num_rows: rows in the data set.
        seed: any integer. Samplers with equal seeds give equal orders.
    """

    def __init__(self, num_rows: int, seed: int = 42) -> None:
        self.num_rows = at_least_one("RandomSampler: num_rows", num_rows)
        self.seed = int(seed)

    def __len__(self) -> int:
        return self.num_rows

    def indices(self, epoch: int) -> NDArray[np.int64]:
        """Return the permutation of ``epoch``, shape ``(num_rows,)``."""
        return Rng(self.seed, "order", epoch).permutation(self.num_rows)

    def identity(self) -> dict[str, Any]:
        """Return the JSON values that define the order."""
        return {"sampler": "random", "rows": self.num_rows, "seed": self.seed}


def digest(array: NDArray[Any]) -> str:
    """Return a short hash of the shape and values of an array."""
    flat = np.ascontiguousarray(array)
    # A fixed byte order makes the hash equal on all machines.
    data = flat.astype(flat.dtype.newbyteorder("<"), copy=False).tobytes()
    return blake2b(f"{flat.dtype.kind}{flat.shape}".encode() + data, digest_size=8).hexdigest()


def at_least_one(what: str, value: int) -> int:
    """Return an integer above 0.

    Raises:
        DataError: another value; ``what`` names it.
    """
    if isinstance(value, bool) or int(value) != value or value < 1:
        raise DataError(f"{what}: found {value!r}, expected an integer above 0", argument=what, value=value)
    return int(value)


class EpochPlan:
    """The batches of one epoch: ``plan[k]`` is the row numbers of batch ``k``, shape ``(rows,)``.

    Args:
        order: all row numbers, batch after batch.
        ends: end of each batch in ``order``, ascending; the last end is ``len(order)``.
    """

    def __init__(self, order: Indices, ends: NDArray[Any]) -> None:
        self.order = np.asarray(order, dtype=np.int64)
        self.ends = np.asarray(ends, dtype=np.int64)

    @staticmethod
    def of(batches: Sequence[Sequence[int] | Indices]) -> EpochPlan:
        """Return a plan of given batches."""
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

    def shuffled(self, rng: Rng) -> EpochPlan:
        """Return a plan with the same batches in random order."""
        return EpochPlan.of([self[int(k)] for k in rng.permutation(len(self))])


@runtime_checkable
class BatchSource(Protocol):
    """Interface of an object that cuts an epoch into batches. A loader calls ``plan`` once for each epoch."""

    def plan(self, epoch: int) -> EpochPlan:
        """Return the batches of ``epoch``. Every call returns the same batches."""
        ...

    def identity(self) -> dict[str, Any]:
        """Return the JSON values that define the batches. A resumed run compares them."""
        ...


@dataclass(frozen=True)
class _OrderedBatches:
    """Base of sources that cut the order of a sampler."""

    sampler: Sampler
    kind: ClassVar[str]

    def identity(self) -> dict[str, Any]:
        """Return the JSON values that define the batches, the lengths as a hash."""
        sampler = getattr(self.sampler, "identity", None)
        own = {part.name: getattr(self, part.name) for part in fields(self)[1:]}
        if "seed" in own:
            own["batch_seed"] = own.pop("seed")
            own["lengths"] = digest(np.asarray(own.pop("lengths"), dtype=np.int64))
        known = {"sampler": type(self.sampler).__name__, "rows": len(self.sampler)} if sampler is None else sampler()
        return {**known, "batches": self.kind, **own}


@dataclass(frozen=True)
class FixedBatches(_OrderedBatches):
    """Batches with a fixed number of rows, in the sampler's order.

    Args:
        sampler: the order of the rows.
        batch_size: rows in a batch.
        drop_last: leave out the incomplete last batch.
    """

    batch_size: int
    drop_last: bool = False
    kind = "fixed"

    def plan(self, epoch: int) -> EpochPlan:
        """Return the batches of ``epoch``."""
        at_least_one("batches: batch_size", self.batch_size)
        order = _order(self.sampler, epoch)
        ends = np.arange(self.batch_size, order.size + 1, self.batch_size, dtype=np.int64)
        whole = int(ends[-1]) if ends.size else 0
        if whole == order.size or self.drop_last:
            return EpochPlan(order[:whole], ends)
        return EpochPlan(order, np.append(ends, order.size))


@dataclass(frozen=True)
class LengthGroupedBatches(_OrderedBatches):
    """Batches of rows of similar length in random order, for little padding.

    The order is cut into windows. Rows of a window are sorted by length and cut into batches. Then all batches of the
    epoch are shuffled. A larger window pads less and mixes less. The incomplete batch is cut off before sorting, so
    that every other batch is full.

    Args:
        sampler: the order of the rows.
        lengths: tokens of each row, indexed by row number.
        batch_size: rows in a batch.
        window: batches that are sorted together.
        seed: determines the order of the batches.
        drop_last: leave out the incomplete batch.
    """

    lengths: NDArray[Any] = field(repr=False)
    batch_size: int
    window: int = 50
    seed: int = 42
    drop_last: bool = False
    kind = "length-grouped"

    def plan(self, epoch: int) -> EpochPlan:
        """Return the batches of ``epoch``."""
        at_least_one("batches: batch_size", self.batch_size)
        at_least_one("batches: window", self.window)
        order, size = _order(self.sampler, epoch), self.batch_size
        lengths = _checked_lengths(self.lengths, order)
        whole = order.size // size * size
        batches: list[Indices] = []
        for start in range(0, whole, self.window * size):
            part = order[start : min(start + self.window * size, whole)]
            part = part[np.argsort(-lengths[part], kind="stable")]
            batches += [part[k : k + size] for k in range(0, part.size, size)]
        if whole < order.size and not self.drop_last:
            batches.append(order[whole:])
        return EpochPlan.of(batches).shuffled(Rng(self.seed, "batches", epoch))


@dataclass(frozen=True)
class TokenBudgetBatches(_OrderedBatches):
    """Batches with at most ``budget`` tokens, in random order, for equal work with short and with long rows.

    A padded batch costs its rows times its longest row, a packed batch the sum of its rows. Only a single row that is
    longer than the budget exceeds it. Padded batches are filled from a window sorted by length; packed batches by best
    fit, longest rows first. Rows that do not fill a batch at the end of a window move to the next window, so that only
    the end of the epoch has an incomplete batch.

    Args:
        sampler: the order of the rows.
        lengths: tokens of each row, indexed by row number.
        budget: tokens of a batch; padding counts if ``layout`` is ``"padded"``.
        layout: ``"padded"`` or ``"packed"``.
        window: rows that are sorted together.
        max_rows: maximum rows of a batch.
        multiple_of: padded widths are rounded up to a multiple of this.
        seed: determines the order of the batches.
    """

    lengths: NDArray[Any] = field(repr=False)
    budget: int
    layout: Layout = "padded"
    window: int = 4096
    max_rows: int | None = None
    multiple_of: int = 1
    seed: int = 42
    kind = "token-budget"

    def plan(self, epoch: int) -> EpochPlan:
        """Return the batches of ``epoch``. Their number may differ between epochs."""
        for name in ("budget", "window", "multiple_of", "max_rows"):
            if name != "max_rows" or self.max_rows is not None:
                at_least_one(f"batches: {name}", getattr(self, name))
        if self.layout not in ("padded", "packed"):
            raise DataError(
                f"TokenBudgetBatches: found layout {self.layout!r}, expected 'padded' or 'packed'", layout=self.layout
            )
        order = _order(self.sampler, epoch)
        lengths = np.maximum(_checked_lengths(self.lengths, order), 1)
        fill = _fill_packed
        if self.layout == "padded":
            lengths, fill = -(-lengths // self.multiple_of) * self.multiple_of, _fill_padded
        limit = order.size if self.max_rows is None else self.max_rows
        batches: list[list[int]] = []
        remaining: list[int] = []
        for start in range(0, order.size, self.window):
            part = np.concatenate([np.asarray(remaining, dtype=np.int64), order[start : start + self.window]])
            part = part[np.argsort(-lengths[part], kind="stable")]
            filled = fill(part.tolist(), lengths[part].tolist(), self.budget, limit)
            # The next window may still fill the emptiest batch.
            remaining = filled.pop() if start + self.window < order.size else []
            batches += filled
        return EpochPlan.of(batches).shuffled(Rng(self.seed, "batches", epoch))


def _fill_padded(rows: list[int], costs: list[int], budget: int, limit: int) -> list[list[int]]:
    batches: list[list[int]] = []
    widest = 0
    for row, cost in zip(rows, costs, strict=True):
        # Rows are sorted from long to short, so the first row of a batch determines its width.
        if batches and len(batches[-1]) < limit and (len(batches[-1]) + 1) * widest <= budget:
            batches[-1].append(row)
        else:
            batches.append([row])
            widest = cost
    return batches


def _fill_packed(rows: list[int], costs: list[int], budget: int, limit: int) -> list[list[int]]:
    batches: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, batch), ascending: bisection finds the tightest fit
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
        DataError: ``batch_size`` is missing or not positive, or both ways are used together.
    """
    if batches is not None:
        if batch_size is not None or sampler is not None or drop_last:
            raise DataError(
                "DataLoader: found batches= and arguments for fixed batches, expected one of them. Remove batch_size, "
                "sampler and drop_last."
            )
        return batches
    if batch_size is None:
        raise DataError("DataLoader: found no batch_size, expected batch_size= or batches=", batch_size=None)
    at_least_one("batches: batch_size", batch_size)
    if sampler is None:
        sampler = RandomSampler(num_rows, seed) if shuffle else SequentialSampler(num_rows)
    return FixedBatches(sampler, int(batch_size), drop_last)


def _order(sampler: Sampler, epoch: int) -> Indices:
    order = np.asarray(sampler.indices(epoch), dtype=np.int64)
    if order.ndim != 1:
        raise DataError(
            f"{type(sampler).__name__}.indices({epoch}): found shape {order.shape}, expected one dimension",
            shape=order.shape,
        )
    return order


def _checked_lengths(lengths: NDArray[Any], order: Indices) -> NDArray[np.int64]:
    lengths = np.asarray(lengths, dtype=np.int64)
    needed = int(order.max()) + 1 if order.size else 0
    if lengths.ndim != 1 or lengths.size < needed:
        raise DataError(
            f"batches: found lengths of shape {lengths.shape} for row numbers up to {needed - 1}, "
            "expected one length for each row",
            shape=lengths.shape,
            needed=needed,
        )
    if lengths.size and int(lengths.min()) < 0:
        row = int(lengths.argmin())
        raise DataError(f"batches: found length {lengths[row]} of row {row}, expected 0 or more", row=row)
    return lengths

"""The input pipeline of the loop: an epoch as numbered turns, each turn the batches of one optimiser step.

A turn is a set number of consecutive batches of a loader. Under Sync every rank takes a share of each batch of a turn;
under Cadence and Async a rank takes whole turns. The number of a turn identifies it, so the position in an epoch is one
number, or a few if ranks took turns out of order. `flodl.data` decides which batches exist, `flodl.distributed.policy`
which rank takes a turn.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from flodl.data import DataLoader
from flodl.data.rng import Rng
from flodl.data.stream import Stream
from flodl.distributed.shares import ranges, split
from flodl.errors import DataError, TrainError
from flodl.nested import map_leaves
from flodl.train.loss import batch_len, is_column
from flodl.train.saving.state import random_kept

HOST = torch.device("cpu")
# The original seed, and the one set here, of each generator that was seeded here.
_SEEDS: WeakKeyDictionary[torch.Generator, tuple[int, int]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Share:
    """The part of each batch for one rank: ``ratios`` has a number for each rank; no part is smaller than ``least``."""

    rank: int
    ratios: tuple[float, ...]
    least: int = 1

    def of(self, total: int) -> tuple[int, int]:
        """Return the range ``(first, end)`` of this rank in ``total`` items."""
        if len(self.ratios) == 1:
            return 0, total
        return ranges(split(total, self.ratios, self.least))[self.rank]


class RowFeed:
    """A feed over a `flodl.data.DataLoader`, which can fetch any row of any epoch.

    Args:
        accumulate: batches of the loader in one turn.
        micro_batch_size: largest number of rows in a pass of the model; None for no bound.
        device: device of the batches.
    """

    def __init__(
        self, loader: DataLoader, device: torch.device, *, accumulate: int = 1, micro_batch_size: int | None = None
    ) -> None:
        self.loader, self.accumulate, self.micro_batch_size = loader, accumulate, micro_batch_size
        self.device = device if device != loader.device else None

    def turns(self, epoch: int) -> int:
        """Return how many turns ``epoch`` has, including an incomplete last one."""
        return -(-len(self.loader.plan(epoch)) // self.accumulate)

    def identity(self) -> dict[str, Any]:
        """Return the values that define the order of rows and the size of a step."""
        rows = {"rows": self.loader.num_rows, "data_seed": self.loader.seed, "accumulate": self.accumulate}
        return {**rows, **{f"order.{k}": v for k, v in self.loader.batches.identity().items()}}

    def work(self, epoch: int, turns: Iterable[int], share: Share | None) -> Iterator[tuple[int, list[Any]]]:
        """Yield ``(turn, micro-batches)``; a loader that streams to a device prepares batches ahead."""
        loader, plan = self.loader, self.loader.plan(epoch)
        plans: list[tuple[int, list[tuple[int, np.ndarray]]]] = []
        for turn in turns:
            numbers = range(turn * self.accumulate, min((turn + 1) * self.accumulate, len(plan)))
            cuts = [(n, plan[n], _pieces(len(plan[n]), self.micro_batch_size, share)) for n in numbers]
            plans.append((turn, [(n, rows[first:last]) for n, rows, pieces in cuts for first, last in pieces]))
        resident = loader.is_resident
        # On a CPU working ahead saves no time, and data that draw from torch's global generator must draw in the order
        # of training, to resume with the same bits.
        depth = 0 if resident or loader.device.type == "cpu" else loader.prefetch
        items = [item for _, parts in plans for item in parts]
        if depth and items:
            make = lambda item: loader.fetch(item[1], epoch, item[0])  # noqa: E731
            batches: Iterator[Any] = Stream(make, iter(items), depth, loader.placement)  # type: ignore[arg-type]
        else:
            batches = map(loader.fetch, [rows for _, rows in items], itertools.repeat(epoch), [n for n, _ in items])
        for turn, parts in plans:
            made = [next(batches) for _ in parts]  # a StopIteration of the data must not shorten a step
            if not resident and not depth:
                made = [loader.placement.receive(*loader.placement.send(batch)) for batch in made]
            yield turn, made if self.device is None else [batch.to(self.device) for batch in made]


class StreamFeed:
    """A feed over anything that can be iterated one time per epoch; every rank must read the same batches.

    A rank skips the batches of other ranks, and a resumed run skips the batches before its position, so a loader that
    can fetch any batch (`flodl.data.DataLoader`) is faster if reading is expensive. Seed and epoch determine the random
    numbers at the start of the iteration, so the order is equal on all ranks and after a resume. Skipped batches draw
    no random numbers.

    Data without a length are one epoch with a turn for each step of the run; data that end are restarted. Data that
    cannot be restarted, such as a generator, end the epoch early.

    Args:
        loader: ``len()``, if it has one, gives the batches of an epoch. ``set_epoch(epoch)`` is called where it exists.
        seed: decides the order of a loader that shuffles.
        max_steps: turns of the epoch of data without a length.
    """

    def __init__(
        self,
        loader: Any,
        device: torch.device,
        *,
        accumulate: int = 1,
        micro_batch_size: int | None = None,
        seed: int = 42,
        max_steps: int | None = None,
    ) -> None:
        self.loader, self.device, self.seed = loader, device, seed
        self.accumulate, self.micro_batch_size = accumulate, micro_batch_size
        self._length, self._max_steps = _length_of(loader), max_steps
        self._source: Iterator[Any] = iter(())
        self._epoch = self._pass = self._next = 0  # epoch, number of the next pass over the data, and next turn

    def turns(self, epoch: int) -> int:
        """Return how many turns an epoch has, including an incomplete last one."""
        return self._max_steps or 0 if self._length is None else -(-self._length // self.accumulate)

    def identity(self) -> dict[str, Any]:
        """Return the number of batches, None without a length, and the size of a step."""
        return {"batches": self._length, "accumulate": self.accumulate}

    def work(self, epoch: int, turns: Iterable[int], share: Share | None) -> Iterator[tuple[int, list[Any]]]:
        """Yield ``(turn, micro-batches)``; other turns are read and skipped.

        There are fewer turns if data without a length end and cannot be restarted.
        """
        chosen = set(turns)
        if chosen and (epoch != self._epoch or self._next > min(chosen)):
            self._source, self._epoch, self._pass, self._next = iter(()), epoch, epoch, 0
        for turn in range(self._next, max(chosen, default=-1) + 1):
            batches = self._read(turn, turn in chosen)
            if not batches:
                return
            self._next = turn + 1
            if turn in chosen:
                yield turn, [to_device(part, self.device) for batch in batches for part in self._cut(batch, share)]
        if chosen and self._next == self.turns(epoch) and self._length is not None:
            with random_kept(HOST):
                next(self._source, None)  # some loaders finish their work only at the end of the iteration

    def _read(self, turn: int, wanted: bool) -> list[Any]:
        """Return the batches of the next turn, which ends with a pass over the data; none if all data are read.

        Raises:
            DataError: the loader yields fewer batches than its length.
        """
        length, first = self._length, turn * self.accumulate
        count = self.accumulate if length is None else min(self.accumulate, length - first)
        batches = self._some(count, wanted)
        if not batches and (length is None or not turn):
            with random_kept(HOST):
                self._source = self._begun(self._pass)
                batches = list(itertools.islice(self._source, 1))
            self._pass += 1
            batches += self._some(count - 1, wanted) if batches else []
        if length is not None and len(batches) < count:
            found = first + len(batches)
            raise DataError(
                f"trainer: found {found} batches in epoch {self._epoch} of {type(self.loader).__name__}, expected "
                f"{length}, the value of its len().",
                found=found,
                expected=length,
            )
        return batches

    def _some(self, count: int, wanted: bool) -> list[Any]:
        """Return the next batches of this pass; skipped batches do not change random states."""
        with contextlib.nullcontext() if wanted else random_kept(HOST):
            return list(itertools.islice(self._source, count))

    def _begun(self, epoch: int) -> Iterator[Any]:
        """Start the iteration of an epoch; the caller restores the random states."""
        for target in (self.loader, getattr(self.loader, "sampler", None)):
            if hasattr(target, "set_epoch"):
                target.set_epoch(epoch)  # type: ignore[union-attr]
        decide_order(self.loader, self.seed, epoch)
        return self.loader.epoch(epoch) if hasattr(self.loader, "epoch") else iter(self.loader)

    def _cut(self, batch: Any, share: Share | None) -> list[Any]:
        total = batch_len(batch)
        pieces = _pieces(total, self.micro_batch_size, share)
        if pieces == [(0, total)] or not total:
            return [batch]
        return [_slice(batch, *piece, total) for piece in pieces]


# Turns of an epoch, by number; an empty share of a rank gives a turn without micro-batches.
Feed = RowFeed | StreamFeed


def _length_of(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def _pieces(total: int, size: int | None, share: Share | None) -> list[tuple[int, int]]:
    """Return ranges of ``size`` in the share of ``total`` rows, all of it if None.

    The last is larger if a remainder would be smaller than a share may be.
    """
    first, last = share.of(total) if share is not None else (0, total)
    least = share.least if share is not None else 1
    length = max(size or last - first, least)
    starts = [start for start in range(first, last, length) if start == first or last - start >= least]
    return list(zip(starts, [*starts[1:], last], strict=True)) if first < last else []


def _slice(batch: Any, first: int, last: int, total: int) -> Any:
    def cut(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return part[first:last] if part.dim() and part.shape[0] == total else part
        if is_column(part):
            return part[first:last] if len(part) == total else part
        if isinstance(part, (int, float, str, bytes, bool, type(None))):
            return part
        raise TrainError(
            f"trainer: a batch of type {type(part).__name__} cannot be cut into shares or micro-batches; expected "
            "tensors in mappings, sequences or dataclasses. Or use flodl.data.DataLoader, which cuts rows.",
            found=type(part).__name__,
        )

    return map_leaves(batch, cut, is_column)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return ``batch`` with its tensors, and objects with a method ``to``, on ``device``."""

    def moved(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return part.to(device, non_blocking=True)
        return part.to(device) if _moves_itself(part) else part

    return map_leaves(batch, moved, _moves_itself)


def _moves_itself(part: Any) -> bool:
    return callable(getattr(part, "to", None))


def as_feed(
    data: Any,
    device: torch.device,
    *,
    batch_size: int | None = None,
    seed: int = 42,
    shuffle: bool = True,
    drop_last: bool = False,
    batches: Any = None,
    collate: Any = None,
    accumulate: int = 1,
    micro_batch_size: int | None = None,
    max_steps: int | None = None,
) -> Feed:
    """Return the feed over a loader, or over a data set cut into batches of ``batch_size``.

    Raises:
        DataError, TrainError: as of `check_data`.
    """
    sizes: Any = {"accumulate": accumulate, "micro_batch_size": micro_batch_size}
    if isinstance(data, DataLoader):
        return RowFeed(data, device, **sizes)
    if check_data(data, batch_size=batch_size, batches=batches, max_steps=max_steps):
        return StreamFeed(data, device, max_steps=max_steps, seed=seed, **sizes)
    rows = {"batch_size": batch_size, "shuffle": shuffle, "drop_last": drop_last}
    options: dict[str, Any] = rows if batches is None else {"batches": batches}
    return RowFeed(DataLoader(data, seed=seed, device=device, collate=collate, **options), device, **sizes)


def check_data(
    data: Any, *, batch_size: int | None = None, batches: Any = None, max_steps: int | None = None, **_: Any
) -> bool:
    """Return True if ``data`` yields batches, False if it contains rows to be cut into batches.

    Raises:
        DataError: a loader without a length, and no ``max_steps``.
        TrainError: rows without a ``batch_size``.
    """
    if isinstance(data, DataLoader):
        return False
    if not isinstance(data, torch.utils.data.DataLoader) and (batch_size is not None or batches is not None):
        return False
    if _are_rows(data):
        raise TrainError(
            f"trainer: found rows ({type(data).__name__}) and no batch size; each row would be a step. "
            "Expected batch_size (.batch_size(32), or batch_size=32 of evaluate), or a loader that yields batches.",
            found=type(data).__name__,
            missing=["batch_size"],
        )
    if _length_of(data) is None and max_steps is None:
        raise DataError(
            f"trainer: found {type(data).__name__} without a length; expected a loader whose len() is the number "
            "of batches in an epoch, or max_steps, which specifies the number of steps of training."
        )
    return True


def _are_rows(data: Any) -> bool:
    if isinstance(data, (torch.utils.data.DataLoader, torch.utils.data.IterableDataset)):
        return False
    if isinstance(data, (torch.Tensor, np.ndarray, Mapping, torch.utils.data.Dataset)) or hasattr(data, "features"):
        return True
    if isinstance(data, (list, tuple)):
        return bool(data) and _is_row(data[0])
    return not hasattr(data, "__iter__") and not hasattr(data, "epoch")


def gives_batches(data: Any) -> bool:
    """Return True if ``data`` are batches already: a list of batches, or a loader without access to rows."""
    if isinstance(data, (list, tuple)):
        return not _are_rows(data)
    asked = any(hasattr(data, name) for name in ("get", "get_batch", "__getitem__"))
    return hasattr(data, "__iter__") and hasattr(data, "__len__") and not asked and not _are_rows(data)


def _is_row(item: Any) -> bool:
    """Return True if an item of a list is one sample: it contains a number or a text instead of several."""
    parts = list(item.values()) if isinstance(item, Mapping) else item if isinstance(item, (list, tuple)) else [item]
    sizes = {part.shape[0] for part in parts if isinstance(part, (torch.Tensor, np.ndarray)) and part.ndim}
    single = [part for part in parts if isinstance(part, (str, float, int)) or getattr(part, "ndim", 1) == 0]
    # a number next to tensors may be their number of samples
    return any(not (isinstance(part, int) and part in sizes) for part in single)


def decide_order(loader: Any, seed: int, epoch: int) -> None:
    """Seed the generators that a loader draws its order from.

    Args:
        loader: its generators, and the generators of its samplers, are seeded by their original seed and the epoch;
            in epoch 0 by their original seed.
        seed: determines the other random numbers of this host, which the caller restores.
        epoch: the epoch.
    """
    drawn = Rng(seed, "loader", epoch)
    torch.default_generator.manual_seed(drawn.integer(1 << 53))
    np.random.seed(drawn.integer(1 << 32))
    random.seed(drawn.integer(1 << 53))
    samplers = (getattr(loader, name, None) for name in ("sampler", "batch_sampler"))
    for generator in {getattr(part, "generator", None) for part in (loader, *samplers)}:
        if isinstance(generator, torch.Generator):
            given, last = _SEEDS.get(generator, (0, None))
            found = generator.initial_seed()
            given = given if found == last else found  # unless it was seeded again
            chosen = given if epoch == 0 else Rng(given, "loader", epoch).integer(1 << 53)
            generator.manual_seed(chosen)
            _SEEDS[generator] = given, chosen

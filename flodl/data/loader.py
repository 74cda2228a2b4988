"""Batches of a data set, epoch after epoch, with a position that can be saved and found again.

A loader joins four things decided elsewhere: which rows exist (``datasets``), in which batches they come
(``batches``, ``distributed``), how rows become tensors (``collate``), and how they reach the device
(``stream``, ``memory``). It decides whether the whole set lives on the device, and keeps the position: the
epoch, and the batches of it that the consumer has taken.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray

from flodl.data.batch import Batch
from flodl.data.batches import BatchSource, EpochPlan, source_of_rows
from flodl.data.builder import LoaderBuilder
from flodl.data.collate import Transform, Where, collate_rows
from flodl.data.datasets import BatchDataset, Collate, RowSource, TensorRows, as_batches
from flodl.data.distributed import RankBatches
from flodl.data.memory import DeviceMemory, clamp_usage, fits, prefetch_depth
from flodl.data.samplers import Sampler
from flodl.data.stream import Placement, Stream
from flodl.errors import DataError, capped

__all__ = ["DataLoader", "EpochIterator", "Mode"]

Mode = Literal["auto", "resident", "streaming"]


class DataLoader:
    """Batches of a data set: ``for batch in loader`` or ``for batch in loader.epoch(3)``.

    The order depends on the seed and the epoch alone. :meth:`state_dict` holds the position after the batch
    taken last; a loader built alike that loads it gives exactly the batches that were still to come, equal
    to the bit.

    In *resident* mode the data lies on the device whole and a batch is one gather. In *streaming* mode a
    thread makes batches ahead. ``mode="auto"`` takes resident where the data is tensors that never change
    and fits; if memory runs out while placing it, the loader warns and streams, with the same order and
    position.

    Args:
        data: anything that :func:`flodl.data.as_batches` takes.
        batch_size: rows in a batch.
        batches: a ready source of batches instead of ``batch_size``, ``sampler``, ``shuffle`` and
            ``drop_last``.
        sampler: the order; by default random with ``seed``, or sequential without ``shuffle``.
        shuffle: visit rows in random order.
        seed: decides the order, and the random numbers that transforms draw.
        drop_last: leave out a ragged last batch. Off: nothing is dropped.
        device: where batches are wanted.
        mode: ``"auto"``, ``"resident"`` or ``"streaming"``.
        prefetch: batches made ahead when streaming; 0 makes each when it is asked for; None sizes the queue
            from free memory.
        vram_max_usage: share of a CUDA device that may be filled, within 0.50 and 0.99.
        names: names for the parts of a batch, one for each.
        collate: makes a batch of rows; see :class:`flodl.data.CollateTokens`.
        transform: changes each batch; gets the batch and its address, and must be a function of these
            alone. It runs before the copy when streaming, on the device when resident.

    Raises:
        DataError: the data is empty, ``batch_size`` is missing or not positive, arguments contradict each
            other, or names do not match the parts.
    """

    def __init__(
        self,
        data: Any,
        batch_size: int | None = None,
        *,
        batches: BatchSource | None = None,
        sampler: Sampler | None = None,
        shuffle: bool = True,
        seed: int = 42,
        drop_last: bool = False,
        device: torch.device | str = "cpu",
        mode: Mode = "auto",
        prefetch: int | None = None,
        vram_max_usage: float = 0.90,
        names: Sequence[str] | None = None,
        collate: Collate | None = None,
        transform: Transform | None = None,
    ) -> None:
        if mode not in ("auto", "resident", "streaming"):
            raise DataError(f"DataLoader: mode is {mode!r}; expected 'auto', 'resident' or 'streaming'", mode=mode)
        self.data: BatchDataset | RowSource = as_batches(data, collate)
        self.batches = source_of_rows(len(self.data), batch_size, batches, sampler, shuffle, seed, drop_last)
        self.batch_size = batch_size
        self.seed = int(seed)
        self.device = _full_device(device)
        self.vram_max_usage = clamp_usage(vram_max_usage)
        self._mode: Mode = mode
        self._prefetch = prefetch
        self._transform = transform
        self.placement = Placement(self.device)
        self._resident: TensorRows | None = None
        self._decided = False
        self._batch_bytes: int | None = None
        self._plan: tuple[tuple[int, int], EpochPlan] | None = None
        self._epoch = 0
        self._taken = 0
        self._resuming = False
        self._active: object | None = None
        self._names: tuple[str, ...] | None = None
        if names is not None:
            self._check_names(tuple(names))
            self._names = tuple(names)

    @classmethod
    def from_dataset(cls, data: Any) -> LoaderBuilder[Self]:
        """Return a builder of a loader over ``data``, set up call by call and ended with ``build()``."""
        return LoaderBuilder(data, cls)

    from_batch_dataset = from_dataset

    # ------------------------------------------------------------------------------------------- iteration

    def __iter__(self) -> EpochIterator:
        return self.epoch(self._epoch)

    def epoch(self, epoch: int) -> EpochIterator:
        """Return an iterator over the batches of ``epoch``, from its start.

        The first call after :meth:`load_state_dict` that asks for the saved epoch starts at the saved
        position. Dropping the iterator, or its ``close()``, stops the work done ahead.
        """
        start = self._taken if self._resuming and epoch == self._epoch else 0
        self._resuming = False
        self._decide_mode()
        return EpochIterator(self, epoch, start)

    def __len__(self) -> int:
        """Return the number of batches in the current epoch, those already taken included."""
        return len(self.plan(self._epoch))

    @property
    def num_batches(self) -> int:
        """Return the number of batches in the current epoch."""
        return len(self)

    @property
    def num_rows(self) -> int:
        """Return the number of rows in the data set."""
        return len(self.data)

    def plan(self, epoch: int) -> EpochPlan:
        """Return which rows come in which batch of ``epoch``."""
        # a distributed plan counts its divisions in `revision`; other sources never change
        key = (epoch, getattr(self.batches, "revision", 0))
        if self._plan is None or self._plan[0] != key:
            self._plan = (key, self.batches.plan(epoch))
        return self._plan[1]

    # --------------------------------------------------------------------------------------------- position

    @property
    def current_epoch(self) -> int:
        """Return the epoch that is running or comes next."""
        return self._epoch

    @property
    def batches_taken(self) -> int:
        """Return how many batches of the current epoch the consumer has taken."""
        return self._taken

    def state_dict(self) -> dict[str, Any]:
        """Return the position and what defines the order; JSON-able.

        A batch counts as used once the consumer has taken it, whatever was made ahead.
        """
        return {
            "version": 1,
            "epoch": self._epoch,
            "batch": self._taken,
            "seed": self.seed,
            "source": self.batches.identity(),
            "shares": self.batches.state_dict() if isinstance(self.batches, RankBatches) else None,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Sequence[str] = ()) -> None:
        """Go to a saved position; the next iteration starts there.

        Args:
            state: from :meth:`state_dict`.
            allow: names of differences to accept, for example ``["seed"]``.

        Raises:
            DataError: the saved order is not this loader's; ``problems`` lists each difference.
        """
        if state.get("version") != 1:
            raise DataError(
                f"loader state: version is {state.get('version')!r}; this version reads 1",
                found=state.get("version"),
            )
        saved = {**state["source"], "seed": state["seed"]}
        own = {**self.batches.identity(), "seed": self.seed}
        problems = [
            f"{key}: saved {saved.get(key)!r}, this loader has {own.get(key)!r}"
            for key in [*saved, *(k for k in own if k not in saved)]
            if saved.get(key) != own.get(key) and key not in allow
        ]
        if problems:
            raise DataError(
                "loader state: it was saved by a loader of another order:\n"
                + capped(problems)
                + "\nbuild the loader as it was, or accept a difference with allow=[...]",
                problems=problems,
            )
        if isinstance(self.batches, RankBatches) and state.get("shares") is not None:
            self.batches.load_state_dict(state["shares"])
        self.seek(int(state["epoch"]), int(state["batch"]))

    def seek(self, epoch: int, batch: int = 0) -> None:
        """Go to a position: the next iteration over ``epoch`` starts at ``batch``."""
        self._epoch, self._taken = int(epoch), int(batch)
        self._resuming = True
        self._active = None

    # ------------------------------------------------------------------------------------------------- mode

    @property
    def is_resident(self) -> bool:
        """Return whether the whole data set lies on the device.

        The first question, or the first epoch, decides it and places the data.
        """
        self._decide_mode()
        return self._resident is not None

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of a batch's parts."""
        if self._names is None:
            self._names = self._raw(Where(self.seed, 0, 0, (0,)))[0]
        return self._names

    def set_prefetch_depth(self, depth: int | None) -> None:
        """Set how many batches are made ahead from the next epoch on; None sizes it from free memory."""
        self._prefetch = depth

    @property
    def prefetch(self) -> int:
        """Return how many batches the next epoch will make ahead."""
        if self._prefetch is not None:
            return max(0, self._prefetch)
        return prefetch_depth(self._batch_bytes, DeviceMemory.of(self.device), self.vram_max_usage)

    def _decide_mode(self) -> None:
        if self._decided:
            return
        self._decided = True
        if self._mode == "streaming" or (
            self._mode == "auto" and not (isinstance(self.data, TensorRows) and self._has_room(self.data))
        ):
            return
        try:
            rows = self.data if isinstance(self.data, TensorRows) else self._gathered()
            self._resident = self._place(rows)
        except torch.OutOfMemoryError as error:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self._resident = None
            warnings.warn(
                f"loader: the data set does not fit on {self.device} ({str(error).splitlines()[0]}); "
                "streaming instead, with the same order and position",
                stacklevel=3,
            )

    def _has_room(self, rows: TensorRows) -> bool:
        memory = DeviceMemory.of(self.device)
        if memory is None:
            # on the host nothing is copied; other devices without a memory count are left to streaming
            return self.device.type == "cpu"
        return fits(rows.num_bytes(), memory, self.vram_max_usage)

    def _place(self, rows: TensorRows) -> TensorRows:
        return rows.on(self.device)

    def _gathered(self) -> TensorRows:
        if isinstance(self.data, RowSource) and self.data.collate is not collate_rows:
            raise DataError(
                "loader: mode='resident' needs rows of fixed shape, and this loader has a collate function "
                "of its own; use mode='streaming'",
                mode="resident",
            )
        chunks = []
        for start in range(0, len(self.data), 1024):
            indices = tuple(range(start, min(start + 1024, len(self.data))))
            chunks.append(self._raw(Where(self.seed, 0, 0, indices)))
        names = chunks[0][0]
        columns = [[values[i] for _, values in chunks] for i in range(len(names))]
        loose = [n for n, column in zip(names, columns, strict=True) if not isinstance(column[0], torch.Tensor)]
        if loose:
            raise DataError(
                f"loader: mode='resident' needs tensors, and parts {loose} are not; use mode='streaming'",
                names=loose,
            )
        return TensorRows({n: torch.cat(column) for n, column in zip(names, columns, strict=True)})

    # --------------------------------------------------------------------------------------------- one batch

    def _raw(self, where: Where) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        data = self.data
        parts = data.get_batch_at(where) if isinstance(data, RowSource) else data.get_batch(where.indices)
        if isinstance(parts, torch.Tensor):
            parts = (parts,)
        if isinstance(parts, Batch):
            return parts.into_parts()
        if isinstance(parts, Mapping):
            return tuple(parts.keys()), tuple(parts.values())
        return tuple(str(i) for i in range(len(parts))), tuple(parts)

    def fetch(self, indices: NDArray[np.int64], epoch: int, number: int) -> Batch:
        """Return the batch of any rows, before it is carried to the device; the position does not move.

        Args:
            indices: row numbers; none gives a batch without rows.
            epoch: the epoch, and
            number: the batch, whose address a transform is given.
        """
        self._decide_mode()
        return self._make({number: indices}, epoch, number)

    def _make(self, plan: EpochPlan | Mapping[int, NDArray[np.int64]], epoch: int, number: int) -> Batch:
        indices = plan[number]
        where = Where(self.seed, epoch, number, tuple(indices.tolist()) or (0,))
        try:
            if self._resident is not None:
                at = torch.as_tensor(where.indices)
                if self.device.type == "cuda":
                    # an ordinary copy would make the host wait for the device at every batch
                    at = at.pin_memory().to(self.device, non_blocking=True)
                parts = self._resident.get_batch(at)
                found, values = tuple(parts.keys()), tuple(parts.values())
            else:
                found, values = self._raw(where)
            if self._names is not None and len(self._names) == len(values):
                found = self._names
            elif self._names is None:
                self._names = found
            batch = Batch(dict(zip(found, values, strict=True)), len(where.indices), np.asarray(where.indices))
            if self._transform is not None:
                batch = self._transform(batch, where)
        except Exception as error:
            error.add_note(f"while making batch {number} of epoch {epoch}, rows {where.indices[:8]}")
            raise
        # the empty share of a rank has the parts of any other batch, without rows
        return batch if indices.size else batch.emptied()

    def _check_names(self, names: tuple[str, ...]) -> None:
        found, values = self._raw(Where(self.seed, 0, 0, (0,)))
        if len(names) != len(values) or len(set(names)) != len(names):
            raise DataError(
                f"loader: {len(names)} names {list(names)} for the {len(values)} parts {list(found)}; "
                "expected one name for each, all different",
                names=names,
                parts=found,
            )


class EpochIterator:
    """The batches of one epoch; ``len()`` is how many are still to come. Made by :meth:`DataLoader.epoch`."""

    def __init__(self, loader: DataLoader, epoch: int, start: int) -> None:
        plan = loader.plan(epoch)
        self._loader = loader
        self._plan = plan
        self._next = min(start, len(plan))
        self.epoch = epoch
        self._token = object()
        loader._active = self._token
        loader._epoch, loader._taken = epoch, self._next
        depth = 0 if loader._resident is not None else loader.prefetch
        self._stream: Stream | None = None
        if depth and self._next < len(plan):
            self._stream = Stream(
                lambda number: loader._make(plan, epoch, number),
                range(self._next, len(plan)),
                depth,
                loader.placement,
            )
        self._done = False

    def __iter__(self) -> EpochIterator:
        return self

    def __len__(self) -> int:
        return 0 if self._done else len(self._plan) - self._next

    def __next__(self) -> Batch:
        loader = self._loader
        if self._done or self._next >= len(self._plan):
            if not self._done and loader._active is self._token:
                loader._epoch, loader._taken = self.epoch + 1, 0
            self.close()
            raise StopIteration
        try:
            if self._stream is not None:
                batch = next(self._stream)
            else:
                batch = loader._make(self._plan, self.epoch, self._next)
                if loader._resident is None:
                    batch = loader.placement.receive(*loader.placement.send(batch))
        except BaseException:
            self.close()
            raise
        self._next += 1
        # only the newest iterator moves the loader's position, so that a forgotten one cannot
        if loader._active is self._token:
            loader._taken = self._next
        loader._batch_bytes = max(loader._batch_bytes or 0, batch.num_bytes())
        return batch

    def close(self) -> None:
        """Stop; the position stays where the last taken batch left it."""
        self._done = True
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def __enter__(self) -> EpochIterator:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _full_device(device: torch.device | str) -> torch.device:
    wanted = torch.device(device)
    # tensors report an index, so a device without one would never compare equal to theirs
    if wanted.type == "cuda" and wanted.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return wanted

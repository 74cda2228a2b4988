"""Batches of a data set, epoch after epoch, with a position that can be saved and restored."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from flodl.data.batch import Batch
from flodl.data.batches import BatchSource, EpochPlan, Sampler, source_of_rows
from flodl.data.collate import BatchDataset, Collate, RowSource, TensorRows, Transform, Where, as_batches, collate_rows
from flodl.data.stream import Placement, Stream
from flodl.errors import DataError, capped

Mode = Literal["auto", "resident", "streaming"]
GATHER_ROWS = 1024
"""Rows in one read when a data set becomes resident."""

FIRST_DEPTH = 4
"""Batches to prefetch for a CUDA device before the size of a batch is known."""

HOST_DEPTH = 2
"""Batches to prefetch if batches stay on the host: one in use and one ready keep the worker busy."""

MAX_DEPTH = 64
"""More batches than this hide no latency and use page-locked memory."""

RESERVE_BYTES = 256 << 20
"""Bytes left free for the fragments of the allocator and the workspaces of libraries."""


class DataLoader:
    """Batches of a data set: ``for batch in loader`` or ``for batch in loader.epoch(3)``.

    The order depends only on the seed and the epoch. :meth:`state_dict` returns the position after the last batch that
    the consumer has taken. A loader with equal arguments that loads this state returns exactly the remaining batches,
    equal to the bit.

    In *resident* mode the whole data set is on the device, and a batch is one gather. In *streaming* mode a thread
    prefetches batches. ``mode="auto"`` selects resident if the data consists of tensors that never change and that fit
    on the device. If the device runs out of memory while the data is placed, the loader warns and streams with the
    same order and position.

    Args:
        data: tensors, rows or a data set. Accepted are a tensor, a tuple or dict of tensors, :class:`TensorRows`, a
            list of dicts, and any object with ``__len__`` and one of ``get_batch(indices)``, ``get(i)``, ``[i]``.
        batch_size: rows in a batch.
        batches: a batch source, instead of ``batch_size``, ``sampler``, ``shuffle`` and ``drop_last``.
        sampler: the order; by default random with ``seed``, or sequential if ``shuffle`` is False.
        shuffle: visit rows in random order.
        seed: determines the order, and the random numbers of transforms.
        drop_last: leave out the incomplete last batch.
        device: target device of the batches.
        mode: ``"auto"``, ``"resident"`` or ``"streaming"``.
        prefetch: batches to prefetch in streaming mode; 0 makes each batch on request; None derives the number from
            free memory.
        vram_max_usage: share of a CUDA device that may be filled, within 0.50 and 0.99.
        collate: makes a batch of rows; see :class:`flodl.data.CollateTokens`.
        transform: changes each batch. It receives the batch and its address, and its result must depend on these only.
            It runs before the copy in streaming mode, on the device in resident mode.

    Raises:
        DataError: the data is empty, ``batch_size`` is missing or not positive, or arguments contradict each other.
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
        collate: Collate | None = None,
        transform: Transform | None = None,
    ) -> None:
        if mode not in ("auto", "resident", "streaming"):
            raise DataError(f"DataLoader: found mode {mode!r}, expected 'auto', 'resident' or 'streaming'", mode=mode)
        self.data: BatchDataset | RowSource = as_batches(data, collate)
        self.batches = source_of_rows(len(self.data), batch_size, batches, sampler, shuffle, seed, drop_last)
        self.batch_size = batch_size
        self.seed = int(seed)
        self.device = _full_device(device)
        self.vram_max_usage = min(max(float(vram_max_usage), 0.50), 0.99)
        self._mode: Mode = mode
        self._prefetch = prefetch
        self._transform = transform
        self.placement = Placement(self.device)
        self._batch_bytes: int | None = None
        self._plan: tuple[int, EpochPlan] | None = None
        self._epoch = 0
        self._taken = 0
        self._resuming = False
        self._active: object | None = None

    # ------------------------------------------------------------------------------------------- iteration

    def __iter__(self) -> EpochIterator:
        return self.epoch(self._epoch)

    def epoch(self, epoch: int) -> EpochIterator:
        """Return an iterator over the batches of ``epoch``.

        The first call for the saved epoch after :meth:`load_state_dict` starts at the saved position. Other calls start
        at the first batch. Dropping the iterator, or its ``close()``, stops the prefetching.
        """
        start = self._taken if self._resuming and epoch == self._epoch else 0
        self._resuming = False
        return EpochIterator(self, epoch, start)

    def __len__(self) -> int:
        """Return the number of batches of the current epoch, including those already taken."""
        return len(self.plan(self._epoch))

    @property
    def num_rows(self) -> int:
        """Number of rows of the data set."""
        return len(self.data)

    def plan(self, epoch: int) -> EpochPlan:
        """Return the rows of each batch of ``epoch``."""
        if self._plan is None or self._plan[0] != epoch:
            self._plan = (epoch, self.batches.plan(epoch))
        return self._plan[1]

    # --------------------------------------------------------------------------------------------- position

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the values that define the order, as JSON values.

        A batch counts as used once the consumer has taken it. Prefetched batches do not count.
        """
        return {
            "version": 1,
            "epoch": self._epoch,
            "batch": self._taken,
            "seed": self.seed,
            "source": self.batches.identity(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Sequence[str] = ()) -> None:
        """Restore a saved position. The next iteration starts there.

        Args:
            state: from :meth:`state_dict`.
            allow: names of differences to accept, for example ``["seed"]``.

        Raises:
            DataError: the saved order differs from this loader's; ``problems`` lists each difference.
        """
        if state.get("version") != 1:
            raise DataError(
                f"loader state: found version {state.get('version')!r}, expected 1",
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
                f"loader state: found another order, expected the order of this loader:\n{capped(problems)}\n"
                "Create the loader with the saved values, or accept a difference with allow=[...].",
                problems=problems,
            )
        self._epoch, self._taken = int(state["epoch"]), int(state["batch"])
        self._resuming = True
        self._active = None

    # ------------------------------------------------------------------------------------------------- mode

    @property
    def is_resident(self) -> bool:
        """Whether the whole data set is on the device. The first access, or the first epoch, places the data."""
        return self._resident is not None

    @property
    def prefetch(self) -> int:
        """Number of batches that the next epoch prefetches."""
        if self._prefetch is not None:
            return max(0, self._prefetch)
        room = _bytes_left(self.device, self.vram_max_usage)
        if room is None:
            return HOST_DEPTH
        if not self._batch_bytes:
            return FIRST_DEPTH
        return int(min(max((room - RESERVE_BYTES) // self._batch_bytes, 1), MAX_DEPTH))

    @cached_property
    def _resident(self) -> TensorRows | None:
        """All rows on the device; None in streaming mode."""
        rows = self.data if isinstance(self.data, TensorRows) else None
        if self._mode == "streaming" or (self._mode == "auto" and not (rows is not None and self._fits(rows))):
            return None
        try:
            return (self._gathered() if rows is None else rows).on(self.device)
        except torch.OutOfMemoryError as error:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            warnings.warn(
                f"loader: the data set does not fit on {self.device} ({str(error).splitlines()[0]}); "
                "streaming instead, with the same order and position",
                stacklevel=4,
            )
            return None

    def _fits(self, rows: TensorRows) -> bool:
        room = _bytes_left(self.device, self.vram_max_usage)
        if room is None:
            # On the host nothing is copied. Other devices do not report their memory, so their batches are streamed.
            return self.device.type == "cpu"
        return rows.num_bytes() < room

    def _gathered(self) -> TensorRows:
        """Return all rows as tensors."""
        if isinstance(self.data, RowSource) and self.data.collate is not collate_rows:
            raise DataError(
                "loader: found a collate function, expected rows of fixed shape for mode='resident'. "
                "Use mode='streaming'.",
                mode="resident",
            )
        chunks = []
        for start in range(0, len(self.data), GATHER_ROWS):
            indices = tuple(range(start, min(start + GATHER_ROWS, len(self.data))))
            chunks.append(self._parts(Where(self.seed, 0, 0, indices)))
        loose = [name for name, part in chunks[0].items() if not isinstance(part, torch.Tensor)]
        if loose:
            raise DataError(
                f"loader: found parts {loose} that are no tensors, expected tensors for mode='resident'. "
                "Use mode='streaming'.",
                names=loose,
            )
        return TensorRows({name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]})

    # --------------------------------------------------------------------------------------------- one batch

    def _parts(self, batch: Where) -> dict[str, Any]:
        data = self.data
        parts = data.get_batch_at(batch) if isinstance(data, RowSource) else data.get_batch(batch.indices)
        if isinstance(parts, torch.Tensor):
            parts = (parts,)
        if isinstance(parts, (Batch, Mapping)):
            return dict(parts.items())
        return {str(i): part for i, part in enumerate(parts)}

    def fetch(self, indices: NDArray[np.int64], epoch: int, number: int) -> Batch:
        """Return the batch of any rows, before its copy to the device. The position does not change.

        Args:
            indices: row numbers; an empty array returns a batch without rows.
            epoch: the epoch that a transform receives.
            number: the number of the batch that a transform receives.
        """
        return self._make(indices, epoch, number)

    def _make(self, indices: NDArray[np.int64], epoch: int, number: int) -> Batch:
        where = Where(self.seed, epoch, number, tuple(indices.tolist()) or (0,))
        try:
            if self._resident is not None:
                at = torch.as_tensor(where.indices)
                if self.device.type == "cuda":
                    # A synchronous copy would make the host wait for the device at every batch.
                    at = at.pin_memory().to(self.device, non_blocking=True)
                parts = self._resident.get_batch(at)
            else:
                parts = self._parts(where)
            batch = Batch(parts, len(where.indices), np.asarray(where.indices))
            if self._transform is not None:
                batch = self._transform(batch, where)
        except Exception as error:
            error.add_note(f"while making batch {number} of epoch {epoch}, rows {where.indices[:8]}")
            raise
        # The empty share of a rank has the same parts as other batches, without rows.
        return batch if indices.size else batch.emptied()


class EpochIterator:
    """The batches of one epoch, made by :meth:`DataLoader.epoch`. ``len()`` is the number of remaining batches."""

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
                lambda number: loader._make(plan[number], epoch, number),
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
                batch = loader._make(self._plan[self._next], self.epoch, self._next)
                if loader._resident is None:
                    batch = loader.placement.receive(*loader.placement.send(batch))
        except BaseException:
            self.close()
            raise
        self._next += 1
        # Only the newest iterator moves the position of the loader.
        if loader._active is self._token:
            loader._taken = self._next
        loader._batch_bytes = max(loader._batch_bytes or 0, batch.num_bytes())
        return batch

    def close(self) -> None:
        """Stop. The position stays behind the batch taken last."""
        self._done = True
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def __enter__(self) -> EpochIterator:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _bytes_left(device: torch.device, usage: float) -> float | None:
    """Return the bytes until a CUDA device is filled to this share; None for other devices."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total * usage - (total - free)


def _full_device(device: torch.device | str) -> torch.device:
    wanted = torch.device(device)
    # Tensors report a device index. A device without an index never compares equal to theirs.
    if wanted.type == "cuda" and wanted.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return wanted

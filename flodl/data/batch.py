"""The batch that a loader returns: named parts, accessible by name or by position.

All tensors of a batch can be in one block of memory, which one copy moves to a device or to the inputs of a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flodl.errors import DataError, nearest

ALIGNMENT = 256
"""Each part starts at a multiple of this many bytes, so that kernels read whole cache lines."""

NUMPY_DTYPES = {
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.float32, torch.float64,
}  # fmt: skip
"""Dtypes that numpy has. Other tensors are copied as bytes."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One block of memory and the layout of the parts in it.

    Attributes:
        memory: bytes, uint8 ``(bytes,)``.
        layout: name, first byte, shape, stride and dtype of each part.
    """

    memory: torch.Tensor
    layout: tuple[tuple[str, int, torch.Size, tuple[int, ...], torch.dtype], ...]

    def parts(self) -> dict[str, torch.Tensor]:
        """Return the named parts, as views of the memory."""
        typed: dict[torch.dtype, torch.Tensor] = {}
        found = {}
        for name, start, shape, stride, dtype in self.layout:
            if dtype not in typed:
                typed[dtype] = self.memory.view(dtype)
            found[name] = typed[dtype].as_strided(shape, stride, start // dtype.itemsize)
        return found

    def at(self, memory: torch.Tensor) -> Piece:
        """Return the same layout for another block of memory."""
        return Piece(memory, self.layout)


class Batch:
    """Named parts of one batch.

    ``batch["labels"]`` and ``batch[1]`` return a part; ``x, y = batch`` unpacks; ``model(**batch)`` passes the parts
    as keyword arguments. A part is usually a tensor; texts stay a list.

    Args:
        parts: name to value, in order.
        num_rows: samples in this batch. 0 is possible: the empty share of a rank has tensors without rows.
        indices: row numbers in the data set, on the host, shape ``(num_rows,)``.
        piece: memory of which all tensor parts are views, or None.
    """

    __slots__ = ("_parts", "indices", "num_rows", "piece")

    def __init__(
        self,
        parts: Mapping[str, Any],
        num_rows: int,
        indices: NDArray[np.int64] | None = None,
        *,
        piece: Piece | None = None,
    ) -> None:
        self._parts = dict(parts)
        self.piece = piece
        self.num_rows = int(num_rows)
        self.indices = np.empty(0, dtype=np.int64) if indices is None else indices

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parts, in order."""
        return tuple(self._parts)

    def keys(self) -> tuple[str, ...]:
        """Return the names of the parts, which makes ``**batch`` work."""
        return self.names

    def items(self) -> list[tuple[str, Any]]:
        """Return ``(name, part)`` pairs, in order."""
        return list(self._parts.items())

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def get(self, name: str, default: Any = None) -> Any:
        """Return the part ``name``, or ``default`` if the batch has no such part."""
        return self._parts.get(name, default)

    def __getitem__(self, key: str | int) -> Any:
        if isinstance(key, str):
            if key in self._parts:
                return self._parts[key]
            known = ", ".join(self.names) or "none"
            raise DataError(
                f"batch: found no part {key!r}{nearest(key, self.names)}, expected one of: {known}",
                name=key,
                names=self.names,
            )
        if not -len(self) <= key < len(self):
            # Python's sequence protocol ends a loop over positions with an IndexError.
            raise IndexError(f"batch: no part {key}; this batch has {len(self)} parts: {', '.join(self.names)}")
        return self._parts[self.names[key]]

    def __len__(self) -> int:
        """Return the number of parts; ``num_rows`` counts samples."""
        return len(self._parts)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._parts.values())

    def __repr__(self) -> str:
        shown = [
            f"{n}: {tuple(p.shape)} {p.dtype}" if isinstance(p, torch.Tensor) else f"{n}: {type(p).__name__}"
            for n, p in self._parts.items()
        ]
        return f"Batch({self.num_rows} rows; {', '.join(shown)})"

    def with_parts(self, **parts: Any) -> Batch:
        """Return a batch with some parts added or replaced."""
        return Batch({**self._parts, **parts}, self.num_rows, self.indices)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Return this batch with its tensors on ``device``."""
        return self._changed(lambda part: part.to(device, non_blocking=non_blocking))

    def over(self, piece: Piece) -> Batch:
        """Return this batch with the tensors of ``piece`` instead of its tensors."""
        return Batch({**self._parts, **piece.parts()}, self.num_rows, self.indices, piece=piece)

    def pin_memory(self) -> Batch:
        """Return this batch with its host tensors in page-locked memory."""
        return self._changed(lambda part: part.pin_memory() if part.device.type == "cpu" else part)

    def _changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        changed = {n: change(p) for n, p in self._parts.items() if isinstance(p, torch.Tensor)}
        return Batch({**self._parts, **changed}, self.num_rows, self.indices)

    def num_bytes(self) -> int:
        """Return the size of all tensors in bytes."""
        return sum(p.numel() * p.element_size() for p in self if isinstance(p, torch.Tensor))

    def emptied(self) -> Batch:
        """Return a batch with the same parts and no rows, used if the share of a rank is empty."""
        parts = {}
        for name, part in self._parts.items():
            if name == "offsets":
                parts[name] = part[:1]
            elif name == "max_length":
                parts[name] = 0
            elif isinstance(part, torch.Tensor) and part.dim():
                parts[name] = part[:0]
            else:
                parts[name] = [] if isinstance(part, list) else part
        return Batch(parts, 0)


def lay_out(parts: Iterable[tuple[str, Any]], *, pinned: bool = False) -> Piece | None:
    """Return a copy of the tensors among ``parts`` in one block of host memory.

    Returns:
        The block; None if there is no tensor, or if a tensor is not on the host, dense and contiguous.

    Args:
        parts: names and values.
        pinned: whether to allocate page-locked memory, which a CUDA device copies asynchronously.
    """
    layout, arrays, total = [], [], 0
    for name, part in parts:
        if not isinstance(part, torch.Tensor):
            continue
        if part.device.type != "cpu" or part.layout != torch.strided or part.is_quantized or part.requires_grad:
            return None
        if not part.is_contiguous():
            return None
        raw = (part if part.dtype in NUMPY_DTYPES else part.reshape(-1).view(torch.uint8)).numpy()
        layout.append((name, total, part.shape, part.stride(), part.dtype))
        arrays.append(raw.reshape(-1).view(np.uint8))
        total += -(-raw.nbytes // ALIGNMENT) * ALIGNMENT
    if not total:
        return None
    memory = torch.empty(total, dtype=torch.uint8, pin_memory=pinned)
    into = memory.numpy()
    for (_, start, *_), raw in zip(layout, arrays, strict=True):
        into[start : start + raw.size] = raw
    return Piece(memory, tuple(layout))

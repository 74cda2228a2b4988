"""All tensors of a batch in one block of memory, which one copy moves to a device or to the inputs of a graph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

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

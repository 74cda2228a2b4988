"""All tensors of a batch in one piece of memory: one copy brings them to a device, another to a graph's inputs.

Decides which batches can lie in one piece and where each part begins. Who copies them is `flodl.data.stream` and
`flodl.train.step.capture`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

__all__ = ["Piece", "lay_out"]

ALIGNMENT = 256  # bytes; parts begin where kernels may read whole lines


@dataclass(frozen=True, slots=True)
class Piece:
    """Memory, and what lies where in it.

    Attributes:
        memory: bytes, uint8 ``(bytes,)``.
        layout: name, first byte, shape, stride and dtype of each part.
    """

    memory: torch.Tensor
    layout: tuple[tuple[str, int, torch.Size, tuple[int, ...], torch.dtype], ...]

    def parts(self) -> dict[str, torch.Tensor]:
        """Return the parts by name, as views of the memory."""
        typed: dict[torch.dtype, torch.Tensor] = {}
        found = {}
        for name, start, shape, stride, dtype in self.layout:
            if dtype not in typed:
                typed[dtype] = self.memory.view(dtype)
            found[name] = typed[dtype].as_strided(shape, stride, start // dtype.itemsize)
        return found

    def at(self, memory: torch.Tensor) -> Piece:
        """Return the same layout over other memory."""
        return Piece(memory, self.layout)


def lay_out(parts: Iterable[tuple[str, Any]], *, pinned: bool = False) -> Piece | None:
    """Return a copy of the tensors among ``parts`` in one piece of host memory.

    None where there is no tensor, or one that does not lie on the host, dense and in order.

    Args:
        pinned: whether the memory can be copied to a CUDA device without waiting.
    """
    layout, arrays, total = [], [], 0
    for name, part in parts:
        if not isinstance(part, torch.Tensor):
            continue
        if part.device.type != "cpu" or part.layout != torch.strided or part.is_quantized or part.requires_grad:
            return None
        if not part.is_contiguous():
            return None
        raw = (part if part.dtype in _PLAIN else part.reshape(-1).view(torch.uint8)).numpy()
        layout.append((name, total, part.shape, part.stride(), part.dtype))
        arrays.append(raw.reshape(-1).view(np.uint8))
        total += -(-raw.nbytes // ALIGNMENT) * ALIGNMENT
    if not total:
        return None
    memory = torch.empty(total, dtype=torch.uint8, pin_memory=pinned)
    into = memory.numpy()
    for place, raw in zip(layout, arrays, strict=True):
        into[place[1] : place[1] + raw.size] = raw
    return Piece(memory, tuple(layout))


_PLAIN = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.float32, torch.float64}
"""What numpy has too."""

"""Assignment of stretches of many tensors to the programs of a kernel, and tables of their addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

__all__ = ["BLOCK", "BlockLayout", "capturing", "is_dense", "sent"]

BLOCK = 2048
"""Elements that a program reads in one operation."""
MOST_PROGRAMS = 1056
"""Programs that write one number each: all run simultaneously, and one program can sum their results."""


@dataclass(frozen=True)
class BlockLayout:
    """Assignment of stretches to programs, the same for all gradients of these shapes.

    ``spare`` is memory for the addresses that a captured graph reads. It is allocated before the capture, because other
    tensors of the graph overwrite memory of the capture at each replay.
    """

    sizes: torch.Tensor
    which: torch.Tensor
    starts: torch.Tensor
    span: int
    spare: list[torch.Tensor]

    @classmethod
    def of(cls, sizes: Sequence[int], device: torch.device, most: int = MOST_PROGRAMS) -> BlockLayout:
        """Return the assignment for tensors of these sizes, to at most ``most`` programs, or one for each tensor."""
        span = BLOCK
        while sum(-(-size // span) for size in sizes) > max(most, len(sizes)):
            span *= 2
        which = np.repeat(np.arange(len(sizes)), [-(-size // span) for size in sizes])
        starts = np.concatenate([np.arange(0, size, span) for size in sizes])
        numbers = np.asarray(sizes)
        return cls(sent(numbers, device), sent(which.astype(np.int32), device), sent(starts, device), span, [])


def capturing(device: torch.device) -> bool:
    """Return True if launches are captured now instead of run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def is_dense(tensor: torch.Tensor) -> bool:
    """Return True if the elements are one stretch of memory, in any order."""
    spans = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    size = 1
    for stride, length in spans:
        if length != 1 and stride != size:
            return False
        size *= length
    return True


def sent(array: Any, device: torch.device) -> torch.Tensor:
    """Return the numbers on the device, without a wait of the host."""
    found = torch.from_numpy(array)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found

"""Which program of a kernel reads which stretch of many tensors, and how it learns where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

__all__ = ["BLOCK", "BlockLayout", "capturing", "is_dense", "sent"]

BLOCK = 2048
"""Elements that a program reads at once."""
MOST_PROGRAMS = 1056
"""Programs that leave a number each: all run at once, and one program can add up what they found."""


@dataclass(frozen=True)
class BlockLayout:
    """Who reads what: the same for all gradients of these shapes.

    ``spare`` is room for the addresses that a captured graph reads. What is allocated during capture shares its memory
    with other tensors of the graph, which overwrite it at each replay; so this room is made before.
    """

    sizes: torch.Tensor
    which: torch.Tensor
    starts: torch.Tensor
    span: int
    spare: list[torch.Tensor]

    @classmethod
    def of(cls, sizes: Sequence[int], device: torch.device, most: int = MOST_PROGRAMS) -> BlockLayout:
        """Return who reads what of tensors of these sizes, by at most so many programs, or one for each tensor."""
        span = BLOCK
        while sum(-(-size // span) for size in sizes) > max(most, len(sizes)):
            span *= 2
        which = np.repeat(np.arange(len(sizes)), [-(-size // span) for size in sizes])
        starts = np.concatenate([np.arange(0, size, span) for size in sizes])
        numbers = np.asarray(sizes)
        return cls(sent(numbers, device), sent(which.astype(np.int32), device), sent(starts, device), span, [])


def capturing(device: torch.device) -> bool:
    """Return whether what is launched now is captured and not run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements are one stretch of memory, in any order."""
    spans = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    size = 1
    for stride, length in spans:
        if length != 1 and stride != size:
            return False
        size *= length
    return True


def sent(array: Any, device: torch.device) -> torch.Tensor:
    """Return the numbers on the device, without making the host wait."""
    found = torch.from_numpy(array)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found

"""Assignment of stretches of many tensors to the programs of a kernel, and tables of their addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

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


class BlockTables:
    """Layouts of kernels over many tensors, and the tables of addresses that the kernels read.

    Args:
        device: device of the tensors.
        rows: addresses of each tensor.
        most: bound of the number of programs.
    """

    def __init__(self, device: torch.device, *, rows: int = 1, most: int = MOST_PROGRAMS) -> None:
        self.device, self.rows, self.most = device, rows, most
        self.layouts: dict[Any, BlockLayout] = {}
        self._pending: list[tuple[BlockLayout, torch.Tensor, np.ndarray]] = []

    def layout(self, sizes: Sequence[int], number: int = 0) -> BlockLayout | None:
        """Return the layout for tensors of these sizes; None in a capture without memory for its table.

        Args:
            number: number of the group of tensors: each has its own memory, even if another has the same sizes.
        """
        layout = self.layouts.get((number, sizes))
        if capturing(self.device):
            return layout if layout is not None and layout.spare else None
        if layout is None:
            layout = self.layouts[number, sizes] = BlockLayout.of(sizes, self.device, self.most)
        if not layout.spare:
            # Memory that is allocated during a capture is shared with other tensors of the graph.
            layout.spare.append(torch.empty(self.rows, len(sizes), dtype=torch.int64, device=self.device))
        return layout

    def table(self, layout: BlockLayout, addresses: np.ndarray) -> torch.Tensor:
        """Return addresses, int64 ``(rows, tensors)``, on the device; in a capture `finish_capture` copies them."""
        if not capturing(self.device):
            return sent(addresses, self.device)
        table = layout.spare.pop()
        self._pending.append((layout, table, addresses))
        return table

    def finish_capture(self) -> object:
        """Complete a capture; keep the returned object as long as the graph is replayed."""
        done, self._pending = self._pending, []
        for layout, table, addresses in done:
            table.copy_(torch.from_numpy(addresses))
            layout.spare.append(torch.empty_like(table))
        return done


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

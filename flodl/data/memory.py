"""Memory limits of a loader: whether a data set fits on the device, and how many batches to prefetch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

FIRST_DEPTH = 4
"""Batches to prefetch for a CUDA device before the size of a batch is known."""

HOST_DEPTH = 2
"""Batches to prefetch if batches stay on the host: one in use and one ready keep the worker busy."""

MAX_DEPTH = 64
"""More batches than this hide no latency and use page-locked memory."""

RESERVE_BYTES = 256 << 20
"""Bytes left free for the fragments of the allocator and the workspaces of libraries."""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a device.

    Attributes:
        total: all bytes.
        used: bytes allocated by any process.
    """

    total: int
    used: int

    @staticmethod
    def of(device: torch.device) -> DeviceMemory | None:
        """Return the memory of a CUDA device now, or None for other devices."""
        if device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total=total, used=total - free)


def clamp_usage(usage: float) -> float:
    """Return the share of the device that may be filled, limited to 0.50 to 0.99."""
    return min(max(float(usage), 0.50), 0.99)


def fits(num_bytes: int, memory: DeviceMemory, usage: float) -> bool:
    """Return whether ``num_bytes`` more fill the device to at most ``usage``."""
    return num_bytes < memory.total * clamp_usage(usage) - memory.used


def prefetch_depth(batch_bytes: int | None, memory: DeviceMemory | None, usage: float) -> int:
    """Return how many batches to prefetch.

    Args:
        batch_bytes: size of a batch, None before the first batch.
        memory: the device's memory, None if batches stay on the host.
        usage: share of the device that may be filled.
    """
    if memory is None:
        return HOST_DEPTH
    if not batch_bytes:
        return FIRST_DEPTH
    free = memory.total * clamp_usage(usage) - memory.used - RESERVE_BYTES
    return int(min(max(free // batch_bytes, 1), MAX_DEPTH))

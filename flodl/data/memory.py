"""How much of a device a loader may take: keep the whole set there, and how many batches ahead.

Pure arithmetic on byte counts, and the one place that asks a device for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["DeviceMemory", "clamp_usage", "fits", "prefetch_depth"]

FIRST_DEPTH = 4
"""Batches ahead on a CUDA device until the size of a batch is known."""

HOST_DEPTH = 2
"""Batches ahead where batches stay on the host: one in use, one ready, and the worker is never idle."""

MAX_DEPTH = 64
"""More batches ahead than this hide no latency and cost page-locked memory."""

RESERVE_BYTES = 256 << 20
"""Left alone when sizing the queue: the allocator's fragments and the libraries' workspaces."""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a device.

    Attributes:
        total: all of it.
        used: taken by anyone.
    """

    total: int
    used: int

    @staticmethod
    def of(device: torch.device) -> DeviceMemory | None:
        """Return the memory of a CUDA device now, or None for a device that shares the host's."""
        if device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total=total, used=total - free)


def clamp_usage(usage: float) -> float:
    """Return the share of the device that may be filled, kept within 0.50 and 0.99."""
    return min(max(float(usage), 0.50), 0.99)


def fits(num_bytes: int, memory: DeviceMemory, usage: float) -> bool:
    """Return whether ``num_bytes`` more leave the device filled to at most ``usage``."""
    return num_bytes < memory.total * clamp_usage(usage) - memory.used


def prefetch_depth(batch_bytes: int | None, memory: DeviceMemory | None, usage: float) -> int:
    """Return how many batches to hold ready.

    Args:
        batch_bytes: size of a batch, None before one was seen.
        memory: the device's memory, None where batches stay on the host.
        usage: share of the device that may be filled.
    """
    if memory is None:
        return HOST_DEPTH
    if not batch_bytes:
        return FIRST_DEPTH
    free = memory.total * clamp_usage(usage) - memory.used - RESERVE_BYTES
    return int(min(max(free // batch_bytes, 1), MAX_DEPTH))

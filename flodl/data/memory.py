"""Memory limits of a loader: whether a data set fits on the device, and how many batches to prefetch."""

from __future__ import annotations

import torch

FIRST_DEPTH = 4
"""Batches to prefetch for a CUDA device before the size of a batch is known."""

HOST_DEPTH = 2
"""Batches to prefetch if batches stay on the host: one in use and one ready keep the worker busy."""

MAX_DEPTH = 64
"""More batches than this hide no latency and use page-locked memory."""

RESERVE_BYTES = 256 << 20
"""Bytes left free for the fragments of the allocator and the workspaces of libraries."""


def device_room(device: torch.device) -> tuple[int, int] | None:
    """Return the free and all bytes of a CUDA device now, or None for other devices."""
    return torch.cuda.mem_get_info(device) if device.type == "cuda" else None


def clamp_usage(usage: float) -> float:
    """Return the share of the device that may be filled, limited to 0.50 to 0.99."""
    return min(max(float(usage), 0.50), 0.99)


def bytes_left(room: tuple[int, int], usage: float) -> float:
    """Return the bytes until a device is filled to ``usage``."""
    free, total = room
    return total * clamp_usage(usage) - (total - free)


def prefetch_depth(batch_bytes: int | None, room: tuple[int, int] | None, usage: float) -> int:
    """Return how many batches to prefetch.

    Args:
        batch_bytes: size of a batch, None before the first batch.
        room: result of `device_room`; None if batches stay on the host.
        usage: share of the device that may be filled.
    """
    if room is None:
        return HOST_DEPTH
    if not batch_bytes:
        return FIRST_DEPTH
    return int(min(max((bytes_left(room, usage) - RESERVE_BYTES) // batch_bytes, 1), MAX_DEPTH))

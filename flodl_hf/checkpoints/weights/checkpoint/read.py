"""Read bytes of a safetensors file into tensors: copied or memory-mapped.

Decides how weights are read. The rule is one copy, straight to its final memory, by vectored reads in
file order on a few threads: a later change of the file cannot affect the model. Mapping the file is the
exception that a caller requests, for files without writers.

Huge pages are not requested: measured, they make a copy three times faster if the system has them
available, and five times slower in a virtual machine if the host must allocate them first.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from .ahead import taken
from .manifest import DTYPES
from .parallel_read import Extent, cut, fill

__all__ = ["Extent", "map_extents", "read_extents", "read_extents_into"]


def read_extents(descriptor: int, where: str, extents: Sequence[Extent]) -> list[Tensor]:
    """Return copies of the tensors at ``extents``, in that order, each in a separate allocation.

    Args:
        descriptor: the open file.
        where: the path for messages.
        extents: which bytes to read; reading is quickest when they are in file order.

    Raises:
        CheckpointError: the file is shorter than its header states.
    """
    ready = taken(descriptor)
    tensors: list[Tensor] = []
    missing: list[int] = []
    for at, extent in enumerate(extents):
        dtype = DTYPES[extent.dtype]
        memory = ready.pop(extent.start, None)
        if memory is not None:
            tensors.append(torch.frombuffer(memory, dtype=dtype).view(extent.shape))
        else:
            tensors.append(torch.empty(extent.shape, dtype=dtype))
            missing.append(at)
    if missing:
        read_extents_into(descriptor, where, [extents[at] for at in missing], [tensors[at] for at in missing])
    return tensors


def map_extents(descriptor: int, where: str, extents: Sequence[Extent]) -> list[Tensor]:
    """Return tensors that map the file, in the order of ``extents``; writing to one copies its pages.

    Pages are read on first use and shared with every process that maps the file. In return
    the file must not change while one of them is alive: overwriting it changes them, truncating it kills the process.

    Raises:
        CheckpointError: the file is shorter than its header states.
    """
    size = os.fstat(descriptor).st_size
    end = max((extent.start + extent.nbytes for extent in extents), default=0)
    if end > size:
        raise cut(where, size, end - size)
    if end == 0:
        return read_extents(descriptor, where, extents)
    mapping = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
    tensors: list[Tensor] = []
    for extent in extents:
        dtype = DTYPES[extent.dtype]
        if extent.nbytes == 0 or extent.start % dtype.itemsize:
            tensors += read_extents(descriptor, where, [extent])  # torch wants numbers at multiples of their size
            continue
        # Each tensor keeps the mapping alive through its own storage, so saving or sharing one of them does
        # not drag its neighbours along.
        count = extent.nbytes // dtype.itemsize
        flat = torch.frombuffer(mapping, dtype=dtype, count=count, offset=extent.start)
        tensors.append(flat.view(extent.shape))
    return tensors


def read_extents_into(descriptor: int, where: str, extents: Sequence[Extent], tensors: Sequence[Tensor]) -> None:
    """Fill ``tensors``, which must be contiguous, on the CPU and of the stored dtype and shape."""
    views = [tensor.detach().reshape(-1).view(torch.uint8).numpy().data for tensor in tensors]
    fill(descriptor, where, extents, views)

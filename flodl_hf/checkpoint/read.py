"""Bytes of a safetensors file into memory that no later change of the file can reach.

Decides how weights are read: copied once, straight to where they stay. A memory map would be quicker to open,
but a file that is later cut kills the process, and one that is overwritten changes the model.

All wanted tensors of a file get one anonymous mapping, each at a multiple of 64 bytes (the alignment that
torch gives its own tensors), and are read into it by scattering reads in file order, on a few threads. Most
of the cost of reading a warm file is the kernel handing out fresh pages, so large mappings ask for huge ones.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from flodl.errors import CheckpointError

from .manifest import DTYPES

__all__ = ["Extent", "read_extents", "read_extents_into"]

_ALIGNMENT = 64
_HUGE_PAGE = 2 << 20
_TASK_BYTES = 16 << 20
_MAX_THREADS = 4
_MAX_VECTORS = 512  # below every system's IOV_MAX (1024 on Linux)


@dataclass(frozen=True, slots=True)
class Extent:
    """Where the bytes of one tensor lie in a file: ``start`` from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def read_extents(
    descriptor: int, where: str, extents: Sequence[Extent], *, separate: bool = False
) -> list[Tensor]:
    """Return the tensors at ``extents``, in that order, in memory of their own.

    Args:
        descriptor: the open file.
        where: the path for messages.
        extents: which bytes to read; reading is quickest when they are in file order.
        separate: give each tensor its own allocation, so that dropping one frees its memory. Otherwise they
            share one mapping, which lives until the last of them is dropped and is quicker to fill.

    Raises:
        CheckpointError: the file has become shorter than its header says.
    """
    if separate or not hasattr(os, "preadv"):
        tensors = [torch.empty(extent.shape, dtype=DTYPES[extent.dtype]) for extent in extents]
        read_extents_into(descriptor, where, extents, tensors)
        return tensors
    offsets: list[int] = []
    total = 0
    for extent in extents:
        offsets.append(total)
        total += -(-extent.nbytes // _ALIGNMENT) * _ALIGNMENT
    if total == 0:
        return [torch.empty(extent.shape, dtype=DTYPES[extent.dtype]) for extent in extents]
    arena = _arena(total)
    window = memoryview(arena)
    views = [window[at : at + extent.nbytes] for at, extent in zip(offsets, extents, strict=True)]
    _fill(descriptor, where, extents, views)
    tensors = []
    for at, extent in zip(offsets, extents, strict=True):
        dtype = DTYPES[extent.dtype]
        if extent.nbytes == 0:
            tensors.append(torch.empty(extent.shape, dtype=dtype))
            continue
        # Each tensor keeps the mapping alive through its own storage, so saving or sharing one of them does
        # not drag its neighbours along.
        flat = torch.frombuffer(arena, dtype=dtype, count=extent.nbytes // dtype.itemsize, offset=at)
        tensors.append(flat.view(extent.shape))
    return tensors


def read_extents_into(
    descriptor: int, where: str, extents: Sequence[Extent], tensors: Sequence[Tensor]
) -> None:
    """Fill ``tensors``, which must be contiguous, on the CPU and of the stored dtype and shape."""
    views = [tensor.detach().reshape(-1).view(torch.uint8).numpy().data for tensor in tensors]
    _fill(descriptor, where, extents, views)


def _arena(nbytes: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes)
    arena = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= 2 * _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages reads the same bytes more slowly
            arena.madvise(mmap.MADV_HUGEPAGE)
    return arena


def _fill(descriptor: int, where: str, extents: Sequence[Extent], views: Sequence[memoryview]) -> None:
    tasks = list(_tasks(extents, views))
    threads = min(_MAX_THREADS, len(tasks), _usable_cpus())
    if threads <= 1:
        for start, targets in tasks:
            _scatter(descriptor, where, start, targets)
        return
    lock = threading.Lock()
    queue = iter(tasks)
    failures: list[BaseException] = []

    def work() -> None:
        while not failures:
            with lock:
                task = next(queue, None)
            if task is None:
                return
            try:
                _scatter(descriptor, where, *task)
            except BaseException as error:
                failures.append(error)

    helpers = [threading.Thread(target=work, name="flodl-read", daemon=True) for _ in range(threads - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    if failures:
        raise failures[0]


def _tasks(extents: Sequence[Extent], views: Sequence[memoryview]) -> Iterable[tuple[int, list[memoryview]]]:
    """Yield runs of neighbouring bytes, none much larger than a task, each with the memory it goes to."""
    start = end = size = 0
    run: list[memoryview] = []
    for extent, view in zip(extents, views, strict=True):
        done = 0
        while done < extent.nbytes:
            at = extent.start + done
            if run and (at != end or size >= _TASK_BYTES or len(run) >= _MAX_VECTORS):
                yield start, run
                run = []
            if not run:
                start, size = at, 0
            part = view[done : done + _TASK_BYTES - size]
            run.append(part)
            done += len(part)
            size += len(part)
            end = at + len(part)
    if run:
        yield start, run


def _scatter(descriptor: int, where: str, start: int, targets: list[memoryview]) -> None:
    position = start
    pending = list(targets)
    while pending:
        count = _read_vectors(descriptor, pending, position)
        if count <= 0:
            raise CheckpointError(
                f"{where}: ends at byte {position:,}, expected {sum(map(len, pending)):,} bytes more; "
                f"the file was cut after it was opened, fetch it again",
                path=where,
                problems=["truncated while reading"],
            )
        position += count
        while pending and count >= len(pending[0]):
            count -= len(pending.pop(0))
        if count:
            pending[0] = pending[0][count:]


def _read_vectors(descriptor: int, targets: list[memoryview], position: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, targets, position)
    os.lseek(descriptor, position, os.SEEK_SET)
    data = os.read(descriptor, len(targets[0]))
    targets[0][: len(data)] = data
    return len(data)


def _usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

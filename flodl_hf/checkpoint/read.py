"""Bytes of a safetensors file into tensors: copied, or shown where they lie.

Decides how weights are read. The rule is one copy, straight to where the tensor stays, by scattering reads in
file order on a few threads: a later change of the file cannot reach the model. Mapping the file is the
exception that a caller asks for, where nobody writes to the file.

Huge pages were measured and are not asked for: they make a copy three times quicker where the system has them
at hand, and five times slower in a virtual machine whose host must find them first.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flodl.errors import CheckpointError
from flodl.system import read_vectors_at

from .manifest import DTYPES

__all__ = ["Extent", "map_extents", "read_extents", "read_extents_into"]

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


def read_extents(descriptor: int, where: str, extents: Sequence[Extent]) -> list[Tensor]:
    """Return copies of the tensors at ``extents``, in that order, each in an allocation of its own.

    Args:
        descriptor: the open file.
        where: the path for messages.
        extents: which bytes to read; reading is quickest when they are in file order.

    Raises:
        CheckpointError: the file has become shorter than its header says.
    """
    tensors = [torch.empty(extent.shape, dtype=DTYPES[extent.dtype]) for extent in extents]
    read_extents_into(descriptor, where, extents, tensors)
    return tensors


def map_extents(descriptor: int, where: str, extents: Sequence[Extent]) -> list[Tensor]:
    """Return tensors that show the file itself, in the order of ``extents``; writing to one copies its pages.

    Nothing is read until it is used, and the pages are shared with every process that maps the file. In return
    the file must not change while one of them lives: overwriting it changes them, cutting it kills the process.

    Raises:
        CheckpointError: the file has become shorter than its header says.
    """
    size = os.fstat(descriptor).st_size
    end = max((extent.start + extent.nbytes for extent in extents), default=0)
    if end > size:
        raise _cut(where, size, end - size)
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
    _fill(descriptor, where, extents, views)


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
        count = read_vectors_at(descriptor, pending, position)
        if count <= 0:
            raise _cut(where, position, sum(map(len, pending)))
        position += count
        while pending and count >= len(pending[0]):
            count -= len(pending.pop(0))
        if count:
            pending[0] = pending[0][count:]


def _usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cut(where: str, position: int, missing: int) -> CheckpointError:
    return CheckpointError(
        f"{where}: ends at byte {position:,}, expected {missing:,} bytes more; "
        f"the file was cut after it was opened, fetch it again",
        path=where,
        problems=["truncated while reading"],
    )

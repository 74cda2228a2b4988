"""Read bytes of a file into given memory, by vectored reads in file order on a few threads; without torch.

Decides the size of a read, and the error for a file that has become shorter.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flodl.errors import CheckpointError
from flodl.system import read_vectors_at

__all__ = ["Extent", "cut", "fill", "usable_cpus"]

TASK_BYTES = 16 << 20
_MAX_THREADS = 4
_MAX_VECTORS = 512  # below every system's IOV_MAX (1024 on Linux)


@dataclass(frozen=True, slots=True)
class Extent:
    """Byte range of one tensor in a file; ``start`` counts from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def fill(
    descriptor: int,
    where: str,
    extents: Sequence[Extent],
    views: Sequence[memoryview],
    *,
    threads: int | None = None,
    task_bytes: int | None = None,
) -> None:
    """Read each extent into its view.

    Args:
        descriptor: the open file.
        where: its path, for messages.
        extents: in file order.
        views: memory of the same sizes.
        threads: most threads at work; None takes a few.
        task_bytes: about how much is read before another thread may continue; None picks a small size.

    Raises:
        CheckpointError: the file has become shorter.
    """
    tasks = list(_tasks(extents, views, task_bytes or TASK_BYTES))
    threads = min(threads or _MAX_THREADS, len(tasks), usable_cpus())
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


def _tasks(extents: Sequence[Extent], views: Sequence[memoryview], most: int) -> Iterable[tuple[int, list[memoryview]]]:
    """Yield runs of neighbouring bytes, none much larger than a task, each with the memory it goes to."""
    start = end = size = 0
    run: list[memoryview] = []
    for extent, view in zip(extents, views, strict=True):
        done = 0
        while done < extent.nbytes:
            at = extent.start + done
            if run and (at != end or size >= most or len(run) >= _MAX_VECTORS):
                yield start, run
                run = []
            if not run:
                start, size = at, 0
            part = view[done : done + most - size]
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
            raise cut(where, position, sum(map(len, pending)))
        position += count
        while pending and count >= len(pending[0]):
            count -= len(pending.pop(0))
        if count:
            pending[0] = pending[0][count:]


def usable_cpus() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cut(where: str, position: int, missing: int) -> CheckpointError:
    """Return the error for a file that ends too early."""
    return CheckpointError(
        f"{where}: ends at byte {position:,}, expected {missing:,} bytes more; "
        f"the file was cut after it was opened, fetch it again",
        path=where,
        problems=["truncated while reading"],
    )

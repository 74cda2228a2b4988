"""Bytes of weight files in memory: read by several threads, for a local folder while torch is imported.

Importing torch takes a second or two of one core. Meanwhile the weights of a local folder are read, and NVIDIA's driver
creates the context of the requested device, which torch then reuses. Errors of this early work are ignored, because the
code that needs the result finds and reports them again. Needs no torch.
"""

from __future__ import annotations

import atexit
import gc
import io
import mmap
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

from flodl.errors import FlodlError
from flodl.safetensors_header import read_header
from flodl.system import read_vectors_at
from flodl_hf.checkpoints.folders import Folder, refused
from flodl_hf.checkpoints.system import make_cuda_context

TASK_BYTES = 16 << 20
_MAX_VECTORS = 512  # below every system's IOV_MAX (1024 on Linux)


@dataclass(frozen=True, slots=True)
class Extent:
    """Byte range of one tensor in a file; ``start`` counts from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def extents_of(header: Any) -> list[Extent]:
    """Return the places of the tensors in a safetensors header, in file order."""
    found = [(name, header.tensors[name]) for name in header.order]
    return [Extent(n, i.dtype, i.shape, header.data_start + i.start, i.end - i.start) for n, i in found]


def fill(
    descriptor: int,
    path: str,
    extents: Sequence[Extent],
    views: Sequence[memoryview],
    *,
    threads: int = 4,
    task_bytes: int | None = None,
) -> None:
    """Read each extent into its view.

    Args:
        descriptor: the open file.
        path: its path, for messages.
        extents: in file order.
        views: memory of the same sizes.
        threads: most threads at work.
        task_bytes: about how much is read before another thread may continue; None picks a small size.

    Raises:
        CheckpointError: the file has become shorter.
    """
    tasks = list(_tasks(extents, views, task_bytes or TASK_BYTES))
    threads = min(threads, len(tasks), usable_cpus())
    if threads <= 1:
        for task in tasks:
            _scatter(descriptor, path, *task)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="flodl-read") as pool:
        list(pool.map(partial(_scatter, descriptor, path), *zip(*tasks, strict=True)))


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


def _scatter(descriptor: int, path: str, start: int, targets: list[memoryview]) -> None:
    position = start
    pending = list(targets)
    while pending:
        count = read_vectors_at(descriptor, pending, position)
        if count <= 0:
            raise cut(path, position, sum(map(len, pending)))
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


def cut(path: str, position: int, missing: int) -> FlodlError:
    """Return the error for a file that ends too early."""
    found, expected = f"ends at byte {position:,}", f"{missing:,} bytes more. It was cut after it was opened"
    return refused(path, found, expected, problems=["truncated while reading"])


FILE = "model.safetensors"
# Larger files take longer than the import, and whether they fit is for the caller to see.
MOST_BYTES = 2 << 30
# Few and large: each is followed by a wait for the interpreter, which imports.
READ_AHEAD_BYTES = 64 << 20

_NOW: ContextVar[_Ahead | None] = ContextVar("_NOW", default=None)


@contextmanager
def prefetched(folder: Any) -> Iterator[None]:
    """Read the weights of a local folder in the background while the context is active.

    Args:
        folder: the caller's argument; ignored unless it is the path of a folder.
    """
    begun = None
    if os.name == "posix":
        with suppress(OSError, ValueError, TypeError):
            path = Path(os.path.expanduser(folder))
            if stat.S_ISREG(os.lstat(path / FILE).st_mode):
                begun = _Ahead(path)
    if begun is None:
        yield
        return
    before = _NOW.set(begun)
    try:
        yield
    finally:
        _NOW.reset(before)
        begun._file, begun._memory = None, {}


def memory_of(descriptor: int) -> dict[int, Any]:
    """Return memory with parts of an open file, keyed by start offset; the caller owns removed entries.

    Args:
        descriptor: the file.
    """
    ahead = _NOW.get()
    return {} if ahead is None else ahead.of(descriptor)


class _Ahead:
    """One file that is being read into memory.

    Args:
        folder: contains the file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: tuple[int, ...] | None = None
        self._memory: dict[int, Any] = {}
        self._thread = Thread(target=self._run, name="flodl-hf-ahead", daemon=True)
        self._thread.start()

    def of(self, descriptor: int) -> dict[int, Any]:
        self._thread.join()
        return self._memory if self._file == _which(descriptor) else {}

    def _run(self) -> None:
        with suppress(FlodlError, OSError, ValueError):
            with Folder(self._folder) as folder:
                descriptor = folder.open(FILE)
            try:
                self._read(descriptor, str(self._folder / FILE))
            finally:
                os.close(descriptor)

    def _read(self, descriptor: int, where: str) -> None:
        file = _which(descriptor)
        if os.fstat(descriptor).st_size > MOST_BYTES:
            return
        extents = [extent for extent in extents_of(read_header(descriptor, name=where)) if extent.nbytes]
        # Each its own, so that letting go of one gives its memory back. Private, so that a fork has its own weights.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = {extent.start: mmap.mmap(-1, extent.nbytes, flags=flags) for extent in extents}
        views = [memoryview(memory[extent.start]) for extent in extents]
        threads = max(1, min(2, usable_cpus() - 1))
        fill(descriptor, where, extents, views, threads=threads, task_bytes=READ_AHEAD_BYTES)
        if _which(descriptor) == file:
            self._file, self._memory = file, memory


def _which(descriptor: int) -> tuple[int, ...]:
    """Return a key that identifies the current version of a file."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


@contextmanager
def prefetching(name_or_path: Any, options: Mapping[str, Any]) -> Iterator[None]:
    """Start the work that is possible before torch, while a model is loaded inside the context.

    Args:
        name_or_path: the model to load.
        options: of loading.
    """
    if "torch" in sys.modules:
        yield
        return
    # If this package is what imports torch, the process skips the last garbage collection too.
    skip_gc_at_exit()
    if usable_cpus() < 2:
        yield
        return
    place = _ordinal(options.get("device"))
    if place is not None and _uses_cuda():
        Thread(target=make_cuda_context, args=(place,), name="flodl-hf-driver", daemon=True).start()
    read = not any(options.get(name) for name in ("mapped", "subfolder", "verified"))
    read = read and options.get("weights") != "disk"
    with prefetched(name_or_path if read else None):
        yield


def _ordinal(device: Any) -> int | None:
    """Return the index of the CUDA device in a device name; None if it names none."""
    kind, _, number = device.partition(":") if isinstance(device, str) else ("", "", "")
    if device == "auto":
        number = os.environ.get("LOCAL_RANK", "0")
    elif kind != "cuda":
        return None
    return int(number or 0) if (number or "0").isdecimal() else None


def _uses_cuda() -> bool:
    """Return whether the torch that is installed would make a context itself."""
    with suppress(ImportError, ValueError):
        found = find_spec("torch")
        if found is not None and found.origin is not None:
            return (Path(found.origin).parent / "lib" / "libtorch_cuda.so").exists()
    return False


_WRITERS = frozenset((io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom))
_FILES = _WRITERS | {io.FileIO, io.BufferedReader}


def skip_gc_at_exit() -> None:
    """Let this process exit without a last garbage collection.

    At exit the interpreter visits all objects several times, which takes a third of the import time of torch if torch
    is loaded. Files that are being written are flushed. If any other object has a ``__del__``, or with
    ``python -X dev`` or ``gc.set_debug``, the process exits as usual.
    """
    # One registration, however many calls.
    atexit.unregister(_freeze_all)
    atexit.register(_freeze_all)


def _freeze_all() -> None:
    alive = gc.get_objects()
    ending = {kind for kind in set(map(type, alive)) if any("__del__" in vars(base) for base in kind.__mro__)}
    if not ending <= _FILES or sys.flags.dev_mode or gc.get_debug():
        return
    streams = (sys.stdin, sys.stdout, sys.stderr)  # the interpreter flushes these
    flushed = {id(part) for one in streams for part in (one, getattr(one, "buffer", None))}
    for one in [found for found in alive if type(found) in _WRITERS and id(found) not in flushed]:
        with suppress(OSError, ValueError):  # closed, or without a descriptor
            if not stat.S_ISREG(os.fstat(one.fileno()).st_mode):
                return  # flushing a pipe may block
            one.flush()
    gc.freeze()

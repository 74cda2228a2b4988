"""Weights read into memory while torch is still being imported.

Importing torch takes several times longer than reading the weights of a base model, and uses one core. If a folder is
requested before torch is imported, its weights are read meanwhile. Nothing is trusted: the header passes the same
checks, and the memory is used only if the file that is opened later is the same file, unchanged. Errors here are
ignored: the code that opens the folder finds and reports them again.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from threading import Thread
from typing import Any

from flodl.errors import FlodlError
from flodl.safetensors_header import read_header

from .parallel_read import Extent, fill, usable_cpus
from .safe_open import Folder

__all__ = ["reading_ahead", "taken"]

FILE = "model.safetensors"
# Larger files take longer than the import, and whether they fit is for the caller to see.
MOST_BYTES = 2 << 30
# Few and large: each is followed by a wait for the interpreter, which imports.
TASK_BYTES = 64 << 20

_NOW: ContextVar[_Ahead | None] = ContextVar("_NOW", default=None)


@contextmanager
def reading_ahead(folder: Any) -> Iterator[None]:
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
        begun.drop()


def taken(descriptor: int) -> dict[int, Any]:
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

    def drop(self) -> None:
        self._file, self._memory = None, {}

    def _run(self) -> None:
        with suppress(FlodlError, OSError, ValueError):
            folder = Folder(self._folder)
            try:
                descriptor = folder.open(FILE)
            finally:
                folder.close()
            try:
                self._read(descriptor)
            finally:
                os.close(descriptor)

    def _read(self, descriptor: int) -> None:
        file = _which(descriptor)
        where = str(self._folder / FILE)
        if os.fstat(descriptor).st_size > MOST_BYTES:
            return
        header = read_header(descriptor, name=where)
        extents = []
        for name in header.order:
            info = header.tensors[name]
            if info.num_bytes:
                extents.append(Extent(name, info.dtype, info.shape, header.data_start + info.start, info.num_bytes))
        # Each its own, so that letting go of one gives its memory back. Private, so that a fork has its own weights.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = {extent.start: mmap.mmap(-1, extent.nbytes, flags=flags) for extent in extents}
        views = [memoryview(memory[extent.start]) for extent in extents]
        threads = max(1, min(2, usable_cpus() - 1))
        fill(descriptor, where, extents, views, threads=threads, task_bytes=TASK_BYTES)
        if _which(descriptor) == file:
            self._file, self._memory = file, memory


def _which(descriptor: int) -> tuple[int, ...]:
    """Return a key that identifies the current version of a file."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

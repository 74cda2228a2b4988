"""A disk that writes down what is done to a folder, in order, and can refuse any single step of it.

Decides what counts as a step: whatever changes files, names or what is durable. Python's own calls are replaced while
the disk is watched, those of threads included; that the record is complete is shown by replaying it, which has to give
the very folder that is there (`flodl_hf.torture.crash`).
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flodl import system

__all__ = ["Disk", "Step"]

_CALLS = (
    "rename", "replace", "unlink", "remove", "rmdir", "mkdir", "open", "close", "write", "fsync", "fdatasync",
    "ftruncate", "truncate",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """One change.

    Attributes:
        kind: "create", "mkdir", "write", "cut", "sync", "rename", "exchange", "unlink" or "rmdir".
        path: where, relative to the folder.
        other: the second name of a rename or exchange.
        offset: of a write, or the length that a file is cut to.
        data: of a write.
    """

    kind: str
    path: str
    other: str = ""
    offset: int = 0
    data: bytes = b""

    def __str__(self) -> str:
        return f"{self.kind} {self.path}{f' -> {self.other}' if self.other else ''}"


class Disk:
    """What is done to the folder ``root`` while it is `watched`.

    Args:
        root: the folder; nothing outside of it is seen.
        fail_at: the number of the step that fails, from 0; None for none.
        fault: the error number that it fails with; 0 has a write take half of what it is given.
        lasting: every later step that needs space fails too, as on a full disk.
        passed_over: relative paths whose steps are written down and neither counted nor refused.

    Attributes:
        steps: what was done.
        refused: the step that failed; None while none did.
        marks: names of moments and how many steps there were before them.
    """

    def __init__(
        self,
        root: Path,
        *,
        fail_at: int | None = None,
        fault: int = errno.EIO,
        lasting: bool = False,
        passed_over: Callable[[str], bool] = lambda path: False,
    ) -> None:
        self.root = os.path.realpath(root)
        self.fail_at, self.fault, self.lasting, self.passed_over = fail_at, fault, lasting, passed_over
        self.steps: list[Step] = []
        self.counted: list[Step] = []
        self.refused: Step | None = None
        self.marks: dict[str, int] = {}
        self._paths: dict[int, str] = {}
        self._lock = threading.RLock()
        self._off = False

    def mark(self, name: str) -> None:
        """Note that a moment has come."""
        self.marks[name] = len(self.steps)

    def mend(self) -> None:
        """Refuse nothing any more."""
        self._off = True

    # ---- steps -----------------------------------------------------------------------------------------

    def inside(self, path: Any, folder: int | None = None) -> str | None:
        """Return a path relative to the folder; None outside of it."""
        if isinstance(path, int):
            return self._paths.get(path)
        text = os.fsdecode(path)
        if folder is not None and not os.path.isabs(text):
            above = self._paths.get(folder)
            if above is None:
                return None
            return os.path.normpath(os.path.join(above, text))
        parent, name = os.path.split(os.path.abspath(text))
        full = os.path.join(os.path.realpath(parent), name)
        if full == self.root:
            return "."
        return full[len(self.root) + 1 :] if full.startswith(self.root + os.sep) else None

    def allow(self, step: Step) -> bool:
        """Count a step that is about to be done; False where only half of it is to be.

        Raises:
            OSError: it is the one that fails.
        """
        if self.passed_over(step.path):
            return True
        with self._lock:
            number = len(self.counted)
            self.counted.append(step)
            hit = number == self.fail_at and not self._off
            again = self.lasting and self.refused is not None and not self._off
            if hit:
                self.refused = step
            if (hit or again) and self.fault == 0:
                return step.kind != "write"
            if hit or (again and step.kind in ("create", "mkdir", "write")):
                raise OSError(self.fault, os.strerror(self.fault), os.path.join(self.root, step.path))
            return True

    def done(self, step: Step) -> None:
        """Write down a step that was done."""
        with self._lock:
            self.steps.append(step)

    # ---- watching --------------------------------------------------------------------------------------

    @contextmanager
    def watched(self) -> Iterator[Disk]:
        """See what is done meanwhile."""
        doors = _Doors(self)
        doors.put()
        try:
            yield self
        finally:
            doors.take_back()


class _Doors:
    """Python's calls that change folders, replaced by ones that tell a disk."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.real: dict[tuple[Any, str], Any] = {}
        self.appending: set[str] = set()

    def put(self) -> None:
        for name in _CALLS:
            self._put(os, name, getattr(self, f"_{name}"))
            for where in (os.supports_dir_fd, os.supports_fd):
                if self.real[os, name] in where:
                    where.add(getattr(os, name))
        self._put(builtins, "open", self._opened)
        self._put(io, "open", self._opened)
        self._put(system, "exchange", self._exchange)
        if hasattr(shutil, "_USE_CP_SENDFILE"):
            self._put(shutil, "_USE_CP_SENDFILE", False)  # copies of files are written where they are seen

    def _put(self, module: Any, name: str, door: Any) -> None:
        self.real[module, name] = getattr(module, name)
        setattr(module, name, door)

    def take_back(self) -> None:
        for (module, name), real in self.real.items():
            for where in (os.supports_dir_fd, os.supports_fd) if module is os else ():
                where.discard(getattr(module, name))
            setattr(module, name, real)

    # ---- names -----------------------------------------------------------------------------------------

    def _step(self, step: Step, real: Callable[..., Any], *given: Any, **options: Any) -> Any:
        self.disk.allow(step)
        with self.disk._lock:
            result = real(*given, **options)
            self.disk.done(step)
        return result

    def _two(self, kind: str, real: Any, source: Any, target: Any, **options: Any) -> Any:
        before = self.disk.inside(source, options.get("src_dir_fd"))
        after = self.disk.inside(target, options.get("dst_dir_fd"))
        if before is None and after is None:
            return real(source, target, **options)
        if before is None or after is None:
            raise AssertionError(f"a name crosses the edge of what is watched: {source} -> {target}")
        return self._step(Step(kind, before, after), real, source, target, **options)

    def _rename(self, source: Any, target: Any, **options: Any) -> Any:
        return self._two("rename", self.real[os, "rename"], source, target, **options)

    def _replace(self, source: Any, target: Any, **options: Any) -> Any:
        return self._two("rename", self.real[os, "replace"], source, target, **options)

    def _exchange(self, source: Any, target: Any) -> Any:
        before, after = self.disk.inside(source), self.disk.inside(target)
        if before is None or after is None:
            return self.real[system, "exchange"](source, target)
        step = Step("exchange", before, after)
        try:
            self.disk.allow(step)
        except OSError as error:
            if error.errno == errno.EXDEV:  # what `flodl.system.exchange` makes of it
                return False
            raise
        with self.disk._lock:
            if self.real[system, "exchange"](source, target):
                self.disk.done(step)
                return True
        return False

    def _one(self, kind: str, name: str, path: Any, *given: Any, **options: Any) -> Any:
        real = self.real[os, name]
        place = self.disk.inside(path, options.get("dir_fd"))
        if place is None:
            return real(path, *given, **options)
        return self._step(Step(kind, place), real, path, *given, **options)

    def _unlink(self, path: Any, **options: Any) -> Any:
        return self._one("unlink", "unlink", path, **options)

    def _remove(self, path: Any, **options: Any) -> Any:
        return self._one("unlink", "remove", path, **options)

    def _rmdir(self, path: Any, **options: Any) -> Any:
        return self._one("rmdir", "rmdir", path, **options)

    def _mkdir(self, path: Any, *given: Any, **options: Any) -> Any:
        return self._one("mkdir", "mkdir", path, *given, **options)

    # ---- descriptors -----------------------------------------------------------------------------------

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        real, place = self.real[os, "open"], self.disk.inside(path, dir_fd)
        if place is None:
            return real(path, flags, mode, dir_fd=dir_fd)
        there = os.path.lexists(os.path.join(self.disk.root, place))
        if flags & os.O_CREAT and not there:
            descriptor = self._step(Step("create", place), real, path, flags, mode, dir_fd=dir_fd)
        elif flags & os.O_TRUNC and there:
            descriptor = self._step(Step("cut", place), real, path, flags, mode, dir_fd=dir_fd)
        else:
            descriptor = real(path, flags, mode, dir_fd=dir_fd)
        self.disk._paths[descriptor] = place
        return descriptor

    def _close(self, descriptor: int) -> None:
        self.disk._paths.pop(descriptor, None)
        self.real[os, "close"](descriptor)

    def _write(self, descriptor: int, data: Any) -> int:
        place = self.disk._paths.get(descriptor)
        if place is None:
            return self.real[os, "write"](descriptor, data)
        return self.written(descriptor, place, data)

    def written(self, descriptor: int, place: str, data: Any) -> int:
        """Write to a file of the folder and write that down."""
        raw = bytes(data)
        whole = self.disk.allow(Step("write", place))
        with self.disk._lock:
            appends = place in self.appending
            offset = os.fstat(descriptor).st_size if appends else os.lseek(descriptor, 0, os.SEEK_CUR)
            count = self.real[os, "write"](descriptor, raw if whole else raw[: max(1, len(raw) // 2)])
            self.disk.done(Step("write", self._now(descriptor, place), "", offset, raw[:count]))
        return count

    def _now(self, descriptor: int, place: str) -> str:
        """Return where an open file is now: it may have been renamed, or be gone."""
        try:
            status = os.fstat(descriptor)
            if os.path.samestat(status, os.lstat(os.path.join(self.disk.root, place))):
                return place
        except OSError:
            pass
        try:
            now = self.disk.inside(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:
            now = None
        return place if now is None else now

    def _fsync(self, descriptor: Any) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        place = self.disk._paths.get(number)
        if place is None:
            return self.real[os, "fsync"](number)
        return self._step(Step("sync", self._now(number, place)), self.real[os, "fsync"], number)

    _fdatasync = _fsync

    def _ftruncate(self, descriptor: int, length: int) -> None:
        place = self.disk._paths.get(descriptor)
        if place is None:
            return self.real[os, "ftruncate"](descriptor, length)
        return self._step(Step("cut", place, "", length), self.real[os, "ftruncate"], descriptor, length)

    def _truncate(self, path: Any, length: int) -> None:
        place = self.disk.inside(path)
        if place is None:
            return self.real[os, "truncate"](path, length)
        return self._step(Step("cut", place, "", length), self.real[os, "truncate"], path, length)

    # ---- files -----------------------------------------------------------------------------------------

    def _opened(
        self, file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None,
        newline: Any = None, closefd: bool = True, opener: Any = None,
    ) -> Any:  # fmt: skip
        place = self.disk.inside(file)
        if place is None or not set(mode) & set("wxa+"):
            given = (file, mode, buffering, encoding, errors, newline, closefd, opener)
            return self.real[builtins, "open"](*given)
        kind = mode.replace("b", "").replace("t", "")
        raw = _Raw(self, file, kind, closefd, opener, place)
        if buffering == 0:
            return raw
        size = io.DEFAULT_BUFFER_SIZE if buffering < 2 else buffering
        stream: Any = io.BufferedRandom(raw, size) if "+" in mode else io.BufferedWriter(raw, size)
        return stream if "b" in mode else io.TextIOWrapper(stream, encoding or "utf-8", errors, newline)


class _Raw(io.FileIO):
    """A file of the folder whose writes are told."""

    def __init__(self, doors: _Doors, file: Any, mode: str, closefd: bool, opener: Any, place: str) -> None:
        self._doors, self._place = doors, place
        if isinstance(file, int):
            super().__init__(file, mode, closefd)
        else:
            super().__init__(os.fspath(file), mode, True, opener or partial(doors._open, mode=0o666))
        doors.disk._paths[self.fileno()] = place
        if "a" in mode:
            doors.appending.add(place)

    def write(self, data: Any) -> int:
        """Write to the file."""
        if memoryview(data).nbytes == 0:
            return 0
        return self._doors.written(self.fileno(), self._place, data)

    def truncate(self, size: int | None = None) -> int:
        """Cut the file."""
        length = self.tell() if size is None else size
        self._doors._ftruncate(self.fileno(), length)
        return length

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._doors.disk._paths.pop(self.fileno(), None)
        super().close()

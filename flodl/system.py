"""What operating systems offer in different ways: reading at a place, locks that die with their process, syncing.

Everything else in these packages is the same everywhere. Where a system has no such thing, the way it is done without
is slower or promises less, and its docstring says what.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence

__all__ = [
    "die_with_parent",
    "exchange",
    "hard_stop",
    "is_stopped",
    "lock",
    "loopback",
    "make_cuda_context",
    "process_lock",
    "process_state",
    "read_at",
    "read_vectors_at",
    "sync_folder",
]

_PR_SET_PDEATHSIG = 1
_RENAME_EXCHANGE = 2  # linux/fs.h
_AT_FDCWD = -100  # linux/fcntl.h
_CANNOT_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM, errno.EXDEV)
_MOVING = threading.Lock()
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM, errno.EISDIR)


def read_at(descriptor: int, length: int, position: int) -> bytes:
    """Return up to ``length`` bytes of a file from a place; from several threads at once."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, length, position)
    with _MOVING:
        os.lseek(descriptor, position, os.SEEK_SET)
        return os.read(descriptor, length)


def read_vectors_at(descriptor: int, targets: Sequence[memoryview], position: int) -> int:
    """Fill memory from a file, one target after the other; return how many bytes were there, perhaps fewer than fit."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, targets, position)
    data = read_at(descriptor, len(targets[0]), position)
    targets[0][: len(data)] = data
    return len(data)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Have the names in a folder written to disk; nothing happens where folders cannot be opened or synced.

    Raises:
        OSError: the disk reports a fault.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder; an I/O error of the disk must be heard.
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)


def exchange(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> bool:
    """Exchange two names in one step; False where the system or the file system cannot, and nothing happened.

    Raises:
        OSError: the file system can and refuses.
    """
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    if renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(target))


def lock(descriptor: int, *, wait: bool = False) -> bool:
    """Return whether an open file could be locked for this process alone; the system frees it with the process.

    Where there are no locks nothing is locked, and the answer is yes.
    """
    try:
        import fcntl
    except ImportError:
        return _lock_without_fcntl(descriptor, wait)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _lock_without_fcntl(descriptor: int, wait: bool) -> bool:
    try:
        import msvcrt
    except ImportError:
        return True
    try:
        os.lseek(descriptor, 0, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    except OSError:
        return False
    return True


@contextlib.contextmanager
def process_lock(descriptor: int) -> Iterator[None]:
    """Keep other processes waiting that take this lock of the same file; it goes with a process that ends.

    Unlike `lock` it holds between processes that inherited one descriptor, and not between threads. Systems without
    such locks keep nobody waiting.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    fcntl.lockf(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.lockf(descriptor, fcntl.LOCK_UN)


def hard_stop() -> int:
    """Return the signal that ends a process which does not listen."""
    return getattr(signal, "SIGKILL", signal.SIGTERM)


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends; only Linux can.

    Elsewhere a rank's pulse notices within a second that its parent is gone.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, hard_stop(), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def process_state(pid: int) -> str | None:
    """Return the kernel's letter for what a process does ("R", "S", "T", "Z", ...); None if there is none.

    Only Linux tells; elsewhere every process runs ("R").
    """
    if not os.path.isdir("/proc/self"):
        return "R"
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return None


def is_stopped(pid: int) -> bool:
    """Return whether a process was stopped, as by SIGSTOP; only Linux tells, elsewhere the answer is no."""
    return process_state(pid) in ("T", "t")


def loopback() -> str | None:
    """Return what this system calls the network interface that leads to itself; None where it has no such name."""
    return {"linux": "lo", "darwin": "lo0"}.get(sys.platform)


def make_cuda_context(place: int) -> None:
    """Have NVIDIA's driver make a device's primary context, which all libraries of a process share; if it can.

    Args:
        place: which of the devices that this process sees.
    """
    with contextlib.suppress(OSError, AttributeError):
        # As torch sets it before its first call of the driver: kernels are loaded when they are used.
        os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
        driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), place) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)

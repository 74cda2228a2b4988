"""Functions that differ between operating systems: positioned reads, file locks, syncing, processes.

On systems without a function there is a slower or weaker replacement, described in its docstring.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import sys
import threading
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_SEEK_LOCK = threading.Lock()
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM, errno.EISDIR)


def read_at(descriptor: int, length: int, position: int) -> bytes:
    """Return up to ``length`` bytes of a file from a position; safe in several threads."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, length, position)
    with _SEEK_LOCK:
        os.lseek(descriptor, position, os.SEEK_SET)
        return os.read(descriptor, length)


def read_vectors_at(descriptor: int, targets: Sequence[memoryview], position: int) -> int:
    """Read from a position into several buffers in order; return the number of bytes, possibly fewer than fit."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, targets, position)
    data = read_at(descriptor, len(targets[0]), position)
    targets[0][: len(data)] = data
    return len(data)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Sync the names in a folder to disk; without effect if folders cannot be opened or synced.

    Raises:
        OSError: the disk reports an error.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder; an I/O error of the disk must be reported.
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)


def lock(descriptor: int, *, wait: bool = False) -> bool:
    """Lock an open file for this process and return whether that succeeded; the lock ends with the process.

    Always True on systems without ``fcntl``.
    """
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def hard_stop() -> int:
    """Return the signal that ends a process which ignores others."""
    return getattr(signal, "SIGKILL", signal.SIGTERM)


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent thread ends, on Linux.

    On other systems a rank detects the end of its parent within a second.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, hard_stop(), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def process_state(pid: int) -> str | None:
    """Return the state of a process as the kernel's letter ("R", "S", "T", ...), or None.

    Always "R" on systems other than Linux.
    """
    if not os.path.isdir("/proc/self"):
        return "R"
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return None


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, as by SIGSTOP; always False on systems other than Linux."""
    return process_state(pid) in ("T", "t")


def loopback() -> str | None:
    """Return the name of the loopback network interface, or None if unknown."""
    return {"linux": "lo", "darwin": "lo0"}.get(sys.platform)

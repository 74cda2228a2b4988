"""Functions of operating systems (exchange of names, locks, CUDA contexts), and the version. Needs no torch."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator

_RENAME_EXCHANGE = 2  # linux/fs.h
_AT_FDCWD = -100  # linux/fcntl.h
_CANNOT_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM, errno.EXDEV)


def exchange(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> bool:
    """Exchange two names in one step; False if the system or the file system cannot, without any change.

    Raises:
        OSError: the file system supports it and refuses.
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


@contextlib.contextmanager
def process_lock(descriptor: int) -> Iterator[None]:
    """Exclude other processes that take this lock of the same file; it ends with the process.

    It works between processes that inherited one descriptor, and not between threads. Without effect on systems
    without such locks.
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


def make_cuda_context(ordinal: int) -> None:
    """Create the primary context of a CUDA device, which all libraries of a process share; without effect if absent.

    Args:
        ordinal: index among the devices that this process sees.
    """
    with contextlib.suppress(OSError, AttributeError):
        # As torch sets it before its first call of the driver: kernels are loaded on first use.
        os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
        driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), ordinal) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def own_version() -> str:
    """Return this package's version, or that it runs from a checkout."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("flodl-hf")
    except PackageNotFoundError:
        return "not installed"

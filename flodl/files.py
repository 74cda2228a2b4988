"""Opening files that may be hostile, and writing files that are never half there.

Decides how a path becomes a descriptor (regular files only, opened without waiting) and how
bytes become a file (a temporary sibling, synced, then renamed over the target). What the bytes
mean is left to the callers; a whole folder published at once is the export room's matter.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from flodl.errors import CheckpointError, printable
from flodl.system import lock, sync_folder

__all__ = [
    "POINTER_ADVICE",
    "is_pointer",
    "make_folders",
    "open_regular",
    "read_regular",
    "write_atomically",
]

_POINTER = b"version https://git-lfs.github.com/spec/"
POINTER_ADVICE = "found a git-lfs pointer, expected the file it stands for; run `git lfs pull` in its folder"


def is_pointer(beginning: bytes) -> bool:
    """Return whether a file that begins so is a git-lfs pointer: a few lines of text that stand for a large file."""
    return beginning.startswith(_POINTER)


def open_regular(path: str | os.PathLike[str]) -> int:
    """Return a read-only descriptor of the regular file at ``path``; the caller closes it.

    Symbolic links are followed, because download caches are made of them; a caller that must stay
    inside a folder resolves the path first. The descriptor is opened without waiting, so a named
    pipe is refused instead of hanging.

    Raises:
        CheckpointError: nothing there, not readable, or not a regular file.
    """
    shown = printable(os.fspath(path), 400)
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CheckpointError(
            f"{shown}: cannot be opened ({reason}); expected a readable file; check the path.",
            path=os.fspath(path),
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(
            f"{shown}: is a folder, pipe, socket or device; expected a regular file; pass the file itself.",
            path=os.fspath(path),
        )
    return descriptor


def read_regular(path: str | os.PathLike[str], limit: int = 1 << 28) -> bytes:
    """Return what a regular file of at most ``limit`` bytes holds; a pipe is refused instead of waited for.

    Raises:
        OSError: nothing there, not readable, not a regular file, or larger.
    """
    try:
        descriptor = open_regular(path)
    except CheckpointError as fault:
        if isinstance(fault.__cause__, OSError):
            raise fault.__cause__ from None
        raise OSError(errno.EINVAL, "is no regular file", os.fspath(path)) from None
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"is larger than {limit:,} bytes", os.fspath(path))
    return data


def write_atomically(path: str | os.PathLike[str], chunks: Iterable[bytes | memoryview]) -> None:
    """Write ``chunks`` to ``path`` so that a reader sees the old file or the whole new one.

    The bytes go to a temporary sibling, are synced to disk, and the sibling is renamed over the
    target; then the folder is synced. A file that was there keeps its permission bits, a new one
    gets those of the process's umask. When anything fails the sibling is removed and the target is
    as it was; where the very last step fails, the syncing of its name, it is the new one, which a power
    loss may take back.

    Raises:
        OSError: the folder is missing or not writable, or the disk is full or at fault.
        Exception: whatever producing ``chunks`` raised.
    """
    target = Path(path)
    descriptor, sibling = _new_sibling(target)
    try:
        with os.fdopen(descriptor, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            if target.is_file() and hasattr(os, "fchmod"):
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            os.fsync(file.fileno())
            if os.name != "nt":  # while it is locked; Windows renames no open file
                os.replace(sibling, target)
        if os.name == "nt":
            os.replace(sibling, target)
    except BaseException:
        with contextlib.suppress(OSError):  # what went wrong first is what is told
            sibling.unlink(missing_ok=True)
        raise
    # The rename itself lasts only once the folder is on disk; the file is whole either way.
    sync_folder(target.parent)


def _new_sibling(target: Path) -> tuple[int, Path]:
    """Return a new file beside ``target``, locked while it is open.

    Its name is the same each time, so that one which a kill left is found and used no more than once; a writer that
    meets a living one takes another name.
    """
    name = f".{target.name[:200]}.tmp"
    for turn in range(100):
        sibling = target.with_name(name if turn < 3 else f".{target.name[:200]}.{os.urandom(6).hex()}.tmp")
        try:
            descriptor = os.open(sibling, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        except FileExistsError:
            _remove_left(sibling)
            continue
        # Until it was locked, another writer may have taken it for one that was left.
        if lock(descriptor) and _is_at(descriptor, sibling):
            return descriptor, sibling
        os.close(descriptor)
    raise FileExistsError(errno.EEXIST, "no name is free for a file beside it", os.fspath(target))


def _remove_left(sibling: Path) -> None:
    """Remove a file beside a target that nobody writes to any more."""
    with contextlib.suppress(OSError):
        descriptor = os.open(sibling, os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        try:
            if lock(descriptor) and _is_at(descriptor, sibling):
                os.unlink(sibling)
        finally:
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file still has a name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except OSError:
        return False


def make_folders(path: str | os.PathLike[str]) -> list[Path]:
    """Make a folder and those above it that are missing, so that they last; return them, the deepest first.

    Raises:
        OSError: one cannot be made, or its name not be synced; none that was made is left then.
    """
    folder = Path(path)
    made: list[Path] = []
    try:
        for place in reversed([folder, *folder.parents]):
            if place.is_dir():
                continue
            try:
                place.mkdir()
            except FileExistsError:
                if not place.is_dir():
                    raise
                continue
            made.insert(0, place)
            sync_folder(place.parent)
    except BaseException:
        for place in made:
            with contextlib.suppress(OSError):
                place.rmdir()
        raise
    return made

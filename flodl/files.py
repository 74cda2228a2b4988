"""Opening untrusted files, writing files atomically, and JSON files with a checksum."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from flodl.errors import CheckpointError, printable
from flodl.system import lock, sync_folder

_POINTER = b"version https://git-lfs.github.com/spec/"
POINTER_ADVICE = "found a git-lfs pointer, expected the file itself. Run `git lfs pull` in its folder."


def is_pointer(beginning: bytes) -> bool:
    """Return whether a file with this beginning is a git-lfs pointer."""
    return beginning.startswith(_POINTER)


def open_regular(path: str | os.PathLike[str]) -> int:
    """Return a read-only descriptor of a regular file; the caller closes it.

    Symbolic links are followed, because download caches consist of them. The file is opened without blocking, so
    that a named pipe is refused instead of waited for.

    Raises:
        CheckpointError: absent, not readable, or not a regular file.
    """
    shown = printable(os.fspath(path), 400)
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CheckpointError(
            f"{shown}: cannot be opened ({reason}), expected a readable file. Check the path.",
            path=os.fspath(path),
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(
            f"{shown}: found a folder, pipe, socket or device, expected a regular file. Pass the file itself.",
            path=os.fspath(path),
        )
    return descriptor


def read_regular(path: str | os.PathLike[str], limit: int = 1 << 28) -> bytes:
    """Return the bytes of a regular file of at most ``limit`` bytes.

    Raises:
        OSError: absent, not readable, not a regular file, or larger.
    """
    try:
        descriptor = open_regular(path)
    except CheckpointError as fault:
        if isinstance(fault.__cause__, OSError):
            raise fault.__cause__ from None
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path)) from None
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit:,} bytes", os.fspath(path))
    return data


def write_atomically(path: str | os.PathLike[str], chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file atomically: a reader sees the old file or the complete new one.

    The bytes are written to a temporary file in the same folder and synced, then it is renamed to ``path`` and the
    folder is synced. An existing file keeps its permission bits, a new one follows the umask. After an error
    the temporary file is removed and the target is unchanged, unless only the last sync failed.

    Raises:
        OSError: the folder is missing or not writable, or the disk is full or faulty.
        Exception: raised while ``chunks`` were produced.
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
            if os.name != "nt":  # while it is locked; Windows cannot rename an open file
                os.replace(sibling, target)
        if os.name == "nt":
            os.replace(sibling, target)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is reported
            sibling.unlink(missing_ok=True)
        raise
    # The rename is durable only after the folder is synced.
    sync_folder(target.parent)


def _new_sibling(target: Path) -> tuple[int, Path]:
    """Return a new temporary file in the folder of ``target``, locked while it is open.

    The name is fixed, so that a file left by a killed process is found and replaced; a writer that finds one in use
    takes another name.
    """
    name = f".{target.name[:200]}.tmp"
    for turn in range(100):
        sibling = target.with_name(name if turn < 3 else f".{target.name[:200]}.{os.urandom(6).hex()}.tmp")
        try:
            descriptor = os.open(sibling, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        except FileExistsError:
            _remove_left(sibling)
            continue
        # Before it was locked, another writer may have removed it as left over.
        if lock(descriptor) and _is_at(descriptor, sibling):
            return descriptor, sibling
        os.close(descriptor)
    raise FileExistsError(errno.EEXIST, "no free name for a temporary file", os.fspath(target))


def _remove_left(sibling: Path) -> None:
    """Remove a temporary file of a process that has ended."""
    with contextlib.suppress(OSError):
        descriptor = os.open(sibling, os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        try:
            if lock(descriptor) and _is_at(descriptor, sibling):
                os.unlink(sibling)
        finally:
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file still has this path."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except OSError:
        return False


def make_folders(path: str | os.PathLike[str]) -> list[Path]:
    """Create a folder and its missing parents, synced to disk; return the created ones, the deepest first.

    Raises:
        OSError: a folder cannot be created or synced; created ones are removed again.
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


SEAL = "seal"


def seal(value: Mapping[str, Any]) -> bytes:
    """Return a mapping as JSON with a checksum as its last key.

    Raises:
        TypeError: a value that JSON cannot represent.
    """
    text = json.dumps({**value})
    return json.dumps({**json.loads(text), SEAL: _digest(json.loads(text))}, indent=1).encode()


def unseal(data: bytes, before: Collection[str] | None = None) -> dict[str, Any]:
    """Return the values of a sealed file, without its seal.

    Args:
        data: the file.
        before: the exact keys of files written before seals existed, which are accepted; None if there are none.

    Raises:
        ValueError: not a JSON object, or the seal does not match the values.
    """
    try:
        value = json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"found {type(value).__name__}, expected a JSON object")
    if before is not None and value.keys() == set(before):
        return value
    found = value.pop(SEAL, None)
    if found is None:
        raise ValueError("found no seal")
    if found != _digest(value):
        raise ValueError("checksum mismatch: the file was modified or truncated")
    return value


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

"""Checks of paths before anything is read or written: files to read, files and folders to write."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from flodl.errors import DataError, nearest

MAX_NAME_BYTES = 255  # of one segment of a path, on every usual file system


def path_fault(path: str | os.PathLike[str]) -> str | None:
    """Return why no file can have this path, as half a sentence; None if one can."""
    text = os.fspath(path)
    if not isinstance(text, str):
        return "it is bytes, not text"
    if "\0" in text:
        return "it contains a NUL character"
    try:
        sizes = [len(os.fsencode(part)) for part in Path(text).parts]
    except UnicodeEncodeError:
        return "it contains a lone surrogate"
    if max(sizes, default=0) > MAX_NAME_BYTES:
        return f"a name in it has {max(sizes):,} bytes, more than {MAX_NAME_BYTES}"
    for parent in Path(text).absolute().parents:
        if os.path.lexists(parent):
            return None if os.path.isdir(parent) else f"{parent} is not a folder"
    return None


def expect_file(path: str | os.PathLike[str]) -> None:
    """Raise if a path is not a file that can be read again; the error names similar files.

    Raises:
        DataError: nothing exists there, or a folder, a pipe or a device.
    """
    if os.path.isfile(path):  # False for impossible paths, for which Path.is_file raises
        return
    if os.path.exists(path) and not os.path.isdir(path):
        found = "found a pipe or a device, expected a file that can be read again. Write it to a file first."
        raise DataError(f"{os.fspath(path)}: {found}", path=os.fspath(path))
    folder, name = (path, "") if os.path.isdir(path) else os.path.split(path)
    folder = folder or os.curdir
    names: list[str] = []
    with contextlib.suppress(OSError, ValueError), os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_file())
    near = nearest(name, names).removeprefix(", did you mean ").removesuffix("?") if name else ""
    has = near or (f"{names[:5]}" if names else "no files")
    if not name:
        found = f"is a folder with {has}"
    elif os.path.isdir(folder):
        found = f"no such file; the folder has {has}"
    else:
        found = "no such file; its folder does not exist either"
    raise DataError(f"{os.fspath(path)}: {found}, expected a file. Correct the path.", path=os.fspath(path))


def expect_writable(path: str | os.PathLike[str]) -> None:
    """Raise if an output could not be written; tested with a temporary file without a name.

    Args:
        path: the file or folder to write; folders above it may be missing.

    Raises:
        DataError: the nearest existing folder above it is not writable.
    """
    folder = os.path.abspath(path)
    while not os.path.isdir(folder) and os.path.dirname(folder) != folder:
        if os.path.lexists(folder) and folder != os.path.abspath(path):
            raise DataError(f"{os.fspath(path)}: {folder} is a file, expected a folder to write into", path=folder)
        folder = os.path.dirname(folder)
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as fault:
        raise DataError(
            f"{os.fspath(path)}: cannot write in {folder} ({fault.strerror or fault}), expected a writable folder. "
            "Check its permissions, or name another output.",
            path=folder,
        ) from None

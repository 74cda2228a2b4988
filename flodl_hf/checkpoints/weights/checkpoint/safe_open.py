"""Safe access to the files of a folder: plain names, regular files, open descriptors.

A checkpoint folder is untrusted. Its index can name any path, and its entries can be links, pipes or
devices. A member is opened without blocking and checked on the open descriptor, so nothing changes between
the check and the read; the folder itself stays open, so a folder replaced meanwhile is not mixed with its
successor.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from flodl.errors import CheckpointError, FlodlError, UnsafeFileError, printable

_NONBLOCK = getattr(os, "O_NONBLOCK", 0)  # a pipe without a writer would hang a blocking open for ever
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_DIRECTORY = getattr(os, "O_DIRECTORY", 0)
_BINARY = getattr(os, "O_BINARY", 0)
_CLOEXEC = getattr(os, "O_CLOEXEC", 0)
_NAME_LIMIT = 255


def plain_name_fault(name: object) -> str | None:
    """Return the fault of ``name`` as the name of a sibling file, or None if it is valid."""
    if not isinstance(name, str):
        return f"{type(name).__name__} instead of a text"
    if not name or name in (".", ".."):
        return "not the name of a file"
    if len(name) > _NAME_LIMIT:
        return f"{len(name)} characters, more than {_NAME_LIMIT}"
    if not name.isprintable() or not name.isascii():
        return "characters other than printable ASCII"
    if any(mark in name for mark in '/\\:%*?"<>|'):
        return "a separator, drive or escape character"
    return None


def is_entry(folder: Path, name: str) -> bool:
    """Return whether a folder has an entry of that name, of whatever kind; a broken link is one."""
    return os.path.lexists(folder / name)


def inside(folder: str | os.PathLike[str], name: str) -> Path:
    """Return a folder below another.

    Raises:
        UnsafeFileError: it leads out of that folder.
    """
    home = Path(folder)
    below = home / name
    if name and not below.resolve().is_relative_to(home.resolve()):
        raise UnsafeFileError(
            f"{below}: leads to {below.resolve()}, outside the folder; copy its files into the folder",
            path=str(below),
            problems=[f"link to {below.resolve()}"],
            target=str(below.resolve()),
        )
    return below


def read_member(folder: Path, name: str, limit: int, fault: type[FlodlError] = CheckpointError) -> bytes:
    """Return the bytes of one file of a folder, with the same checks as for weights; see `Folder.open`.

    Args:
        folder: the folder.
        name: a plain name, or one in a folder below: ``1_Pooling/config.json``.
        limit: most bytes.
        fault: raised if a file is absent, cannot be read, is larger, or is a pipe, device, socket or
            folder.

    Raises:
        UnsafeFileError: the file is a link out of the folder.
    """
    inner, _, leaf = name.rpartition("/")
    try:
        with Folder(inside(folder, inner)) as opened:
            return opened.read(leaf, limit)
    except CheckpointError as error:
        if "target" in error.details:
            raise
        where = str(folder / name)
        raise fault(error.message, path=where, where=where, problems=error.problems) from None


def _refused(path: Path, problem: str, expected: str, kind: type[CheckpointError] = CheckpointError) -> CheckpointError:
    return kind(f"{path}: found {problem}, expected {expected}", path=str(path), problems=[problem])


class Folder:
    """An open folder; its files are opened relative to its descriptor and not by path.

    Args:
        path: the folder; it may itself be a link.

    Raises:
        CheckpointError: ``path`` is not a folder or cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._descriptor: int | None = None
        if not self.path.is_dir():
            found = "a file" if self.path.exists() else "nothing"
            raise _refused(self.path, found, "a folder with weights; give the folder that contains model.safetensors")
        if _DIRECTORY and os.open in os.supports_dir_fd:
            try:
                self._descriptor = os.open(self.path, os.O_RDONLY | _DIRECTORY | _CLOEXEC)
            except OSError as error:
                raise _refused(self.path, str(error.strerror), "a folder that may be read") from error

    def close(self) -> None:
        """Release the folder; closing twice is harmless."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def has(self, name: str) -> bool:
        """Return whether there is an entry of that name, of whatever kind, a broken link included."""
        place = self.path / name if self._descriptor is None else name
        try:
            os.stat(place, dir_fd=self._descriptor, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def open(self, name: str) -> int:
        """Return a descriptor of the regular file ``name``, opened for reading.

        Raises:
            UnsafeFileError: the name leads out of the folder, or the entry is a pipe, device, socket or
                folder.
            CheckpointError: there is no such file, or it may not be read.
        """
        if (fault := plain_name_fault(name)) is not None:
            expected = "the plain name of a file in the same folder; do not use this folder unless you know who made it"
            raise _refused(self.path, f"the file name {printable(str(name))}, {fault}", expected, UnsafeFileError)
        where = self.path / name
        try:
            descriptor = self._open_entry(name)
        except OSError as error:
            found = {errno.ENOENT: "no such file", errno.ENXIO: "a socket or a pipe"}.get(error.errno or 0)
            found = error.strerror if found is None or error.filename is None else found
            expected = "a file that can be read; complete the download or the copy of the folder"
            raise _refused(where, str(found or type(error).__name__), expected) from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            expected = "a regular file; replace it by the file itself"
            raise _refused(where, "a folder, pipe, socket or device", expected, UnsafeFileError)
        return descriptor

    def read(self, name: str, limit: int) -> bytes:
        """Return the bytes of the member ``name``, refused above ``limit``; errors as of `open`."""
        with os.fdopen(self.open(name), "rb") as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise _refused(self.path / name, "a larger file", f"at most {limit:,} bytes; check the file")
        return data

    def _open_entry(self, name: str) -> int:
        flags = os.O_RDONLY | _NONBLOCK | _CLOEXEC | _BINARY
        if self._descriptor is None:
            path = self.path / name
            return os.open(self._follow(name) if path.is_symlink() else path, flags)
        try:
            return os.open(name, flags | _NOFOLLOW, dir_fd=self._descriptor)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EMLINK):
                raise
        return os.open(self._follow(name), flags)

    def _follow(self, name: str) -> Path:
        """Return where the link ``name`` leads, if inside the folder or in the blobs of its Hub cache."""
        link = self.path / name
        try:
            target = link.resolve(strict=True)
        except (FileNotFoundError, NotADirectoryError):
            raise OSError(errno.ENOENT, f"a link to {os.readlink(link)}, where nothing is") from None
        except (OSError, RuntimeError):
            raise OSError(errno.ELOOP, "a link that leads to itself") from None
        # The Hub cache: <repo>/snapshots/<revision>/[subfolder/]file -> <repo>/blobs/<hash>.
        home = self.path.resolve()
        blobs = [(above.parent / "blobs").resolve() for above in home.parents if above.name == "snapshots"]
        if target.is_relative_to(home) or target.parent in blobs:
            return target
        raise UnsafeFileError(
            f"{link}: is a link to {target}, outside the folder; expected a file of the folder, or of "
            f"the adjacent blobs of a Hub cache; copy the file into the folder",
            path=str(link),
            problems=[f"link to {target}"],
            target=str(target),
        )

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
    below = inside(folder, inner)
    try:
        opened = Folder(below)
        try:
            return opened.read(leaf, limit)
        finally:
            opened.close()
    except CheckpointError as error:
        if "target" in error.details:
            raise
        where = str(folder / name)
        raise fault(error.message, path=where, where=where, problems=error.problems) from None


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
            raise CheckpointError(
                f"{self.path}: found {'a file' if self.path.exists() else 'nothing'}, expected a folder with "
                f"weights; give the folder that contains model.safetensors",
                path=str(self.path),
                problems=["not a folder"],
            )
        if _DIRECTORY and os.open in os.supports_dir_fd:
            try:
                self._descriptor = os.open(self.path, os.O_RDONLY | _DIRECTORY | _CLOEXEC)
            except OSError as error:
                raise CheckpointError(
                    f"{self.path}: cannot be opened ({error.strerror}); check that it may be read",
                    path=str(self.path),
                    problems=[str(error)],
                ) from error

    def close(self) -> None:
        """Release the folder; closing twice is harmless."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def has(self, name: str) -> bool:
        """Return whether there is an entry of that name, of whatever kind, a broken link included."""
        try:
            if self._descriptor is None:
                os.lstat(self.path / name)
            else:
                os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
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
        where = self.path / printable(name)[1:-1]
        fault = plain_name_fault(name)
        if fault is not None:
            raise UnsafeFileError(
                f"{self.path}: names the file {printable(str(name))}, which is {fault}; "
                f"expected the plain name of a file in the same folder; "
                f"do not use this folder unless you know who made it",
                path=str(self.path),
                problems=[f"{printable(str(name))}: {fault}"],
            )
        try:
            descriptor = self._open_entry(name)
        except OSError as error:
            raise CheckpointError(
                f"{where}: found {_found(error)}, expected a file that can be read; "
                f"complete the download or the copy of the folder",
                path=str(where),
                problems=[_found(error)],
            ) from error
        kind = _kind(os.fstat(descriptor).st_mode)
        if kind != "a regular file":
            os.close(descriptor)
            raise UnsafeFileError(
                f"{where}: found {kind}, expected a regular file; replace it by the file itself",
                path=str(where),
                problems=[kind],
            )
        return descriptor

    def read(self, name: str, limit: int) -> bytes:
        """Return the bytes of the member ``name``, refused above ``limit``; errors as of `open`."""
        where = self.path / name
        descriptor = self.open(name)
        with os.fdopen(descriptor, "rb") as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise CheckpointError(
                f"{where}: larger than {limit:,} bytes, expected a smaller file of this kind; check the file",
                path=str(where),
                problems=["too large"],
            )
        return data

    def read_text(self, name: str, limit: int) -> str:
        """Return the UTF-8 text of the member ``name``, refused above ``limit`` bytes."""
        where = self.path / name
        data = self.read(name, limit)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{where}: byte {error.start} is not UTF-8; expected a text; fetch the file again",
                path=str(where),
                problems=["not UTF-8"],
            ) from error

    def _open_entry(self, name: str) -> int:
        flags = os.O_RDONLY | _NONBLOCK | _NOFOLLOW | _CLOEXEC | _BINARY
        try:
            if self._descriptor is None:
                if (self.path / name).is_symlink():
                    raise OSError(errno.ELOOP, "symbolic link")
                return os.open(self.path / name, flags)
            return os.open(name, flags, dir_fd=self._descriptor)
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
        home = self.path.resolve()
        if target.is_relative_to(home):
            return target
        for ancestor in home.parents:
            # The Hub cache: <repo>/snapshots/<revision>/[subfolder/]file -> <repo>/blobs/<hash>.
            if ancestor.name == "snapshots" and target.parent == (ancestor.parent / "blobs").resolve():
                return target
        raise UnsafeFileError(
            f"{link}: is a link to {target}, outside the folder; expected a file of the folder, or of "
            f"the adjacent blobs of a Hub cache; copy the file into the folder",
            path=str(link),
            problems=[f"link to {target}"],
            target=str(target),
        )


def _found(error: OSError) -> str:
    if error.errno == errno.ENOENT:
        return error.strerror if error.strerror and error.strerror.startswith("a link") else "no such file"
    if error.errno == errno.ENXIO:
        return "a socket or a pipe"
    return error.strerror or type(error).__name__


def _kind(mode: int) -> str:
    for test, kind in (
        (stat.S_ISREG, "a regular file"),
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    ):
        if test(mode):
            return kind
    return "a special file"

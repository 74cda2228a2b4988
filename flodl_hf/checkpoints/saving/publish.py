"""Publish a whole folder in one step: a reader sees the old one or the new one, never a mixture.

Decides how a folder is created: it is written next to its target under a hidden name, synced, exchanged
with the target in one file system operation, and only then is the old one removed. The writer decides
the contents.

Names next to the target: ``.<name>.stage-<token>`` is being written, or waits to be removed after an exchange;
``.<name>.old-<token>`` exists only if the file system cannot exchange, between two renames. A writer
locks its stage; the next publish to the same target removes unlocked stages and restores an
orphaned old folder.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from flodl.errors import FlodlError, capped, printable
from flodl.files import lock, make_folders, sync_folder
from flodl_hf.checkpoints import system
from flodl_hf.checkpoints.folders import TOKENIZER_FILES, WEIGHT_PATTERNS, matching, path_fault, refused
from flodl_hf.errors import ExportError

GENERATOR = "generator"
"""The folder inside of a discriminator's for the generator that it was trained with."""

_MODEL_FILES = (
    *WEIGHT_PATTERNS,
    *TOKENIZER_FILES,
    "*config*.json",
    "tokenizer*",
    "*.model",
    "modules.json",
    "colbert_linear.pt",  # layers of bge-m3
    "sparse_linear.pt",
    "artifact.metadata",  # settings of ColBERT
    "verification.json",
    "checksums.json",
    "recipe.yaml",
    "training.json",
    "report.html",
    "README.md",
    "LICENSE*",
    "[0-9]*_*/*config*.json",  # the modules of a sentence-transformers folder
    "[0-9]*_*/*.safetensors",
    "[0-9]*_*/pytorch_model.bin",
)
_LEFT = re.compile(r"\.(.+?)(\.[0-9a-f]{12})?\.tmp")  # beside a file that was being written when a process was killed
_MODULE = re.compile(r"\w*?[0-9]+_(Transformer|Router|Pooling|Dense|Normalize)")  # of sentence-transformers
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_model_file(path: str) -> bool:
    """Return whether ``path``, relative with ``/``, is a usual file name of a model folder."""
    head, _, name = path.rpartition("/")
    first, _, inside = path.partition("/")
    if inside and (first == GENERATOR or _MODULE.fullmatch(first)):
        return is_model_file(inside)
    left = _LEFT.fullmatch(name)
    if left is not None:
        return is_model_file(f"{head}/{left[1]}" if head else left[1])
    return bool(matching([path], _MODEL_FILES))


def publish_folder(
    target: str | os.PathLike[str],
    writer: Callable[[Path], object],
    *,
    overwrite: bool = False,
    needed_bytes: int = 0,
    replaceable: Callable[[str], bool] = is_model_file,
) -> Path:
    """Let ``writer`` fill a new folder and put it in the place of ``target``, all or nothing.

    An existing folder is replaced as a whole, never merged with. Whatever goes wrong before the exchange, and
    a kill at any moment, leaves the old folder as it was.

    Args:
        target: the folder to publish; missing parents are made.
        writer: given an empty folder, writes the files into it.
        overwrite: replace a folder that is not empty.
        needed_bytes: size of the new files; refused immediately if the disk has less.
        replaceable: called with each file of a folder to be replaced, relative with ``/``; one unknown file
            makes the call refuse the folder, so that overwriting deletes only models.

    Returns:
        The absolute path of the published folder.

    Raises:
        ExportError: ``target`` is a file, a link, a mount point, the current folder or one above it, or a
            non-empty folder without ``overwrite`` or with strange files; or the disk is full or refuses.
            ``path``, ``needed_bytes`` and ``free_bytes`` give the details.
        Exception: whatever ``writer`` raises, after its stage was removed.
    """
    place = Path(os.path.abspath(target))
    check_target(place, overwrite, replaceable)
    made: list[Path] = []
    published = False
    stage = _Stage(place)
    try:
        made = make_folders(place.parent)
        check_space(place, needed_bytes)
        _sweep(place)
        try:
            stage.make()
            writer(stage.folder)
            _sync_tree(stage.folder)
            if place.exists():
                os.chmod(stage.folder, stat.S_IMODE(place.stat().st_mode))
            # The target may have changed while the writer ran.
            check_target(place, overwrite, replaceable)
            _swap(stage.folder, place, overwrite)
            published = True
        finally:
            # Before the swap this is the unfinished folder, after it the old one.
            stage.clear()
    except OSError as error:
        # The size is no reason where the folder above cannot be made.
        raise _unwritable(place, error, needed_bytes if place.parent.is_dir() else 0) from error
    finally:
        if not published:
            for parent in made:
                with suppress(OSError):
                    parent.rmdir()
    return place


def check_target(target: Path, overwrite: bool, replaceable: Callable[[str], bool] = is_model_file) -> None:
    """Raise an `ExportError` if a folder cannot be written, or replaced where it exists."""
    if (fault := path_fault(target)) is not None:
        raise refused(os.fsdecode(target), fault, "the path of a folder", kind=ExportError)
    try:
        mode = os.lstat(target).st_mode
    except FileNotFoundError:
        return
    except NotADirectoryError:
        mode = stat.S_IFREG  # the path runs through a file
    files = sorted(_files(target)) if stat.S_ISDIR(mode) else []
    strange = [printable(name) for name in files if not replaceable(name)]
    if not stat.S_ISDIR(mode) or os.path.ismount(target):
        found, todo = "found a file, a link or a mount point", "choose another name"
    elif Path.cwd().is_relative_to(target.resolve()):
        # An exchanged folder is deleted, and the process must not be inside it.
        found, todo = "found the current folder, or one above it", "choose a folder inside it"
    elif files and not overwrite:
        found, todo = f"found a folder with {len(files)} files", "choose another, or allow it: overwrite=True"
    elif strange:
        found = f"found {len(strange)} files that do not belong to a model:\n{capped(strange, 8)}\n"
        todo = "overwriting would delete them; choose another folder"
    else:
        return
    raise refused(target, found, f"a new or empty folder; {todo}", problems=strange, kind=ExportError)


def _files(folder: Path) -> list[str]:
    """Return every entry below ``folder`` that is not a folder, and every empty folder."""
    found: list[str] = []
    for root, folders, files in os.walk(folder):
        base = Path(root).relative_to(folder)
        found += [(base / name).as_posix() for name in files]
        found += [(base / name).as_posix() for name in folders if (Path(root) / name).is_symlink()]
        if not folders and not files and base.parts:
            found.append(base.as_posix())
    return found


def check_space(target: Path, needed: int) -> None:
    """Refuse a folder that exceeds the free disk space.

    Args:
        target: the folder, which need not exist.
        needed: its size in bytes.

    Raises:
        ExportError: fewer are free.
    """
    free = shutil.disk_usage(next(folder for folder in target.absolute().parents if folder.is_dir())).free
    if needed > free:
        found = f"needs {needed:,} bytes, found {free:,} free"
        expected = "room for the new folder in addition to the old one"
        details = {"needed_bytes": needed, "free_bytes": free}
        raise refused(target, found, expected, problems=["not enough space"], kind=ExportError, **details)


def _unwritable(target: Path, error: OSError, needed: int) -> FlodlError:
    try:
        free = shutil.disk_usage(target.parent).free
    except OSError:
        free = 0
    at = f" at {error.filename}" if error.filename else ""
    need = f", {needed:,} needed" if needed else ""
    found = f"cannot be written: {error.strerror or error}{at} ({free:,} bytes free{need}); nothing was changed"
    todo = "free space" if error.errno in _DISK_FULL else "a folder above that may be written"
    details = {"needed_bytes": needed, "free_bytes": free, "errno": error.errno}
    return refused(target, found, todo, problems=[str(error)], kind=ExportError, **details)


class _Stage:
    """The folder next to a target that is written to; after an interrupt, its remains have no owner.

    Args:
        target: the target.
    """

    def __init__(self, target: Path) -> None:
        self._stem = f".{target.name[:180]}.stage-"
        self.folder = target.with_name(self._stem + secrets.token_hex(8))
        self._lock: _Held | None = None

    def make(self) -> None:
        """Make and lock it."""
        while True:
            os.mkdir(self.folder)  # not tempfile: its 0700 would become the mode of the published folder
            self._lock = _lock(self.folder, wait=True)
            # A sweep may have taken the new folder for a stale one before it was locked, or even opened.
            if self._lock is None and self.folder.is_dir():
                return  # there are no locks here
            if self._lock is not None:
                if self._lock.holds(self.folder):
                    return
                self._lock.close()
            self.folder = self.folder.with_name(self._stem + secrets.token_hex(8))

    def clear(self) -> None:
        """Remove it and let go of its lock."""
        try:
            shutil.rmtree(self.folder, ignore_errors=True)
        except OSError as error:
            # Ctrl-C between its closing of a descriptor and its note of that: it closes once more, and that hides it.
            if isinstance(error.__context__, KeyboardInterrupt):
                raise error.__context__ from None
        finally:
            if self._lock is not None:
                self._lock.close()


class _Held:
    """The lock of a folder, kept until it is closed or deleted; the system releases it with the process.

    Args:
        folder: opened here.
    """

    def __init__(self, folder: Path) -> None:
        self.descriptor: list[int] = []
        self.descriptor.append(os.open(folder, os.O_RDONLY))

    def holds(self, folder: Path) -> bool:
        """Return whether it is that folder which is locked."""
        return folder.exists() and os.path.samestat(os.fstat(self.descriptor[0]), folder.stat())

    def close(self) -> None:
        """Let go of it."""
        # Ctrl-C may come before the first line of `__init__`, and `__del__` follows all the same.
        descriptor = vars(self).get("descriptor")
        while descriptor:
            os.close(descriptor.pop())

    __del__ = close


def _sweep(target: Path) -> None:
    """Remove stages of dead writers to this target, and restore an old folder without a successor."""
    prefix = f".{target.name[:180]}."
    for entry in sorted(target.parent.iterdir()):
        if entry.is_symlink() or not entry.name.startswith(prefix) or not entry.is_dir():
            continue
        kind = entry.name.removeprefix(prefix)
        if not kind.startswith(("stage-", "old-")):
            continue
        lock = _lock(entry, wait=False)
        if lock is None:
            continue
        try:
            if kind.startswith("old-") and not os.path.lexists(target):
                os.rename(entry, target)
            else:
                shutil.rmtree(entry, ignore_errors=True)
        finally:
            lock.close()


def _lock(folder: Path, *, wait: bool) -> _Held | None:
    """Return the lock of ``folder``, None if it is taken or there are no locks here."""
    try:
        held = _Held(folder)
    except OSError:
        return None
    if lock(held.descriptor[0], wait=wait):
        return held
    held.close()
    return None


def _sync_tree(folder: Path) -> None:
    for root, _, files in os.walk(folder, topdown=False):
        for name in files:
            path = os.path.join(root, name)
            if not os.path.islink(path):
                _sync(path)
        sync_folder(root)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems cannot, and some systems only where a file is open for writing.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def _swap(stage: Path, target: Path, overwrite: bool) -> None:
    """Move ``stage`` to ``target``; an existing folder at ``target`` moves to ``stage``."""
    if not overwrite or not os.path.lexists(target):
        # Replaces nothing or an empty folder, and fails on one that another process filled meanwhile.
        try:
            os.rename(stage, target)
        except FileExistsError:
            os.rmdir(target)  # Windows renames over nothing at all
            os.rename(stage, target)
    elif not system.exchange(stage, target):
        # No exchange here. Between these two renames the target is missing; the next publish puts it back.
        old = stage.with_name(stage.name.replace(".stage-", ".old-"))
        os.rename(target, old)
        try:
            os.rename(stage, target)
        except BaseException:
            os.rename(old, target)
            raise
        sync_folder(target.parent)  # before that, the new name may be lost and the old contents needed
        shutil.rmtree(old, ignore_errors=True)
    sync_folder(target.parent)

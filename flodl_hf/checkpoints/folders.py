"""Folders of models: file names, safe access to its files, and checks of paths.

A checkpoint folder is untrusted. Its index can name any path, and its entries can be links, pipes or devices. A member
is opened without blocking and checked on the open descriptor, so nothing changes between the check and the read; the
folder itself stays open, so a folder replaced meanwhile is not mixed with its successor.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Sequence
from fnmatch import translate
from pathlib import Path
from typing import Any

from flodl.errors import CheckpointError, ConfigError, DataError, FlodlError, UnsafeFileError, nearest, printable, shown
from flodl_hf.errors import no_tokenizer

CONFIG_NAME = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
WEIGHTS_KEY = "transformers_weights"
"""The key of ``config.json`` that names the file of the weights."""
BASE_OF_ADAPTER = "base_model_name_or_path"
# A folder with one of these has a tokenizer; checked here so that folders without one import none.
VOCABULARY_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "sentencepiece.bpe.model",
    "spm.model",
    "spiece.model",
    "sentencepiece.model",
    "tokenizer.model",
)
TOKENIZER_FILES = (
    *VOCABULARY_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "bpe.codes",
)
SAFETENSORS, BIN = "model.safetensors", "pytorch_model.bin"
SAFETENSORS_INDEX, BIN_INDEX = f"{SAFETENSORS}.index.json", f"{BIN}.index.json"
WEIGHT_FILES = (SAFETENSORS, SAFETENSORS_INDEX, BIN, BIN_INDEX)
"""A folder with one of these contains the weights of a transformer."""
BIN_FILES = ("pytorch_model*.bin", BIN_INDEX)
WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model*.bin.index.json")
"""The same files, their shards, and files of weights with other names."""
BOUNDS = tuple(
    f"sentence_{family}_config.json"
    for family in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Names of the file with the maximum tokens of a sentence-transformers folder; the first present one counts."""
RECIPE_FILES = (
    "modules.json",
    "router_config.json",
    "*/router_config.json",
    "*/config.json",
    *BOUNDS,
    "config_sentence_transformers.json",
    "*/cnn_config.json",
    *(
        f"*_{kind}/{name}"
        for kind in ("Dense", "LayerNorm", "CNN", "WeightedLayerPooling")
        for name in (SAFETENSORS, BIN)
    ),
    "config_setfit.json",
    "artifact.metadata",
    "colbert_linear.pt",
    "sparse_linear.pt",
)
"""Files that define how states become vectors."""
MODEL_FILES = (
    *TOKENIZER_FILES,
    CONFIG_NAME,
    SAFETENSORS,  # for the weights in whatever parts they come, pickled ones where there are no others
    "checksums.json",
    *RECIPE_FILES,
)


def matching(names: Iterable[str], patterns: Iterable[str]) -> set[str]:
    """Return the names that match one of the patterns; ``*`` does not match ``/``."""
    tests = [(pattern.count("/"), re.compile(translate(pattern)).match) for pattern in patterns]
    return {name for name in names if any(name.count("/") == depth and match(name) for depth, match in tests)}


def is_vocabulary_in(folder: Path) -> bool:
    """Return whether a folder contains a vocabulary file."""
    return any(os.path.lexists(folder / name) for name in VOCABULARY_FILES)


def vocabularies_below(folder: Path) -> list[str]:
    """Return the names of direct subfolders with a vocabulary file."""
    try:
        return sorted(path.name for path in folder.iterdir() if path.is_dir() and is_vocabulary_in(path))
    except OSError:
        return []


def weights_named(value: Any, path: str) -> str | None:
    """Return the weight file that a configuration names, relative to its folder; None if it names none.

    Args:
        value: the value of `WEIGHTS_KEY`.
        path: the configuration, for messages.

    Raises:
        ConfigError: it is not the name of a safetensors file or index in the folder or below it.
    """
    if value in (None, ""):
        return None
    parts = value.split("/") if isinstance(value, str) else []
    if not parts or any(part in ("", ".", "..") or set(part) & set('\\:*?"<>|') for part in parts):
        expected = "the name of a file in the folder"
    elif not value.endswith((".safetensors", ".safetensors.index.json")):
        expected = "the name of a .safetensors file, or of a .safetensors.index.json"
    elif len(parts) > 1 and not value.endswith(".safetensors"):
        expected = "an index in the folder of config.json, where its shards are searched"
    else:
        return value
    found = f"{WEIGHTS_KEY}: found {shown(value, 80)}"
    advice = f"{expected}. Remove the key if the weight file has its usual name"
    raise refused(path, found, advice, problems=[WEIGHTS_KEY], kind=ConfigError)


def refused(
    path: str | os.PathLike[str],
    found: str,
    expected: str,
    *,
    problems: Sequence[str] = (),
    kind: type[FlodlError] = CheckpointError,
    **details: Any,
) -> FlodlError:
    """Return the error for a file or folder that cannot be used.

    Args:
        path: the file or folder.
        found: what was found.
        expected: what is expected instead, and what to do.
        problems: each fault; by default ``found``.
        kind: the class of the error.
        **details: further attributes of the error.
    """
    place = os.fspath(path)
    problems = list(problems) or [found]
    return kind(f"{place}: {found}; expected {expected}", path=place, where=place, problems=problems, **details)


# ---- safe access to the files of a folder ----------------------------------------------------------------

_NONBLOCK = getattr(os, "O_NONBLOCK", 0)  # a pipe without a writer would hang a blocking open for ever
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_DIRECTORY = getattr(os, "O_DIRECTORY", 0)
_READ = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_MAX_NAME = 255  # bytes of one segment of a path, on every usual file system


def plain_name_fault(name: object) -> str | None:
    """Return the fault of ``name`` as the name of a sibling file, or None if it is valid."""
    if not isinstance(name, str):
        return f"{type(name).__name__} instead of a text"
    if not 0 < len(name) <= _MAX_NAME or name in (".", ".."):
        return "not the name of a file"
    if not name.isprintable() or not name.isascii() or any(mark in name for mark in '/\\:%*?"<>|'):
        return "characters other than printable ASCII, or a separator, drive or escape character"
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
        raise _outside(below, below.resolve())
    return below


def _outside(link: Path, target: Path) -> FlodlError:
    expected = "a file of the folder, or of the blobs of a Hub cache. Copy it there"
    found, problems = f"leads to {target}, outside the folder", [f"link to {target}"]
    return refused(link, found, expected, problems=problems, kind=UnsafeFileError, target=str(target))


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


class Folder:
    """An open folder; its files are opened relative to its descriptor and not by path. A context manager.

    Args:
        path: the folder; it may itself be a link.

    Raises:
        CheckpointError: ``path`` is not a folder or cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._descriptor: int | None = None
        if not self.path.is_dir():
            found = "found a file" if self.path.exists() else "found nothing"
            raise refused(self.path, found, "a folder with weights")
        if _DIRECTORY and os.open in os.supports_dir_fd:
            try:
                self._descriptor = os.open(self.path, _READ | _DIRECTORY)
            except OSError as error:
                raise refused(self.path, f"{error.strerror}", "a folder that may be read") from error

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
            expected = "the plain name of a file in the same folder"
            found = f"found the file name {printable(str(name))}, {fault}"
            raise refused(self.path, found, expected, kind=UnsafeFileError)
        where = self.path / name
        try:
            descriptor = self._open_entry(name)
        except OSError as error:
            expected = "a file that can be read; complete the download"
            raise refused(where, error.strerror or type(error).__name__, expected) from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            expected = "a regular file; replace it by the file itself"
            raise refused(where, "found a folder, pipe, socket or device", expected, kind=UnsafeFileError)
        return descriptor

    def read(self, name: str, limit: int) -> bytes:
        """Return the bytes of the member ``name``, refused above ``limit``; errors as of `open`."""
        with os.fdopen(self.open(name), "rb") as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise refused(self.path / name, "found a larger file", f"at most {limit:,} bytes; check the file")
        return data

    def _open_entry(self, name: str) -> int:
        if self._descriptor is None:
            path = self.path / name
            return os.open(self._follow(name) if path.is_symlink() else path, _READ | _NONBLOCK)
        try:
            return os.open(name, _READ | _NONBLOCK | _NOFOLLOW, dir_fd=self._descriptor)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EMLINK):
                raise
        return os.open(self._follow(name), _READ | _NONBLOCK)

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
        raise _outside(link, target)


# ---- checks of paths before anything is read or written ----------------------------------------------------


def holds_adapter(name_or_path: Any) -> bool:
    """Return whether a name is a local folder with an adapter and no model."""
    path = local_folder(name_or_path)
    return path is not None and os.path.lexists(path / ADAPTER_CONFIG) and not os.path.lexists(path / CONFIG_NAME)


def local_folder(name_or_path: Any) -> Path | None:
    """Return the folder that a name is the path of; None for all other names."""
    if not isinstance(name_or_path, (str, os.PathLike)) or not os.fspath(name_or_path):
        return None  # an empty name is not the current directory
    path = Path(os.path.expanduser(os.fspath(name_or_path)))
    return path if os.path.isdir(path) else None  # Path.is_dir raises for a name that no folder can have


def expect_tokenizer(name_or_path: Any, task: str) -> None:
    """Raise a PredictError for a local folder without a tokenizer before its weights or any texts are read."""
    if lacks_tokenizer(name_or_path):
        raise no_tokenizer(task)


def lacks_tokenizer(name_or_path: Any) -> bool:
    """Return whether a local folder has a configuration and no vocabulary file, in the folder or directly below."""
    path = local_folder(name_or_path)
    if path is None or not os.path.lexists(path / CONFIG_NAME):
        return False
    return not is_vocabulary_in(path) and not vocabularies_below(path)


def path_fault(path: str | os.PathLike[str]) -> str | None:
    """Return why no file can have this path, as half a sentence; None if one can."""
    text = os.fspath(path)
    if not isinstance(text, str):
        return "it is bytes, not text"
    try:
        longest = max((len(os.fsencode(part)) for part in Path(text).parts), default=0)
    except UnicodeEncodeError:
        return "it contains a lone surrogate"
    if "\0" in text or longest > _MAX_NAME:
        return f"it contains a NUL character, or a name of more than {_MAX_NAME} bytes"
    parent = next((parent for parent in Path(text).absolute().parents if os.path.lexists(parent)), None)
    return None if parent is None or os.path.isdir(parent) else f"{parent} is not a folder"


def expect_file(path: str | os.PathLike[str]) -> None:
    """Raise if a path is not a file that can be read again; the error names similar files.

    Raises:
        DataError: nothing exists there, or a folder, a pipe or a device.
    """
    if os.path.isfile(path):  # False for impossible paths, for which Path.is_file raises
        return
    folder, name = (path, "") if os.path.isdir(path) else os.path.split(path)
    names: list[str] = []
    with contextlib.suppress(OSError, ValueError), os.scandir(folder or os.curdir) as entries:
        names = sorted(entry.name for entry in entries if entry.is_file())
    if not name:
        found = f"is a folder with {names[:5] or 'no files'}"
    elif os.path.exists(path):
        found = "found a pipe or a device"
    else:
        found = f"no such file{nearest(name, names)}; the folder has {names[:5] or 'no files'}"
    expected = "a file that can be read again. Correct the path"
    raise refused(path, found, expected, kind=DataError)


def expect_writable(path: str | os.PathLike[str]) -> None:
    """Raise if an output could not be written; tested with a temporary file without a name.

    Args:
        path: the file or folder to write; folders above it may be missing.

    Raises:
        DataError: the nearest existing folder above it is not writable.
    """
    folder = os.path.abspath(path)
    while not os.path.lexists(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    if folder == os.path.abspath(path) and not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as fault:
        found = f"cannot write in {folder} ({fault.strerror or fault})"
        advice = "a writable folder. Name another output"
        raise refused(path, found, advice, kind=DataError) from None

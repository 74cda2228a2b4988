"""Compare a folder's files with their expected sizes and SHA-256 before anything is read.

Decides the source of the expected values: ``checksums.json``, which every export writes; or the names of blobs, if the
folder is a snapshot of the Hub's cache; else the receipt of ``verify-export``. The list is sealed, and its seal is the
folder's fingerprint, which covers all bytes. A list next to the files detects damage; against an attacker with write
access to the folder, only a fingerprint stored elsewhere helps.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from flodl.errors import CheckpointError, capped, printable
from flodl.files import SEAL, seal, unseal, write_atomically
from flodl_hf.checkpoints.folders import (
    MODEL_FILES,
    WEIGHT_PATTERNS,
    Folder,
    inside,
    is_entry,
    matching,
    plain_name_fault,
    read_member,
    refused,
)

CHECKSUMS = "checksums.json"
RECEIPT = "verification.json"
FORMAT = "flodl-checksums/1"
_LIMIT = 1 << 26  # bytes of a receipt
_THREADS = 4
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")

Status = Literal["ok", "changed", "missing", "not listed", "unreadable"]


@dataclass(frozen=True)
class FileState:
    """One file of a folder compared with its expected state.

    Attributes:
        name: relative to the folder, with ``/``.
        status: "ok", "changed", "missing", "not listed" or "unreadable".
        found: description of the actual state.
        expected: description of the expected state.
        is_read: whether loading the folder reads it.
    """

    name: str
    status: Status
    found: str = ""
    expected: str = ""
    is_read: bool = True

    def __str__(self) -> str:
        if self.status == "ok":
            return f"{self.name}: as written"
        expected = f", expected {self.expected}" if self.expected else ""
        return f"{self.name}: {self.status}, found {self.found}{expected}"


@dataclass
class Comparison:
    """A folder compared with its expected files.

    Attributes:
        folder: the folder.
        by: source of the expected values: "checksums.json", "the Hub's cache", "verification.json", or a manifest.
        fingerprint: digest over every listed byte; None if the source has none.
        files: each file.
    """

    folder: str
    by: str
    fingerprint: str | None = None
    files: list[FileState] = field(default_factory=list)

    @property
    def faults(self) -> list[FileState]:
        """The files that are not as they should be."""
        return [state for state in self.files if state.status != "ok"]

    @property
    def whole(self) -> bool:
        """Whether every file is as it should be."""
        return not self.faults

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON types."""
        rows = [{key: value for key, value in vars(state).items() if key != "is_read"} for state in self.files]
        return {"folder": self.folder, "whole": self.whole, "by": self.by, "fingerprint": self.fingerprint,
                "files": rows}  # fmt: skip


@dataclass(frozen=True)
class _Listed:
    """Expected state of one file: a length, None if unknown, and a SHA-256 or git's digest."""

    size: int | None
    digest: str

    def __str__(self) -> str:
        return self.digest if self.size is None else f"{self.digest} of {self.size:,} bytes"


# ---- writing ---------------------------------------------------------------------------------------------


def write_checksums(folder: str | os.PathLike[str], known: Iterable[tuple[str, int, str]] = ()) -> str:
    """Write ``checksums.json`` for the files of a folder; return its fingerprint.

    The same files give the same bytes.

    Args:
        folder: a folder of model files; links are followed inside the folder only.
        known: names, lengths and SHA-256 that need not be read again.

    Raises:
        CheckpointError: a file cannot be read.
    """
    place = Path(folder)
    listed = {name: {"bytes": size, "sha256": digest} for name, size, digest in known}
    for name in _names(place):
        if name not in listed and name not in (CHECKSUMS, RECEIPT):
            size, digest = _digest(place, name)
            listed[name] = {"bytes": size, "sha256": digest}
    data = seal({"format": FORMAT, "files": dict(sorted(listed.items()))})
    write_atomically(place / CHECKSUMS, [data + b"\n"])
    return json.loads(data)[SEAL]


# ---- comparing -------------------------------------------------------------------------------------------


def compare_folder(
    folder: str | os.PathLike[str], read: Callable[[str], bool] | None = None,
    seen: dict[str, os.stat_result] | None = None,
) -> Comparison:  # fmt: skip
    """Compare the files of a model folder, or of a snapshot in the Hub's cache, with their expected state.

    Args:
        folder: the folder.
        read: given a name, whether the file is compared; all files by default.
        seen: receives the identity of each compared file.

    Raises:
        CheckpointError: no expected checksums exist, or their file is damaged itself.
    """
    place = Path(folder)
    blobs = _blobs(place)
    by, fingerprint, listed = "the Hub's cache", None, blobs
    if is_entry(place, CHECKSUMS):
        by, (fingerprint, listed) = CHECKSUMS, _listed_in(place, CHECKSUMS)
        listed = {**blobs, **listed}
    elif not blobs and is_entry(place, RECEIPT):
        by, (fingerprint, listed) = RECEIPT, _listed_in(place, RECEIPT)
    elif not blobs:
        found = "no expected checksums"
        expected = f"{CHECKSUMS}, as in exports; `flodl-hf verify {place} --write` writes it for files that you trust"
        raise refused(place, found, expected, problems=[f"no {CHECKSUMS}"], file=CHECKSUMS)
    names = [name for name in listed if read is None or read(name)]
    # Of a repository only the files that a load reads are fetched.
    is_part = bool(blobs) and by == CHECKSUMS
    states = _states(place, {name: listed[name] for name in names}, is_part, seen)
    for name in _names(place):
        if name not in listed and (read is None or read(name)) and reads_file(name):
            states.append(FileState(name, "not listed", "a file that a load would read"))
    return Comparison(str(folder), by, fingerprint, states)


def compare_files(folder: Path, listed: Mapping[str, tuple[int, str]], by: str) -> Comparison:
    """Compare the files of a folder with lengths and SHA-256 from another source."""
    expected = {name: _Listed(size, digest) for name, (size, digest) in listed.items()}
    return Comparison(str(folder), by, None, _states(folder, expected, False))


def has_truth(folder: Path) -> bool:
    """Return whether expected checksums of a folder exist."""
    return is_entry(folder, CHECKSUMS) or is_entry(folder, RECEIPT) or bool(_blobs(folder))


def _states(
    folder: Path, listed: Mapping[str, _Listed], is_part: bool, seen: dict[str, os.stat_result] | None = None
) -> list[FileState]:
    """Return the state of each listed file, and record the file identity in ``seen``."""

    def state(name: str) -> FileState:
        expected, reads = listed[name], reads_file(name)
        if not is_entry(folder, name):
            # Weights come in one kind only.
            unfetched = is_part and (not reads or bool(matching([name], WEIGHT_PATTERNS)))
            return FileState(name, "ok" if unfetched else "missing", "nothing", str(expected), reads)
        try:
            size, found = _digest(folder, name, git=len(expected.digest) == 40, seen=seen)
        except CheckpointError as error:
            return FileState(name, "unreadable", error.message, str(expected), reads)
        if found == expected.digest and expected.size in (None, size):
            return FileState(name, "ok", is_read=reads)
        return FileState(name, "changed", str(_Listed(size, found)), str(expected), reads)

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="flodl-hf-verify") as pool:
        return list(pool.map(state, sorted(listed)))


def reads_file(name: str) -> bool:
    """Return whether loading a folder reads a file of that name; a model card, for example, may be edited."""
    inside = name.partition("/")[2]
    if name in (CHECKSUMS, RECEIPT):
        return False
    return bool(matching([name], (*MODEL_FILES, *WEIGHT_PATTERNS)) or matching([inside], WEIGHT_PATTERNS))


def _listed_in(folder: Path, source: str) -> tuple[str | None, dict[str, _Listed]]:
    """Return the seal and the expected files of the list of checksums, or those of a receipt, which has no seal."""
    data = read_member(folder, source, _LIMIT)
    try:
        if source == RECEIPT:
            digests = json.loads(data)["facts"]["sha256"]
            fingerprint, files = None, {name: {"sha256": digest} for name, digest in digests.items()}
        else:
            value, fingerprint = unseal(data), json.loads(data)[SEAL]
            if value["format"] != FORMAT:
                raise ValueError(f"format {printable(str(value['format']), 40)} is not {FORMAT!r}")
            files = value["files"]
        listed = {}
        for name, entry in files.items():
            if fault := next((fault for part in name.split("/") if (fault := plain_name_fault(part))), None):
                raise ValueError(f"the name {printable(name, 80)} is {fault}")
            if not _SHA256.fullmatch(entry["sha256"]):
                raise ValueError(f"found {printable(entry['sha256'], 80)}, expected a SHA-256 in hexadecimal")
            size = None if source == RECEIPT else int(entry["bytes"])
            listed[name] = _Listed(size, entry["sha256"])
        return fingerprint, listed
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        found = f"cannot be used ({printable(str(error), 200)})"
        expected = "names, lengths and SHA-256. Fetch or export the folder again"
        raise refused(folder / source, found, expected, problems=[str(error)], file=source) from None


def _blobs(folder: Path) -> dict[str, _Listed]:
    """Return the digests in the names of blobs, if a folder is a snapshot of the Hub's cache."""
    snapshots = next((above for above in folder.absolute().parents if above.name == "snapshots"), None)
    if snapshots is None or not (snapshots.parent / "blobs").is_dir():
        return {}
    links = {name: (folder / name).resolve().name for name in _names(folder) if (folder / name).is_symlink()}
    return {name: _Listed(None, blob) for name, blob in links.items() if _DIGEST.fullmatch(blob)}


def digest_of(path: Path, *, git: bool = False) -> str:
    """Return the SHA-256 of a file, or git's digest."""
    with path.open("rb") as file:
        return _digest_of(file, git=git)


def _digest_of(file: Any, *, git: bool) -> str:
    empty = hashlib.sha256()
    if git:  # it begins with the length of the file
        empty = hashlib.sha1(b"blob %d\0" % os.fstat(file.fileno()).st_size, usedforsecurity=False)
    return hashlib.file_digest(file, lambda: empty).hexdigest()


def _digest(
    folder: Path, name: str, *, git: bool = False, seen: dict[str, os.stat_result] | None = None
) -> tuple[int, str]:
    """Return length and digest of a file, opened with the checks for all files of a folder.

    Raises:
        CheckpointError: the file cannot be opened or read, or is outside the folder.
    """
    inner, _, leaf = name.rpartition("/")
    try:
        with Folder(inside(folder, inner)) as opened, os.fdopen(opened.open(leaf), "rb", buffering=0) as file:
            if seen is not None:
                seen[name] = os.fstat(file.fileno())
            found = _digest_of(file, git=git)
            return file.tell(), found
    except OSError as error:
        raise refused(folder / name, f"cannot be read ({error.strerror})", "a file; check the disk") from error


def _names(folder: Path) -> list[str]:
    """Return the files of a folder and of the folders in it, hidden ones left out."""
    found = []
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        base = Path(root).relative_to(folder)
        found += [(base / name).as_posix() for name in files if not name.startswith(".")]
    return sorted(found)


# ---- a folder stays unchanged while it is read -----------------------------------------------------------


def hold(
    folder: str | os.PathLike[str], verified: bool | str, names: Collection[str] | None = None
) -> Callable[[], None]:
    """Compare the files that loading a folder reads; return a function that checks that they are still unchanged.

    Args:
        folder: a model folder, or a snapshot of the Hub's cache.
        verified: True, or the expected fingerprint of the folder.
        names: these files alone.

    Raises:
        CheckpointError: a file differs, each listed with the actual and the expected state; another
            fingerprint; or no expected checksums exist.
    """
    place, seen = Path(folder), {}
    comparison = compare_folder(place, reads_file if names is None else names.__contains__, seen)
    if isinstance(verified, str) and comparison.fingerprint != verified:
        found = f"its fingerprint is {comparison.fingerprint or f'absent: no {CHECKSUMS}'}"
        expected = f"{printable(verified, 80)}, as `flodl-hf verify` reports it. This is another model"
        raise refused(place, found, expected, problems=["fingerprint"], file=CHECKSUMS)
    if faults := [state for state in comparison.faults if state.is_read]:
        lines = [str(state) for state in faults]
        found = f"{len(faults)} file(s) not as {comparison.by} says:\n{capped(lines)}\n"
        expected = f"the same bytes. Fetch it again, or accept it: `flodl-hf verify {place} --write`"
        files = [state.name for state in faults]
        raise refused(place, found, expected, problems=lines, files=files, file=files[0])
    return partial(_check_unchanged, place, seen)


def _check_unchanged(folder: Path, seen: Mapping[str, os.stat_result]) -> None:
    """Raise if something was written to a folder after it was compared."""
    changed = []
    for name, before in seen.items():
        try:
            now = os.stat(folder / name)
        except OSError:
            changed.append(name)
            continue
        if (now.st_ino, now.st_size, now.st_mtime_ns) != (before.st_ino, before.st_size, before.st_mtime_ns):
            changed.append(name)
    if changed:
        found = f"changed while it was loaded: {', '.join(changed[:5])}"
        expected = "the files that were compared. Load it again when nothing writes to it"
        raise refused(folder, found, expected, problems=changed)

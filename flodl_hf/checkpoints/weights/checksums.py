"""Compare a folder's files with their expected sizes and SHA-256 before anything is read.

Decides the source of the expected values: ``checksums.json``, which every export writes; or the names of blobs,
if the folder is a snapshot of the Hub's cache; else the receipt of ``verify-export``. The receipt is sealed, and
its seal is the folder's fingerprint, which covers every byte. A receipt next to the files detects damage; against
an attacker with write access to the folder, only a fingerprint stored elsewhere helps.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flodl.errors import CheckpointError, capped, printable
from flodl.files import SEAL, seal, unseal
from flodl_hf.checkpoints.folders import (
    MODEL_FILES,
    WEIGHT_PATTERNS,
    Folder,
    inside,
    is_entry,
    matching,
    plain_name_fault,
    read_member,
)

CHECKSUMS = "checksums.json"
RECEIPT = "verification.json"
FORMAT = "flodl-checksums/1"
_LIMIT = 1 << 26  # bytes of a receipt
_THREADS = 4
_HEX = re.compile(r"[0-9a-f]{64}")

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
    """Expected state of one file: a length, None if unknown, and a digest."""

    size: int | None
    digest: str
    is_git: bool = False

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
    from flodl.files import write_atomically

    place = Path(folder)
    listed = {name: {"bytes": size, "sha256": digest} for name, size, digest in known}
    for name in _names(place):
        if name not in listed and name not in (CHECKSUMS, RECEIPT):
            size, digest = _digest(place, name, hashlib.sha256())
            listed[name] = {"bytes": size, "sha256": digest}
    data = seal({"format": FORMAT, "files": dict(sorted(listed.items()))})
    write_atomically(place / CHECKSUMS, [data + b"\n"])
    return json.loads(data)[SEAL]


# ---- comparing -------------------------------------------------------------------------------------------


def compare_folder(folder: str | os.PathLike[str]) -> Comparison:
    """Compare every file of a model folder, or of a snapshot in the Hub's cache, with its expected state.

    Raises:
        CheckpointError: no expected checksums exist, or their file is damaged itself.
    """
    return _compare(Path(folder), lambda name: True)[0]


def compare_files(folder: Path, listed: Mapping[str, tuple[int, str]], by: str) -> Comparison:
    """Compare the files of a folder with lengths and SHA-256 from another source."""
    said = {name: _Listed(size, digest) for name, (size, digest) in listed.items()}
    return Comparison(str(folder), by, None, _states(folder, said, False, {}))


def has_truth(folder: Path) -> bool:
    """Return whether expected checksums of a folder exist."""
    return is_entry(folder, CHECKSUMS) or is_entry(folder, RECEIPT) or bool(_blobs(folder))


def _compare(folder: Path, read: Callable[[str], bool]) -> tuple[Comparison, dict[str, os.stat_result]]:
    by, fingerprint, listed, is_part = _truth(folder)
    seen: dict[str, os.stat_result] = {}
    states = _states(folder, {name: said for name, said in listed.items() if read(name)}, is_part, seen)
    for name in _names(folder):
        if name not in listed and read(name) and reads_file(name):
            states.append(FileState(name, "not listed", "a file that a load would read"))
    return Comparison(str(folder), by, fingerprint, states), seen


def _states(
    folder: Path, listed: Mapping[str, _Listed], is_part: bool, seen: dict[str, os.stat_result]
) -> list[FileState]:
    """Return the state of each listed file, and record the file identity in ``seen``.

    Args:
        is_part: files may be absent: of a repository, only the files that a load reads are fetched.
    """

    def state(name: str) -> FileState:
        expected, reads = listed[name], reads_file(name)
        if not is_entry(folder, name):
            # Weights come in one kind only.
            unfetched = is_part and (not reads or bool(matching([name], WEIGHT_PATTERNS)))
            return FileState(name, "ok" if unfetched else "missing", "nothing", str(expected), reads)
        try:
            size, found = _digest(folder, name, new_digest(folder / name, git=expected.is_git), seen)
        except CheckpointError as error:
            return FileState(name, "unreadable", error.message, str(expected), reads)
        same = found == expected.digest and expected.size in (None, size)
        said = str(_Listed(size, found))
        return FileState(name, "ok" if same else "changed", "" if same else said, "" if same else str(expected), reads)

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="flodl-hf-verify") as pool:
        return list(pool.map(state, sorted(listed)))


def reads_file(name: str) -> bool:
    """Return whether loading a folder reads a file of that name; a model card, for example, may be edited."""
    inside = name.partition("/")[2]
    if name in (CHECKSUMS, RECEIPT):
        return False
    return bool(matching([name], (*MODEL_FILES, *WEIGHT_PATTERNS)) or matching([inside], WEIGHT_PATTERNS))


def _truth(folder: Path) -> tuple[str, str | None, dict[str, _Listed], bool]:
    """Return the source of the expected values, its fingerprint, the values, and whether files may be absent."""
    blobs = _blobs(folder)
    if is_entry(folder, CHECKSUMS):
        fingerprint, listed = _listed_in(folder, CHECKSUMS)
        return CHECKSUMS, fingerprint, {**blobs, **listed}, bool(blobs)
    if blobs:
        return "the Hub's cache", None, blobs, False
    if is_entry(folder, RECEIPT):
        return RECEIPT, *_listed_in(folder, RECEIPT), False
    raise CheckpointError(
        f"{folder}: no expected checksums; expected {CHECKSUMS}, as in exports, or a "
        f"snapshot of the Hub's cache. If you trust the files as they are, `flodl-hf verify {folder} --write` "
        "writes it; or load without verified",
        path=str(folder),
        problems=[f"no {CHECKSUMS}"],
        file=CHECKSUMS,
    )


def _listed_in(folder: Path, source: str) -> tuple[str | None, dict[str, _Listed]]:
    """Return the seal and the expected files that the list of checksums, or a receipt without a seal, contains."""
    data = read_member(folder, source, _LIMIT)
    try:
        if source == RECEIPT:
            fingerprint, files = None, json.loads(data)["facts"]["sha256"]
        else:
            value, fingerprint = unseal(data), json.loads(data)[SEAL]
            if value["format"] != FORMAT:
                raise ValueError(f"format {printable(str(value['format']), 40)} is not {FORMAT!r}")
            files = value["files"]
        listed = {}
        for name, entry in files.items():
            _check_name(name)
            size, digest = (None, entry) if source == RECEIPT else (int(entry["bytes"]), entry["sha256"])
            listed[name] = _Listed(size, _sha(digest))
        return fingerprint, listed
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{folder / source}: cannot be used ({printable(str(error), 200)}); expected names, lengths and SHA-256 as "
            "an export writes them. Fetch or export the folder again",
            path=str(folder / source),
            problems=[str(error)],
            file=source,
        ) from None


def _blobs(folder: Path) -> dict[str, _Listed]:
    """Return the digests in the names of blobs, if a folder is a snapshot of the Hub's cache."""
    snapshots = next((above for above in folder.absolute().parents if above.name == "snapshots"), None)
    if snapshots is None or not (snapshots.parent / "blobs").is_dir():
        return {}
    found = {}
    for name in _names(folder):
        path = folder / name
        blob = path.resolve().name if path.is_symlink() else ""
        if _HEX.fullmatch(blob):
            found[name] = _Listed(None, blob)
        elif re.fullmatch(r"[0-9a-f]{40}", blob):
            found[name] = _Listed(None, blob, is_git=True)
    return found


def new_digest(path: Path, *, git: bool) -> Any:
    """Return an empty SHA-256, or git's digest of a file, which begins with its length."""
    return hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False) if git else hashlib.sha256()


def digest_of(path: Path, *, git: bool = False) -> str:
    """Return the SHA-256 of a file, or git's digest."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: new_digest(path, git=git)).hexdigest()


def _digest(folder: Path, name: str, digest: Any, seen: dict[str, os.stat_result] | None = None) -> tuple[int, str]:
    """Return length and digest of a file, opened with the checks for all files of a folder.

    Raises:
        CheckpointError: the file cannot be opened or read, or is outside the folder.
    """
    inner, _, leaf = name.rpartition("/")
    below = inside(folder, inner)
    try:
        with Folder(below) as opened, os.fdopen(opened.open(leaf), "rb", buffering=0) as file:
            if seen is not None:
                seen[name] = os.fstat(file.fileno())
            found = hashlib.file_digest(file, lambda: digest).hexdigest()
            return file.tell(), found
    except OSError as error:
        where = str(folder / name)
        raise CheckpointError(
            f"{where}: cannot be read ({error.strerror}); expected a file; check the disk",
            path=where,
            problems=[str(error)],
        ) from error


def _names(folder: Path) -> list[str]:
    """Return the files of a folder and of the folders in it, hidden ones left out."""
    found = []
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        base = Path(root).relative_to(folder)
        found += [(base / name).as_posix() for name in files if not name.startswith(".")]
    return sorted(found)


def _check_name(name: object) -> None:
    parts: Sequence[Any] = name.split("/") if isinstance(name, str) else [name]
    fault = next((fault for part in parts if (fault := plain_name_fault(part)) is not None), None)
    if fault is not None:
        raise ValueError(f"the name {printable(str(name), 80)} is {fault}")


def _sha(value: object) -> str:
    if not isinstance(value, str) or not _HEX.fullmatch(value):
        raise ValueError(f"found {printable(str(value), 80)}, expected a SHA-256 in hexadecimal")
    return value


# ---- holding a folder to its word while it is read -------------------------------------------------------


class Held:
    """The compared files of a folder: `check` reports whether they are still unchanged."""

    def __init__(self, folder: Path, seen: Mapping[str, os.stat_result]) -> None:
        self._place, self._seen = folder, dict(seen)

    def check(self) -> None:
        """Refuse a folder in which something was written after it was compared.

        Raises:
            CheckpointError: a file is another one now.
        """
        changed = []
        for name, before in self._seen.items():
            try:
                now = os.stat(self._place / name)
            except OSError:
                changed.append(name)
                continue
            if (now.st_ino, now.st_size, now.st_mtime_ns) != (before.st_ino, before.st_size, before.st_mtime_ns):
                changed.append(name)
        if changed:
            raise CheckpointError(
                f"{self._place}: changed while it was loaded: {', '.join(changed[:5])}; expected the files that were "
                "compared. Load it again when nothing writes to it",
                path=str(self._place),
                problems=changed,
            )


def hold(folder: str | os.PathLike[str], verified: bool | str, names: Sequence[str] | None = None) -> Held:
    """Compare the files that loading a folder reads; return a guard that later checks that they are unchanged.

    Args:
        folder: a model folder, or a snapshot of the Hub's cache.
        verified: True, or the expected fingerprint of the folder.
        names: these files alone.

    Raises:
        CheckpointError: a file differs, each listed with the actual and the expected state; another
            fingerprint; or no expected checksums exist.
    """
    place = Path(folder)
    wanted = (lambda name: name in names) if names is not None else reads_file
    comparison, seen = _compare(place, wanted)
    if isinstance(verified, str) and comparison.fingerprint != verified:
        found = comparison.fingerprint or f"no {CHECKSUMS}"
        raise CheckpointError(
            f"{place}: its fingerprint is {found}, expected {printable(verified, 80)}; this is another model, or its "
            "files were replaced. Fetch it again from a trusted source, or give the fingerprint that "
            "`flodl-hf verify` reports for the intended folder",
            path=str(place),
            problems=["fingerprint"],
            file=CHECKSUMS,
        )
    faults = [state for state in comparison.faults if state.is_read]
    if faults:
        lines = [str(state) for state in faults]
        raise CheckpointError(
            f"{place}: {len(faults)} file{'s are' if len(faults) > 1 else ' is'} not as {comparison.by} says:\n"
            f"{capped(lines)}\nexpected the same bytes. Fetch or export the folder again; if the change was meant, "
            f"`flodl-hf verify {place} --write` takes the files as they are",
            path=str(place),
            problems=lines,
            files=[state.name for state in faults],
            file=faults[0].name,
        )
    return Held(place, seen)

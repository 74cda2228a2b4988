"""Folder of the finished parts of a job, next to its output, and the join of the parts to one file.

A part exists if its record exists, which is written after it. So a job can be interrupted at any point and resumes from
its parts. Records and manifest are sealed. A record contains the SHA-256 of its part, which is compared when a job
resumes and again when parts are joined, so damaged bytes never reach the output. The folder is removed after the output
was written.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from flodl.errors import CheckpointError, capped
from flodl.files import make_folders, open_regular, read_regular, seal, sync_folder, unseal, write_atomically
from flodl_hf.errors import PredictError
from flodl_hf.jobs.identity import differences
from flodl_hf.jobs.write import Pieces, Writer

MANIFEST = "manifest.json"
JOINING = "joining"
BLOCK_BYTES = 1 << 20
MAX_RECORD_BYTES = 16 << 20
"""Maximum bytes of a manifest or a record."""
_OWN_NAME = re.compile(r"(manifest|part-\d{8}|rank-\d{5})\.[a-z]+|joining|\..*").fullmatch


class DamagedPart(Exception):
    """A finished part (``number``) differs from its record. Handled by `run`, never raised to callers."""

    def __init__(self, number: int) -> None:
        super().__init__(f"part {number}")
        self.number = number


class Parts:
    """The parts of an output file.

    Args:
        target: the output file.
        suffix: suffix of the parts.
    """

    def __init__(self, target: Path, suffix: str) -> None:
        self.target, self.suffix = target, suffix
        self.folder = target.with_name(target.name + ".parts")

    # ---- creation and resumption -----------------------------------------------------------------------

    def known(self) -> dict[str, Any] | None:
        """Return the manifest of an interrupted job, or None.

        Raises:
            PredictError: the folder exists and belongs to something else.
        """
        try:
            return unseal(read_regular(self.folder / MANIFEST, MAX_RECORD_BYTES))
        except FileNotFoundError:
            strays = [p.name for p in self.folder.iterdir()][:5] if self.folder.is_dir() else []
            if [name for name in strays if not name.startswith((".", "rank-"))]:
                self._not_ours(f"holds {strays}")
            return None
        except (ValueError, OSError) as error:
            self._not_ours(
                f"its {MANIFEST} cannot be used ({error})", "; --overwrite (overwrite=True) removes it and starts over"
            )

    def _not_ours(self, content: str, more: str = "") -> NoReturn:
        raise PredictError(
            f"{self.folder}: {content}; expected the parts of an earlier run, or no folder. Move the folder, or select "
            f"another output{more}",
            path=str(self.folder),
        )

    def clear(self) -> None:
        """Remove the parts of an earlier job, complete or damaged.

        Raises:
            PredictError: the folder contains other files.
        """
        if not self.folder.is_dir():
            return
        strays = sorted(path.name for path in self.folder.iterdir() if not _OWN_NAME(path.name))
        if strays:
            self._not_ours(f"holds {strays[:5]}")
        self._remove()

    def _remove(self) -> None:
        """Remove the folder; rename it first, because other ranks may write into it meanwhile."""
        gone = self.folder.with_name(f".{self.folder.name[:200]}.{os.getpid()}.gone")
        self.folder.rename(gone)
        sync_folder(gone.parent)  # or a power loss could restore its name without its content
        shutil.rmtree(gone, ignore_errors=True)

    def begin(self, identity: Mapping[str, Any], part_rows: int, *, replace: bool) -> None:
        """Create the folder, or resume in an existing one.

        Args:
            identity: identity of the job.
            part_rows: rows of a part.
            replace: whether an existing output may be replaced.

        Raises:
            PredictError: the output exists, or the parts belong to another job.
        """
        manifest = self.known()
        if self.target.is_dir():
            raise PredictError(f"{self.target}: is a folder, expected a file name", path=str(self.target))
        if not self.target.parent.is_dir():
            raise PredictError(
                f"{self.target}: the folder {self.target.parent} does not exist. Create it first.",
                path=str(self.target),
            )
        may_replace = replace if manifest is None else manifest["replace"] or (self.folder / JOINING).exists()
        if self.target.exists() and not may_replace:
            raise PredictError(
                f"{self.target}: exists already. Select another output, or start over with --overwrite "
                "(overwrite=True), which replaces it.",
                path=str(self.target),
            )
        if manifest is not None and self.has_parts():
            self._compare(manifest, identity)
        elif manifest is not None:
            manifest = None  # no part was finished, so there is nothing to resume
        content = {
            **identity, "part_rows": part_rows, "replace": replace if manifest is None else manifest["replace"],
        }  # fmt: skip
        with self.writing():
            make_folders(self.folder)
            if manifest != content:
                write_atomically(self.folder / MANIFEST, [seal(content)])
            # Status files of earlier ranks; ranks that wait for this job write theirs again.
            old = (*self.folder.glob("rank-*"), *self.folder.glob(".*.tmp"))
            for leftover in (*old, *self.target.parent.glob(f".{self.target.name[:200]}.*.tmp")):
                if leftover.is_dir() and not leftover.is_symlink():
                    shutil.rmtree(leftover, ignore_errors=True)
                else:
                    leftover.unlink(missing_ok=True)
            # Removed folders after an interrupted deletion.
            prefix = f".{self.folder.name[:200]}."
            for entry in self.target.parent.iterdir():
                if entry.name.startswith(prefix) and entry.name.endswith(".gone") and entry.is_dir():
                    shutil.rmtree(entry, ignore_errors=True)

    def expect(self, identity: Mapping[str, Any]) -> None:
        """Check that the folder, created by rank 0, belongs to this job.

        Raises:
            PredictError: it belongs to another job.
        """
        if (manifest := self.known()) is not None:
            self._compare(manifest, identity)

    def drop_if_empty(self) -> None:
        """Remove the folder if it contains no finished part."""
        if (self.folder / MANIFEST).exists() and not self.has_parts():
            shutil.rmtree(self.folder, ignore_errors=True)

    def has_parts(self) -> bool:
        """Return whether a part is finished."""
        return next(self.folder.glob("part-*.json"), None) is not None

    def _compare(self, manifest: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
        changed = differences({k: v for k, v in manifest.items() if k not in ("replace", "part_rows")}, identity)
        # Parts of "stop" contain no invalid row, so they equal those of "skip".
        if changed and changed != {"options.on_error": ("stop", "skip")}:
            lines = [f"{name}: was {was!r}, now {now!r}" for name, (was, now) in changed.items()]
            raise PredictError(
                f"{self.folder}: found the parts of a job with another input, model or options:\n{capped(lines)}\n"
                "expected the same. Use the options of that job to resume it, or start over with --overwrite "
                "(overwrite=True).",
                path=str(self.folder),
                problems=lines,
            )

    # ---- parts -----------------------------------------------------------------------------------------

    def _data(self, number: int) -> Path:
        return self.folder / f"part-{number:08d}.{self.suffix}"

    def data_name(self, number: int) -> str:
        """Return the file name of a part."""
        return self._data(number).name

    def numbers(self) -> list[int]:
        """Return the numbers of all recorded parts, complete or not."""
        return sorted(
            int(path.stem.removeprefix("part-")) for path in self.folder.glob("part-" + "[0-9]" * 8 + ".json")
        )

    def _record(self, number: int) -> Path:
        return self.folder / f"part-{number:08d}.json"

    def record(self, number: int) -> dict[str, Any] | None:
        """Return the record of a finished part, or None."""
        try:
            record = unseal(read_regular(self._record(number), MAX_RECORD_BYTES))
            whole = self._data(number).stat().st_size == record["bytes"]
        except (OSError, ValueError, KeyError):
            return None
        return record if whole else None

    def commit(self, number: int, chunks: Iterable[bytes], record: dict[str, Any]) -> None:
        """Write a part and then its record, which is completed while ``chunks`` are produced.

        Raises:
            PredictError: writing failed.
        """
        digest, size = hashlib.sha256(), 0

        def hashed() -> Iterator[bytes]:
            nonlocal size
            for chunk in chunks:
                digest.update(chunk)
                size += len(chunk)
                yield chunk

        with self.writing():
            write_atomically(self._data(number), hashed())
            record |= {"bytes": size, "sha256": digest.hexdigest()}
            write_atomically(self._record(number), [seal(record)])

    def blocks(self, number: int) -> Iterator[bytes]:
        """Yield the bytes of a finished part.

        Raises:
            DamagedPart: after the last block, if the bytes differ from the record, or there is no such part.
        """
        record = self.record(number)
        try:
            descriptor = open_regular(self._data(number))
        except CheckpointError:
            raise DamagedPart(number) from None
        digest = hashlib.sha256()
        with os.fdopen(descriptor, "rb") as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
                yield block
        if record is None or record.get("sha256") != digest.hexdigest():
            raise DamagedPart(number)

    def is_whole(self, number: int) -> bool:
        """Return whether a part is finished and its bytes agree with its record."""
        try:
            for _ in self.blocks(number):
                pass
        except (DamagedPart, OSError):
            return False
        return True

    def discard(self, number: int) -> None:
        """Mark a part as unfinished.

        Raises:
            PredictError: its record cannot be removed.
        """
        with self.writing():
            self._record(number).unlink(missing_ok=True)

    def finish(self, count: int, writer: Writer) -> None:
        """Join the parts to the output file, and remove them.

        Raises:
            DamagedPart: a part differs from its record; no output is written.
            PredictError: writing failed.
        """
        with self.writing():
            # An output next to these parts belongs to this job and may be replaced.
            write_atomically(self.folder / JOINING, ())
            sizes = [(self.record(number) or {}).get("bytes") for number in range(count)]
            if None in sizes:
                raise DamagedPart(sizes.index(None))
            pieces = Pieces(lambda: (self.blocks(number) for number in range(count)), sum(filter(None, sizes)))
            write_atomically(self.target, writer.joined(pieces))
        with suppress(OSError):
            self._remove()

    @property
    def again(self) -> str:
        """How to resume the job, for messages."""
        try:
            overwrites = bool((self.known() or {}).get("replace"))
        except PredictError:
            overwrites = False
        # With --overwrite the job would start over again.
        return f"run the same command again{' without --overwrite (overwrite=True)' if overwrites else ''}"

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Convert errors of the disk to errors that describe the remaining parts."""
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            found = f"no space is left ({error.strerror})" if full else f"writing failed ({error.strerror or error})"
            advice = "Free some space" if full else "Check the disk and the permissions of the folder,"
            whole = len(self.numbers())
            raise PredictError(
                f"{self.folder.parent}: {found}; expected to write a part. The {whole} finished parts are kept in "
                f"{self.folder.name}. {advice} and {self.again}, which resumes from them",
                path=str(self.folder.parent),
                errno=error.errno,
                finished=whole,
            ) from error

    # ---- ranks -----------------------------------------------------------------------------------------

    def write_rank_status(self, rank: int, state: Mapping[str, Any]) -> None:
        """Write the status of a rank; does nothing if the folder was removed."""
        with suppress(OSError):
            path = self.folder / f"rank-{rank:05d}.json"
            temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            temporary.write_bytes(seal(state))
            temporary.replace(path)

    def read_rank_status(self, rank: int) -> dict[str, Any]:
        """Return the last status of a rank."""
        try:
            return unseal(read_regular(self.folder / f"rank-{rank:05d}.json", MAX_RECORD_BYTES))
        except (OSError, ValueError):
            return {}

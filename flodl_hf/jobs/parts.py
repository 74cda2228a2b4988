"""The folder beside the output in which a run lays down its parts, and the one step that makes a file of them.

Decides when a part is there: its record is written last, and without its record a part does not exist. So a run can be
ended at any point, by any means, and goes on from the parts that are there. Records and manifest are sealed, and a
record holds the SHA-256 of its part, which is compared when a run goes on and again while parts are joined: bytes that
changed on the disk are never part of an output. The folder is gone when the output is written.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from flodl.errors import CheckpointError, capped
from flodl.files import make_folders, open_regular, read_regular, seal, sync_folder, unseal, write_atomically
from flodl_hf.errors import PredictError
from flodl_hf.jobs.identity import differences
from flodl_hf.jobs.write import Pieces, Writer

__all__ = ["DamagedPart", "Parts"]

MANIFEST = "manifest.json"
JOINING = "joining"
BLOCK_BYTES = 1 << 20
MOST = 16 << 20
"""Bytes of a manifest or a record."""
_OWN_NAME = re.compile(r"(manifest|part-\d{8}|rank-\d{5})\.[a-z]+|joining|\..*").fullmatch


class DamagedPart(Exception):
    """A finished part that is not as it was written: its ``number``. Handled by run, never seen by a caller."""

    def __init__(self, number: int) -> None:
        super().__init__(f"part {number}")
        self.number = number


class Parts:
    """The parts of one output file.

    Args:
        target: the output file.
        suffix: of the parts.
    """

    def __init__(self, target: Path, suffix: str) -> None:
        self.target, self.suffix = target, suffix
        self.folder = target.with_name(target.name + ".parts")

    # ---- laying out, and going on ----------------------------------------------------------------------

    def known(self) -> dict[str, Any] | None:
        """Return the manifest of a run that was begun, or None.

        Raises:
            PredictError: the folder is there and is no such folder.
        """
        try:
            return unseal(read_regular(self.folder / MANIFEST, MOST))
        except FileNotFoundError:
            strays = [p.name for p in self.folder.iterdir()][:5] if self.folder.is_dir() else []
            if [name for name in strays if not name.startswith((".", "rank-"))]:
                self._not_ours(f"holds {strays}")
            return None
        except (ValueError, OSError) as error:
            self._not_ours(
                f"its {MANIFEST} cannot be used ({error})", "; --restart (restart=True) removes it and begins anew"
            )

    def _not_ours(self, found: str, more: str = "") -> NoReturn:
        raise PredictError(
            f"{self.folder}: {found}; expected the parts of an earlier run, or nothing. Move the folder away, or name "
            f"another output{more}",
            path=str(self.folder),
        )

    def clear(self) -> None:
        """Remove the parts of an earlier run, whole or damaged.

        Raises:
            PredictError: the folder holds something else.
        """
        if not self.folder.is_dir():
            return
        strays = sorted(path.name for path in self.folder.iterdir() if not _OWN_NAME(path.name))
        if strays:
            self._not_ours(f"holds {strays[:5]}")
        self._remove()

    def _remove(self) -> None:
        """Remove the folder: renamed first, because other ranks may write into it while it is emptied."""
        gone = self.folder.with_name(f".{self.folder.name[:200]}.{os.getpid()}.gone")
        self.folder.rename(gone)
        sync_folder(gone.parent)  # or a power loss could restore its name without its content
        shutil.rmtree(gone, ignore_errors=True)

    def begin(self, identity: Mapping[str, Any], part_rows: int, *, replace: bool) -> None:
        """Lay out the folder, or resume in an existing one.

        Args:
            identity: identity of the job.
            part_rows: rows of a part.
            replace: the output may exist already.

        Raises:
            PredictError: the output is there, or parts of a run of something else are.
        """
        manifest = self.known()
        if self.target.is_dir():
            raise PredictError(f"{self.target}: is a folder; expected the name of a file", path=str(self.target))
        if not self.target.parent.is_dir():
            raise PredictError(
                f"{self.target}: there is no folder {self.target.parent}; make it first", path=str(self.target)
            )
        may_replace = replace if manifest is None else manifest["replace"] or (self.folder / JOINING).exists()
        if self.target.exists() and not may_replace:
            raise PredictError(
                f"{self.target}: exists already; name another output, or start over with --restart (restart=True), "
                "which replaces it",
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
            # Files of an earlier run's ranks; ranks that wait for this run write theirs again.
            old = (*self.folder.glob("rank-*"), *self.folder.glob(".*.tmp"))
            for leftover in (*old, *self.target.parent.glob(f".{self.target.name[:200]}.*.tmp")):
                if leftover.is_dir() and not leftover.is_symlink():
                    shutil.rmtree(leftover, ignore_errors=True)
                else:
                    leftover.unlink(missing_ok=True)
            # Finished parts that a kill kept from being removed.
            prefix = f".{self.folder.name[:200]}."
            for entry in self.target.parent.iterdir():
                if entry.name.startswith(prefix) and entry.name.endswith(".gone") and entry.is_dir():
                    shutil.rmtree(entry, ignore_errors=True)

    def expect(self, identity: Mapping[str, Any]) -> None:
        """Check that the folder, laid out by the first rank, is of this job.

        Raises:
            PredictError: it is of another one.
        """
        if (manifest := self.known()) is not None:
            self._compare(manifest, identity)

    def drop_if_empty(self) -> None:
        """Remove the folder if nothing was finished in it."""
        if (self.folder / MANIFEST).exists() and not self.has_parts():
            shutil.rmtree(self.folder, ignore_errors=True)

    def has_parts(self) -> bool:
        """Return whether a part is finished."""
        return next(self.folder.glob("part-*.json"), None) is not None

    def _compare(self, manifest: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
        parted = differences({k: v for k, v in manifest.items() if k not in ("replace", "part_rows")}, identity)
        # Parts that were finished under "stop" contain no faulty row and are what "skip" would have written.
        if parted and parted != {"options.on_error": ("stop", "skip")}:
            lines = [f"{name}: begun with {was!r}, now {now!r}" for name, (was, now) in parted.items()]
            raise PredictError(
                f"{self.folder}: holds the parts of a run with other input, model or options:\n{capped(lines)}\n"
                "expected the same; give the options of that run to continue it, or start over with --restart "
                "(restart=True)",
                path=str(self.folder),
                problems=lines,
            )

    # ---- parts -----------------------------------------------------------------------------------------

    def _data(self, number: int) -> Path:
        return self.folder / f"part-{number:08d}.{self.suffix}"

    def data_name(self, number: int) -> str:
        """Return the name of a part's file."""
        return self._data(number).name

    def numbers(self) -> list[int]:
        """Return the numbers of all parts that have a record, whole or not."""
        return sorted(
            int(path.stem.removeprefix("part-")) for path in self.folder.glob("part-" + "[0-9]" * 8 + ".json")
        )

    def _record(self, number: int) -> Path:
        return self.folder / f"part-{number:08d}.json"

    def record(self, number: int) -> dict[str, Any] | None:
        """Return what is known of a finished part; None if it is not finished."""
        try:
            record = unseal(read_regular(self._record(number), MOST))
            whole = self._data(number).stat().st_size == record["bytes"]
        except (OSError, ValueError, KeyError):
            return None
        return record if whole else None

    def commit(self, number: int, chunks: Iterable[bytes], record: dict[str, Any]) -> None:
        """Write a part, and then its record, which is filled in while ``chunks`` are made.

        Raises:
            PredictError: it cannot be written.
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
            DamagedPart: after the last of them, that they are not what was written; or there is no such part.
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
        """Return whether a part is finished and its bytes are those that were written."""
        try:
            for _ in self.blocks(number):
                pass
        except (DamagedPart, OSError):
            return False
        return True

    def discard(self, number: int) -> None:
        """Have a part be unfinished.

        Raises:
            PredictError: it cannot be removed.
        """
        with self.writing():
            self._record(number).unlink(missing_ok=True)

    def finish(self, count: int, writer: Writer) -> None:
        """Make one file of the parts, and remove them.

        Raises:
            DamagedPart: one of them is not as it was written; there is no file then.
            PredictError: it cannot be written.
        """
        with self.writing():
            # Whoever finds an output beside these parts may replace it: it is theirs.
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
        """What to do to go on, in words."""
        try:
            begun_anew = bool((self.known() or {}).get("replace"))
        except PredictError:
            begun_anew = False
        # What was begun anew over an output would be begun anew once more.
        return f"run the same command again{' without --restart (restart=True)' if begun_anew else ''}"

    def writing(self) -> _Writing:
        """Return a context that turns failures of the disk into errors that say what is left."""
        return _Writing(self)

    # ---- ranks -----------------------------------------------------------------------------------------

    def tell(self, rank: int, state: Mapping[str, Any]) -> None:
        """Write what a rank has to say of itself; nothing happens where the folder is gone."""
        with suppress(OSError):
            path = self.folder / f"rank-{rank:05d}.json"
            beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            beside.write_bytes(seal(state))
            beside.replace(path)

    def told(self, rank: int) -> dict[str, Any]:
        """Return what a rank last said of itself."""
        try:
            return unseal(read_regular(self.folder / f"rank-{rank:05d}.json", MOST))
        except (OSError, ValueError):
            return {}


class _Writing:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, OSError):
            return
        folder = self._parts.folder
        whole = len(self._parts.numbers())
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        found = f"no space is left ({error.strerror})" if full else f"writing failed ({error.strerror or error})"
        advice = "Free some space" if full else "Check the disk, and that the folder may be written,"
        raise PredictError(
            f"{folder.parent}: {found}; expected to write a part; the {whole} finished parts are kept in "
            f"{folder.name}. {advice} and {self._parts.again}, which goes on from there",
            path=str(folder.parent),
            errno=error.errno,
            finished=whole,
        ) from error

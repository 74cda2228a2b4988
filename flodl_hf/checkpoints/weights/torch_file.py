"""`BinShard`: an open ``pytorch_model.bin`` with the interface of a safetensors shard.

Decides how the two containers of torch files are opened: the zip archive (torch 1.6 and later) and the plain
sequence of programs and storages before it.
"""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, NamedTuple, NoReturn
from zipfile import ZIP_STORED, BadZipFile, ZipFile

from torch import Tensor

from flodl.errors import CheckpointError, capped, printable
from flodl.files import POINTER_ADVICE, is_pointer
from flodl.system import read_at
from flodl_hf.checkpoints.weights.manifest import DTYPES, Shard, map_extents, read_extents
from flodl_hf.checkpoints.weights.prefetch import Extent
from flodl_hf.checkpoints.weights.torch_program import (
    Machine,
    StorageRecord,
    TensorRecord,
    state_table,
    storage_record,
)

# torch/serialization.py: results of the first two programs of a file before torch 1.6.
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
_LOCAL = struct.Struct("<4s5H3L2H")  # the header of a zip member
_END_SIZE = 22  # of the end record, without its comment
_MAX_PROGRAM = 64 << 20  # bytes
_MAX_DIRECTORY = 4 << 20  # bytes: about 50,000 members, while the files of torch have one for each storage
_ENCRYPTED = 0x1
_PIECE = 4 << 20
_THREADS = 4


class BinShard(Shard):
    """An open ``.bin`` file."""

    def __init__(self, descriptor: int, name: str, path: str) -> None:
        super().__init__(descriptor, name, path)
        self._records: dict[str, TensorRecord] = {}
        self._storages: dict[str, Member] = {}

    def parse(self) -> None:
        """Read the program of the file and check its result; no weights are read.

        Raises:
            UnsafeFileError: the file does more than build tensors.
            CheckpointError: it is damaged, or no table of tensors.
        """
        descriptor = self._open_descriptor()
        if is_pointer(read_at(descriptor, 64, 0)):
            raise CheckpointError(f"{self._where}: {POINTER_ADVICE}", path=self._where, problems=[POINTER_ADVICE])
        is_archive = read_at(descriptor, 4, 0) == b"PK\x03\x04"
        with _Source(io.FileIO(os.dup(descriptor))) as source:
            value = self._parse_archive(descriptor, source) if is_archive else self._parse_legacy(descriptor, source)
        self._records = state_table(value, self._where, self.file.size)
        for record in set(self._records.values()):
            length = self._place(record.storage).length
            if length != record.storage.nbytes:
                self._fail(
                    f"storage {printable(record.storage.key)} has {length:,} bytes, {record.storage.nbytes:,} declared"
                )
        self.entries = {name: (record.storage.dtype, record.shape) for name, record in self._records.items()}
        first: dict[TensorRecord, str] = {}
        self.ties = {
            name: kept
            for name, record in self._records.items()
            if record.numel and (kept := first.setdefault(record, name)) != name
        }

    def read(self, names: Sequence[str], *, mapped: bool = False) -> list[Tensor]:
        """Return the tensors for ``names``, in that order, copied or mapped; ties are one tensor.

        Copied bytes are compared with the checksums of the archive.
        """
        descriptor = self._open_descriptor()
        records = {name: self._records[name] for name in names}
        places = {record: self._extent(record) for record in records.values()}
        unique = sorted(places, key=lambda record: places[record].start)
        extents = [places[record] for record in unique]
        if not mapped:
            keys = dict.fromkeys(record.storage.key for record in unique)
            check_sums(descriptor, {f"data/{key}": self._storages[key] for key in keys}, self._where)
        flats = (map_extents if mapped else read_extents)(descriptor, self._where, extents)
        ready = {}
        for record, flat in zip(unique, flats, strict=True):
            strided = flat.as_strided(record.shape, record.strides)
            # A dimension of one element may have any stride in the file; a view of the flat run has the usual one.
            ready[record] = flat.view(record.shape) if strided.is_contiguous() else strided.contiguous()
        return [ready[records[name]] for name in names]

    def _parse_archive(self, descriptor: int, source: _Source) -> Any:
        try:
            members = _stored_members(source, descriptor)
        except (BadZipFile, NotImplementedError, OSError, OverflowError, ValueError, struct.error) as error:
            self._fail(printable(str(error))[1:-1])
        programs = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(programs) != 1:
            self._fail(f"found {len(programs)} members named data.pkl")
        prefix = programs[0].removesuffix("data.pkl")
        if any(name.startswith(f"{prefix}code/") for name in members) or f"{prefix}constants.pkl" in members:
            self._fail("it is a TorchScript program and not a table of tensors")
        order = members.get(f"{prefix}byteorder")
        if order is not None and read_at(descriptor, min(order[1], 16), order[0]) != b"little":
            self._fail("its numbers are not little-endian")
        storages = f"{prefix}data/"
        self._storages = {
            name.removeprefix(storages): member for name, member in members.items() if name.startswith(storages)
        }
        check_sums(descriptor, {"data.pkl": members[programs[0]]}, self._where)
        start, length, _ = members[programs[0]]
        source.seek(start)
        value = Machine(source, self._where, storage_record).run()
        if source.tell() != start + length:
            self._fail("its pickle program has another length")
        return value

    def _parse_legacy(self, descriptor: int, source: BinaryIO) -> Any:
        source.seek(0)
        storages: dict[str, StorageRecord] = {}

        def remember(reference: Any) -> StorageRecord:
            record = storage_record(reference)
            if storages.setdefault(record.key, record) != record:
                raise ValueError(f"storage {record.key} is described in two ways")
            return record

        def run() -> Any:
            return Machine(source, self._where, remember).run()

        if self.file.size == 0:
            self._fail("it is empty")
        if run() != _LEGACY_MAGIC:
            self._fail("it does not begin like a torch file")
        if run() != _LEGACY_PROTOCOL:
            self._fail("it was written by an unknown version of torch")
        system = run()
        if not isinstance(system, dict) or system.get("little_endian") is not True:
            self._fail("its numbers are not little-endian")
        value, keys = run(), run()
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or len(set(keys)) != len(keys):
            self._fail("its list of storages is damaged")
        if set(keys) != set(storages):
            self._fail("its list of storages is not the one that its tensors use")
        position = source.tell()
        for key in keys:
            count = int.from_bytes(read_at(descriptor, 8, position), "little")
            if count != storages[key].numel:
                self._fail(f"storage {printable(key)} has {count:,} numbers, {storages[key].numel:,} declared")
            self._storages[key] = Member(position + 8, storages[key].nbytes)
            position += 8 + storages[key].nbytes
            if position > self.file.size:
                self._fail(f"it ends inside storage {printable(key)}")
        if position != self.file.size:
            self._fail(f"{self.file.size - position:,} bytes follow the last storage")
        return value

    def _place(self, storage: StorageRecord) -> Member:
        if storage.key not in self._storages:
            self._fail(f"storage {printable(storage.key)} is not in the file")
        return self._storages[storage.key]

    def _extent(self, record: TensorRecord) -> Extent:
        """Return the bytes from the first to the last number of ``record``, as one flat run."""
        dtype, size = record.storage.dtype, DTYPES[record.storage.dtype].itemsize
        start = self._place(record.storage).start + record.offset * size
        return Extent(record.storage.key, dtype, (record.span,), start, record.span * size)

    def _fail(self, problem: str) -> NoReturn:
        raise CheckpointError(
            f"{self._where}: not a usable torch file: {problem}; expected a state_dict written by torch.save; "
            f"fetch the file again",
            path=self._where,
            problems=[problem],
        )


class _Source(io.BufferedReader):
    """A file that is read in order; raises a ValueError at its end, and if a program or directory is too long."""

    left = _MAX_PROGRAM

    def read(self, count: int | None = -1) -> bytes:
        """Return the next ``count`` bytes; all others for a negative number."""
        self.left -= max(count or 0, 0)
        if self.left < 0:
            raise ValueError("it is too long")
        data = super().read(count)
        if len(data) < (count or 0):
            raise ValueError("it ends too early")
        return data

    def readline(self, count: int | None = -1) -> bytes:
        """Return the bytes until the end of a line, at most 256."""
        return super().readline(256)


class Member(NamedTuple):
    """Byte range of a member in the file, and its CRC-32; 0 if none was written."""

    start: int
    length: int
    checksum: int = 0


def _stored_members(source: _Source, descriptor: int) -> dict[str, Member]:
    """Return the members of an archive, keyed by name.

    Raises:
        ValueError: not a whole zip archive, or members that are compressed, encrypted, doubled, overlapping or outside
            the file.
    """
    members: dict[str, Member] = {}
    size = os.fstat(descriptor).st_size
    end_record = read_at(descriptor, _END_SIZE, size - _END_SIZE) if size > _END_SIZE else b""
    if end_record[:4] != b"PK\x05\x06" or end_record[-2:] != bytes(2):
        raise ValueError("its end is missing, or other bytes follow it")
    source.left = _MAX_DIRECTORY
    with ZipFile(source) as archive:
        for info in archive.infolist():
            name = info.orig_filename
            if info.compress_type != ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & _ENCRYPTED:
                raise ValueError(f"member {printable(name)} is compressed or encrypted, expected it stored as it is")
            if name in members:
                raise ValueError(f"member {printable(name)} is present twice")
            head = read_at(descriptor, _LOCAL.size, info.header_offset)
            fields = _LOCAL.unpack(head)
            if fields[0] != b"PK\x03\x04" or fields[3] != ZIP_STORED:
                raise ValueError("a member and its directory entry disagree")
            start = info.header_offset + _LOCAL.size + fields[9] + fields[10]
            members[name] = Member(start, info.file_size, info.CRC)
        if min((info.header_offset for info in archive.infolist()), default=0):
            raise ValueError("other bytes precede it")
        end = 0
        for name, (start, length, _) in sorted(members.items(), key=lambda item: item[1]):
            if length and start < end:
                raise ValueError(f"member {printable(name)} overlaps another")
            if start + length > archive.start_dir:
                raise ValueError(f"member {printable(name)} reaches beyond the file")
            end = max(end, start + length)
    source.left = _MAX_PROGRAM
    return members


def check_sums(descriptor: int, members: Mapping[str, Member], path: str) -> None:
    """Compare members with their checksums, several at a time.

    Args:
        descriptor: the open archive.
        members: by name.
        path: the file, for messages.

    Raises:
        CheckpointError: bytes differ from their checksums; all affected members are named.
    """

    def differs(member: Member) -> bool:
        value, at, end = 0, member.start, member.start + member.length
        while at < end:
            piece = read_at(descriptor, min(_PIECE, end - at), at)
            if not piece:
                return True
            value = zlib.crc32(piece, value)
            at += len(piece)
        return value != member.checksum

    known = {name: member for name, member in members.items() if member.checksum}
    if len(known) > 1 and sum(member.length for member in known.values()) > _PIECE:
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
            results = list(pool.map(differs, known.values()))
    else:
        results = [differs(member) for member in known.values()]
    damaged = [printable(name) for name, bad in zip(known, results, strict=True) if bad]
    if damaged:
        raise CheckpointError(
            f"{path}: {len(damaged)} members are damaged:\n{capped(damaged)}\nfound bytes that contradict their "
            "checksums; the file is damaged, fetch it again",
            path=path,
            problems=[f"{name}: checksum differs" for name in damaged],
        )

"""`BinShard`: an open ``pytorch_model.bin`` with the interface of a safetensors shard.

Decides how the two containers of torch files are opened: the zip archive (torch 1.6 and later) and the plain
sequence of programs and storages before it.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from flodl.errors import CheckpointError, capped, printable
from flodl.files import POINTER_ADVICE, is_pointer, open_regular
from flodl.system import read_at
from flodl_hf.checkpoints.weights.checkpoint.manifest import DTYPES
from flodl_hf.checkpoints.weights.checkpoint.parallel_read import Extent
from flodl_hf.checkpoints.weights.checkpoint.shard import OpenShard, map_extents, read_extents
from flodl_hf.checkpoints.weights.restricted_unpickler.opcodes import Machine
from flodl_hf.checkpoints.weights.restricted_unpickler.tensors import (
    NAMES,
    StorageRecord,
    TensorRecord,
    state_table,
    storage_record,
)

# torch/serialization.py: results of the first two programs of a file before torch 1.6.
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
_BUFFER = 64 << 10


def read_bin(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the tensors of a ``.bin`` file by name, in the order of the file, without executing anything.

    Names that share one tensor in the file share one here.

    Raises:
        UnsafeFileError: the file does more than build tensors; the message names the operation.
        CheckpointError: it is damaged, or no table of tensors.
    """
    shard = BinShard(open_regular(path), Path(path).name, str(path))
    try:
        shard.parse()
        names = list(shard.entries)
        return dict(zip(names, shard.read(names), strict=True))
    finally:
        shard.close()


class BinShard(OpenShard):
    """An open ``.bin`` file."""

    def __init__(self, descriptor: int, name: str, where: str) -> None:
        super().__init__(descriptor, name, where)
        self._records: dict[str, TensorRecord] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self._members: dict[str, Member] = {}

    def parse(self) -> None:
        """Read the program of the file and check its result; no weights are read.

        Raises:
            UnsafeFileError: the file does more than build tensors.
            CheckpointError: it is damaged, or no table of tensors.
        """
        descriptor = self._open_descriptor()
        if is_pointer(read_at(descriptor, 64, 0)):
            raise CheckpointError(f"{self._where}: {POINTER_ADVICE}", path=self._where, problems=[POINTER_ADVICE])
        if read_at(descriptor, 4, 0) == b"PK\x03\x04":
            value = self._parse_archive(descriptor)
        else:
            value = self._parse_legacy(descriptor)
        self._records = state_table(value, self._where, self.file.size)
        for record in set(self._records.values()):
            _, length = self._place(record.storage)
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
        unique = sorted(dict.fromkeys(records.values()), key=self._start)
        extents = [self._extent(record) for record in unique]
        if not mapped:
            keys = dict.fromkeys(record.storage.key for record in unique)
            members = {f"data/{key}": self._members[key] for key in keys if key in self._members}
            check_sums(descriptor, members, self._where)
        flats = (map_extents if mapped else read_extents)(descriptor, self._where, extents)
        ready = {
            record: flat.view(record.shape)
            if record.is_contiguous
            else flat.as_strided(record.shape, record.strides).contiguous()
            for record, flat in zip(unique, flats, strict=True)
        }
        return [ready[records[name]] for name in names]

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Fill ``tensor``, contiguous, on the CPU, of the stored dtype and shape."""
        tensor.detach().copy_(self.read([name])[0])

    def _parse_archive(self, descriptor: int) -> Any:
        members = stored_members(descriptor, self._where)
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
        self._places = {
            name.removeprefix(storages): place[:2] for name, place in members.items() if name.startswith(storages)
        }
        self._members = {name.removeprefix(storages): member for name, member in members.items()}
        check_sums(descriptor, {"data.pkl": members[programs[0]]}, self._where)
        start, length, _ = members[programs[0]]
        source = _Cursor(descriptor, start, start + length)
        value = Machine(source, self._where, NAMES, storage_record).run()
        if source.position != start + length:
            self._fail("bytes follow its pickle program")
        return value

    def _parse_legacy(self, descriptor: int) -> Any:
        source = _Cursor(descriptor, 0, self.file.size)
        storages: dict[str, StorageRecord] = {}

        def remember(reference: Any) -> StorageRecord:
            record = storage_record(reference)
            if storages.setdefault(record.key, record) != record:
                raise ValueError(f"storage {record.key} is described in two ways")
            return record

        def run() -> Any:
            return Machine(source, self._where, NAMES, remember).run()

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
        position = source.position
        for key in keys:
            count = int.from_bytes(read_at(descriptor, 8, position), "little")
            if count != storages[key].numel:
                self._fail(f"storage {printable(key)} has {count:,} numbers, {storages[key].numel:,} declared")
            self._places[key] = (position + 8, storages[key].nbytes)
            position += 8 + storages[key].nbytes
            if position > self.file.size:
                self._fail(f"it ends inside storage {printable(key)}")
        if position != self.file.size:
            self._fail(f"{self.file.size - position:,} bytes follow the last storage")
        return value

    def _place(self, storage: StorageRecord) -> tuple[int, int]:
        if storage.key not in self._places:
            self._fail(f"storage {printable(storage.key)} is not in the file")
        return self._places[storage.key]

    def _start(self, record: TensorRecord) -> int:
        return self._place(record.storage)[0] + record.offset * DTYPES[record.storage.dtype].itemsize

    def _extent(self, record: TensorRecord) -> Extent:
        """Return the bytes from the first to the last number of ``record``, as one flat run."""
        dtype = record.storage.dtype
        nbytes = record.span * DTYPES[dtype].itemsize
        return Extent(record.storage.key, dtype, (record.span,), self._start(record), nbytes)

    def _fail(self, found: str) -> NoReturn:
        raise CheckpointError(
            f"{self._where}: not a usable torch file: {found}; expected a state_dict written by torch.save; "
            f"fetch the file again",
            path=self._where,
            problems=[found],
        )


class _Cursor:
    """Reads a stretch of a file in order, in large pieces."""

    def __init__(self, descriptor: int, start: int, end: int) -> None:
        self._descriptor = descriptor
        self._end = end
        self._buffer = b""
        self._buffer_start = start
        self.position = start

    def take(self, count: int) -> bytes:
        """Return the next ``count`` bytes, fewer only at the end."""
        at = self.position - self._buffer_start
        if at + count > len(self._buffer):
            size = min(max(count, _BUFFER), self._end - self.position)
            self._buffer = read_at(self._descriptor, max(size, 0), self.position)
            self._buffer_start, at = self.position, 0
        data = self._buffer[at : at + count]
        self.position += len(data)
        return data


_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_MAX_DIRECTORY = 64 << 20
_ENCRYPTED = 0x1


class Member(NamedTuple):
    """Byte range of a member in the file, and its CRC-32; 0 if none was written."""

    start: int
    length: int
    checksum: int


def stored_members(descriptor: int, where: str) -> dict[str, Member]:
    """Return the members, keyed by name.

    Raises:
        CheckpointError: not a whole zip archive, or members that are compressed, encrypted, doubled,
            overlapping or outside the file.
    """
    size = os.fstat(descriptor).st_size
    start, length, count = _directory(descriptor, where, size)
    data = read_at(descriptor, length, start)
    members: dict[str, Member] = {}
    at = 0
    for _ in range(count):
        if at + _CENTRAL.size > len(data):
            _fail(where, "its directory is cut")
        fields = _CENTRAL.unpack_from(data, at)
        if fields[0] != b"PK\x01\x02":
            _fail(where, "its directory is damaged")
        flags, method, packed, unpacked = fields[3], fields[4], fields[8], fields[9]
        name_size, extra_size, comment_size, local = fields[10], fields[11], fields[12], fields[16]
        at += _CENTRAL.size
        raw_name = data[at : at + name_size]
        extra = data[at + name_size : at + name_size + extra_size]
        at += name_size + extra_size + comment_size
        if at > len(data):
            _fail(where, "its directory is cut")
        name = raw_name.decode("utf-8", "backslashreplace")
        unpacked, packed, local = _widen(extra, unpacked, packed, local, where)
        if method != 0 or packed != unpacked or flags & _ENCRYPTED:
            _fail(where, f"member {printable(name)} is compressed or encrypted, expected it stored as it is")
        if name in members:
            _fail(where, f"member {printable(name)} is present twice")
        members[name] = Member(_data_start(descriptor, local, raw_name, where), unpacked, fields[7])
    _check_places(members, start, where)
    return members


def _directory(descriptor: int, where: str, size: int) -> tuple[int, int, int]:
    """Return position, length and number of entries of the central directory."""
    tail_size = min(size, _END.size + 0xFFFF)
    tail = read_at(descriptor, tail_size, size - tail_size)
    found = tail.rfind(b"PK\x05\x06")
    if found < 0 or len(tail) - found < _END.size:
        _fail(where, "it has no zip directory, so it is cut")
    _, disk, _, _, count, length, start, comment = _END.unpack_from(tail, found)
    end = size - tail_size + found
    if end + _END.size + comment != size or disk not in (0, 0xFFFF):
        _fail(where, "bytes follow its zip directory")
    locator_at = end - _END64_LOCATOR.size
    if 0xFFFF in (count,) or 0xFFFFFFFF in (length, start) or disk == 0xFFFF:
        locator = read_at(descriptor, _END64_LOCATOR.size, max(locator_at, 0))
        if len(locator) < _END64_LOCATOR.size or not locator.startswith(b"PK\x06\x07"):
            _fail(where, "its 64-bit zip directory is missing")
        place = _END64_LOCATOR.unpack(locator)[2]
        if place + _END64.size > locator_at:
            _fail(where, "its 64-bit zip directory is outside the file")
        fields = _END64.unpack(read_at(descriptor, _END64.size, place))
        if fields[0] != b"PK\x06\x06":
            _fail(where, "its 64-bit zip directory is damaged")
        count, length, start, end = fields[7], fields[8], fields[9], place
    if start + length > end:
        _fail(where, "its zip directory is outside the file")
    if length > _MAX_DIRECTORY:
        _fail(where, f"its zip directory has {length:,} bytes, expected at most {_MAX_DIRECTORY:,}")
    return start, length, count


def _widen(extra: bytes, unpacked: int, packed: int, local: int, where: str) -> tuple[int, int, int]:
    """Return the three numbers, with values above 32 bits read from the extra field."""
    wide: list[int] = []
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            payload = extra[at + 4 : at + 4 + length]
            wide = [value for (value,) in struct.iter_unpack("<Q", payload[: len(payload) // 8 * 8])]
        at += 4 + length
    result: list[int] = []
    for value in (unpacked, packed, local):
        if value == 0xFFFFFFFF:
            if not wide:
                _fail(where, "its directory lacks a 64-bit size")
            value = wide.pop(0)
        result.append(value)
    return result[0], result[1], result[2]


def _data_start(descriptor: int, local: int, raw_name: bytes, where: str) -> int:
    head = read_at(descriptor, _LOCAL.size + len(raw_name), local) if local < 2**63 else b""
    if len(head) < _LOCAL.size + len(raw_name) or not head.startswith(b"PK\x03\x04"):
        _fail(where, "a member does not begin at the offset in its directory")
    fields = _LOCAL.unpack_from(head)
    if fields[3] != 0 or fields[9] != len(raw_name) or head[_LOCAL.size :] != raw_name:
        _fail(where, "a member and its directory entry disagree")
    return local + _LOCAL.size + fields[9] + fields[10]


def _check_places(members: dict[str, Member], limit: int, where: str) -> None:
    end = 0
    for name, (start, length, _) in sorted(members.items(), key=lambda item: item[1]):
        if length and start < end:
            _fail(where, f"member {printable(name)} overlaps another")
        if start + length > limit:
            _fail(where, f"member {printable(name)} reaches beyond the file")
        end = max(end, start + length)


def _fail(where: str, found: str) -> NoReturn:
    raise CheckpointError(
        f"{where}: not a usable torch file: {found}; expected the zip archive that torch.save writes; "
        f"fetch the file again",
        path=where,
        problems=[found],
    )


_PIECE = 4 << 20
_THREADS = 4


def check_sums(descriptor: int, members: Mapping[str, Member], where: str) -> None:
    """Compare members with their checksums, several at a time.

    Args:
        descriptor: the open archive.
        members: by name.
        where: the file, for messages.

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
            f"{where}: {len(damaged)} members are damaged:\n{capped(damaged)}\nfound bytes that contradict their "
            "checksums; the file is damaged, fetch it again",
            path=where,
            problems=[f"{name}: checksum differs" for name in damaged],
        )

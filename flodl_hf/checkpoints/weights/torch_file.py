"""`BinShard`: an open ``pytorch_model.bin``, read without executing it, with the interface of a safetensors shard.

Decides how the two containers of torch files are opened: the zip archive (torch 1.6 and later) and the plain sequence
of programs and storages before it; and which instructions of a program are supported: pickle protocol 2 as
``torch.save`` emits it for tables of tensors. Nothing is imported or called, the work of a program is limited, and a
tensor uses only bytes of its storage.
"""

from __future__ import annotations

import io
import os
import pickletools
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO, NamedTuple, NoReturn
from zipfile import ZIP_STORED, BadZipFile, ZipFile

from torch import Tensor

from flodl.errors import FlodlError, UnsafeFileError, capped, printable
from flodl.files import POINTER_ADVICE, is_pointer
from flodl.safetensors_header import name_fault
from flodl.system import read_at
from flodl_hf.checkpoints.folders import refused
from flodl_hf.checkpoints.weights.manifest import DTYPES, Shard, map_extents, read_extents
from flodl_hf.checkpoints.weights.prefetch import Extent

# torch/serialization.py: results of the first two programs of a file before torch 1.6.
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
_LOCAL = struct.Struct("<4s5H3L2H")  # the header of a zip member
_END_SIZE = 22  # of the end record, without its comment
_MAX_PROGRAM = 64 << 20  # bytes
_MAX_DIRECTORY = 4 << 20  # bytes: about 50,000 members, while the files of torch have one for each storage
_MAX_STEPS = 3_000_000  # a table of tensors takes about 25 instructions for each
_MAX_DIMS = 8
_ENCRYPTED = 0x1
_PIECE = 4 << 20
_THREADS = 4
_STATE_DICT = "a state_dict written by torch.save. Fetch the file again"


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
            self._fail(POINTER_ADVICE)
        is_archive = read_at(descriptor, 4, 0) == b"PK\x03\x04"
        with _Source(io.FileIO(os.dup(descriptor))) as source:
            value = self._parse_archive(descriptor, source) if is_archive else self._parse_legacy(descriptor, source)
        self._records = state_table(value, self._where, self.file.size)
        first: dict[TensorRecord, str] = {}
        ties = {}
        for name, record in self._records.items():
            key, declared = record.storage.key, record.storage.nbytes
            if key not in self._storages:
                self._fail(f"storage {printable(key)} is not in the file")
            if self._storages[key].length != declared:
                self._fail(f"storage {printable(key)} has {self._storages[key].length:,} bytes, {declared:,} declared")
            if record.numel and (kept := first.setdefault(record, name)) != name:
                ties[name] = kept
        self.entries = {name: (record.storage.dtype, record.shape) for name, record in self._records.items()}
        self.ties = ties

    def read(self, names: Sequence[str], *, mapped: bool = False) -> list[Tensor]:
        """Return the tensors for ``names``, in that order, copied or mapped; ties are one tensor.

        Copied bytes are compared with the checksums of the archive.
        """
        descriptor, records = self._open_descriptor(), {name: self._records[name] for name in names}
        extents = {}
        for record in records.values():
            # The bytes from the first to the last number, as one flat run.
            key, dtype, size = record.storage.key, record.storage.dtype, DTYPES[record.storage.dtype].itemsize
            start = self._storages[key].start + record.offset * size
            extents[record] = Extent(key, dtype, (record.span,), start, record.span * size)
        unique = sorted(extents, key=lambda record: extents[record].start)
        if not mapped:
            keys = dict.fromkeys(record.storage.key for record in unique)
            check_sums(descriptor, {f"data/{key}": self._storages[key] for key in keys}, self._where)
        flats = (map_extents if mapped else read_extents)(descriptor, self._where, [extents[r] for r in unique])
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
        if order is not None and read_at(descriptor, min(order.length, 16), order.start) != b"little":
            self._fail("its numbers are not little-endian")
        storages = f"{prefix}data/"
        self._storages = {
            name.removeprefix(storages): member for name, member in members.items() if name.startswith(storages)
        }
        program = members[programs[0]]
        check_sums(descriptor, {"data.pkl": program}, self._where)
        source.seek(program.start)
        value = run_program(source, self._where, storage_record)
        if source.tell() != program.start + program.length:
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

        if self.file.size == 0:
            self._fail("it is empty")
        if run_program(source, self._where, remember) != _LEGACY_MAGIC:
            self._fail("it does not begin like a torch file")
        if run_program(source, self._where, remember) != _LEGACY_PROTOCOL:
            self._fail("it was written by an unknown version of torch")
        system, value, keys = (run_program(source, self._where, remember) for _ in range(3))
        if not isinstance(system, dict) or system.get("little_endian") is not True:
            self._fail("its numbers are not little-endian")
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

    def _fail(self, problem: str) -> NoReturn:
        raise refused(self._where, f"not a usable torch file: {problem}", _STATE_DICT, problems=[problem])


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
    """Return the members of a whole zip archive by name: stored as they are, each once, without overlaps."""
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
            fields = _LOCAL.unpack(read_at(descriptor, _LOCAL.size, info.header_offset))
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
    """Compare members of an open archive with their checksums, several at a time; the error names all damaged ones."""

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
    if sum(member.length for member in known.values()) > _PIECE:
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
            results = list(pool.map(differs, known.values()))
    else:
        results = [differs(member) for member in known.values()]
    damaged = [printable(name) for name, bad in zip(known, results, strict=True) if bad]
    if damaged:
        found = f"{len(damaged)} members are damaged:\n{capped(damaged)}"
        problems = [f"{name}: checksum differs" for name in damaged]
        raise refused(path, found, "bytes with their checksums. Fetch the file again", problems=problems)


# ---- the program of a file ---------------------------------------------------------------------------------

_MARK = object()
_ALLOWED = b".\x80(N\x88\x89JKM\x8aX}])t\x85\x86\x87qrhjcRbsuaeQ"
_ARGUMENTS = {op.code.encode("latin-1"): op.arg for op in pickletools.opcodes}


def run_program(source: BinaryIO, path: str, storage: Callable[[Any], Any]) -> Any:
    """Return the object that one program builds.

    Args:
        source: the program; its methods raise a ValueError beyond its end and beyond the limits of a program.
        path: the file, for messages.
        storage: given the tuple by which the program refers to a storage, returns a record of it.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for _ in range(_MAX_STEPS):
            code = source.read(1)
            if code == b".":
                (result,) = stack
                return result
            if code not in _ALLOWED:
                raise _unsafe(path, f"instruction 0x{code[0]:02x}")
            argument = _ARGUMENTS[code]
            _step(code, None if argument is None else argument.reader(source), stack, memo, path, storage)
        raise ValueError(f"it takes more than {_MAX_STEPS:,} instructions")
    except FlodlError:
        raise
    except (LookupError, TypeError, ValueError) as error:
        problem = printable(str(error))[1:-1]
        found = f"its pickle program is damaged: {problem}"
        raise refused(path, found, _STATE_DICT, problems=[problem]) from None


def _step(
    code: bytes, argument: Any, stack: list[Any], memo: dict[int, Any], path: str, storage: Callable[[Any], Any]
) -> None:
    """Execute one instruction."""
    match code:
        case b"\x80":
            if argument != 2:
                raise _unsafe(path, f"pickle protocol {argument} (torch.save writes 2)")
        case b"(":
            stack.append(_MARK)
        case b"N" | b"J" | b"K" | b"M" | b"\x8a" | b"X":
            stack.append(argument)
        case b"\x88" | b"\x89":
            stack.append(code == b"\x88")
        case b"}" | b"]" | b")":
            stack.append({b"}": dict, b"]": list, b")": tuple}[code]())
        case b"t":
            stack.append(tuple(_since_mark(stack)))
        case b"\x85" | b"\x86" | b"\x87":
            stack.append(tuple([_pop(stack) for _ in range(code[0] - 0x84)][::-1]))
        case b"q" | b"r":
            memo[argument] = _pop(stack)
            stack.append(memo[argument])
        case b"h" | b"j":
            stack.append(memo[argument])
        case b"c":
            name = argument.replace(" ", ".", 1)
            if name not in NAMES:
                raise _unsafe(path, f"the name {printable(name)}")
            stack.append(NAMES[name])
        case b"R":
            arguments, function = _pop(stack), _pop(stack)
            if not callable(function) or not isinstance(arguments, tuple):
                raise _unsafe(path, "a call of something that is no function on the list")
            stack.append(function(*arguments))
        case b"b":
            # A table of weights carries the versions of its modules as attributes; no tensor depends on them.
            if not isinstance(_pop(stack), dict):
                raise _unsafe(path, "attributes that are no table")
            _top(stack, dict)
        case b"s" | b"u":
            items = [_pop(stack), _pop(stack)][::-1] if code == b"s" else _since_mark(stack)
            table = _top(stack, dict)
            for key, value in zip(items[::2], items[1::2], strict=True):
                # Only flat keys: hashing deeply nested tuples can take unlimited time.
                if not isinstance(key, str | int):
                    raise ValueError(f"a key that is a {type(key).__name__}")
                table[key] = value
        case b"a" | b"e":
            more = [_pop(stack)] if code == b"a" else _since_mark(stack)
            _top(stack, list).extend(more)
        case b"Q":
            stack.append(storage(_pop(stack)))


def _unsafe(path: str, problem: str) -> FlodlError:
    found = f"its pickle program contains {problem}, which a table of tensors does not need"
    expected = f"only the names {', '.join(sorted(NAMES))}. Nothing was executed; use safetensors instead"
    return refused(path, found, expected, problems=[problem], kind=UnsafeFileError)


def _pop(stack: list[Any]) -> Any:
    if (value := stack.pop()) is _MARK:
        raise ValueError("it takes a value where there is none")
    return value


def _since_mark(stack: list[Any]) -> list[Any]:
    items: list[Any] = []
    while (value := stack.pop()) is not _MARK:
        items.append(value)
    return items[::-1]


def _top(stack: list[Any], kind: type) -> Any:
    if not isinstance(stack[-1], kind):
        raise ValueError(f"it adds to something that is no {kind.__name__}")
    return stack[-1]


@dataclass(frozen=True, slots=True)
class StorageRecord:
    """One run of numbers in the file, by the key that the container knows it under."""

    key: str
    dtype: str
    numel: int

    @property
    def nbytes(self) -> int:
        """Return its size in bytes."""
        return self.numel * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A view of a storage; equal records are one tensor under several names. Offset and strides count numbers."""

    storage: StorageRecord
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Return how many numbers the tensor has."""
        return prod(self.shape)

    @property
    def span(self) -> int:
        """Return the count of storage elements from its first to its last, inclusive."""
        if self.numel == 0:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


def storage_record(reference: Any) -> StorageRecord:
    """Return the storage that a program refers to as ``("storage", class, key, device, count[, view])``.

    Views of other storages, as torch before 0.4 wrote them, are refused.
    """
    match reference:
        case "storage", _StorageClass() as kind, str(key), str(), int(count), *view if _counts((count,)):
            if view in ([], [None]):
                return StorageRecord(key, kind, count)
    raise ValueError("expected ('storage', class, key, device, count)")


def state_table(value: Any, path: str, max_bytes: int) -> dict[str, TensorRecord]:
    """Return a program's result, checked: tensors by name that take no more than ``max_bytes``, the file's size."""
    problems: list[str] = []
    if not isinstance(value, dict):
        problems, value = [f"a {type(value).__name__} instead of a table"], {}
    for name, record in value.items():
        if not isinstance(name, str):
            problems.append(f"{name!r}: the name is no text")
        elif fault := name_fault(name):
            problems.append(f"{printable(name)}: the name {fault}")
        elif not isinstance(record, TensorRecord):
            what = "a table; save its values" if isinstance(record, dict) else f"a {type(record).__name__}"
            problems.append(f"{printable(name)}: {what}")
    if not problems:
        total = sum(record.numel * DTYPES[record.storage.dtype].itemsize for record in set(value.values()))
        if total > max_bytes:
            problems.append(f"its tensors would take {total:,} bytes, the file has {max_bytes:,}")
    if problems:
        found = f"is not a table of tensors only:\n{capped(problems)}\n"
        raise refused(path, found, "a state_dict; save it with model.state_dict()", problems=problems)
    return value


def _rebuild_tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, requires_grad: Any = False, hooks: Any = None,
    metadata: Any = None,
) -> TensorRecord:  # fmt: skip
    if not isinstance(storage, StorageRecord):
        raise ValueError("expected a storage")
    if not _counts((offset,)) or not _counts(shape) or not _counts(strides) or len(shape) != len(strides):
        raise ValueError("expected an offset, sizes and as many strides, none negative")
    if len(shape) > _MAX_DIMS:
        raise ValueError(f"found {len(shape)} dimensions, expected at most {_MAX_DIMS}")
    if hooks or metadata or not isinstance(requires_grad, bool):
        raise ValueError("expected no hooks and no metadata")
    if 0 in shape:
        # A slice that ran off the end of nothing: torch saves its offset all the same.
        return TensorRecord(storage, 0, shape, strides)
    record = TensorRecord(storage, offset, shape, strides)
    if offset + record.span > storage.numel:
        raise ValueError(f"sizes {list(shape)} from {offset} reach beyond the {storage.numel} numbers of the storage")
    if record.numel > record.span:
        # A repeated number costs nothing in the file and anything in memory.
        raise ValueError(f"sizes {list(shape)} show numbers more than once")
    return record


def _rebuild_parameter(data: Any, requires_grad: Any, hooks: Any) -> TensorRecord:
    if not isinstance(data, TensorRecord) or not isinstance(requires_grad, bool) or hooks:
        raise ValueError("expected a tensor, a truth value and no hooks")
    return data


def _counts(values: Any) -> bool:
    return isinstance(values, tuple) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _table() -> dict[str, Any]:  # not dict, which would accept and hash any arguments
    return {}


class _StorageClass(str):
    """A storage class of torch: the name of its number type in safetensors. No program can make one."""


_STORAGES = {
    "Double": "F64", "Float": "F32", "Half": "F16", "BFloat16": "BF16", "Long": "I64", "Int": "I32", "Short": "I16",
    "Char": "I8", "Byte": "U8", "Bool": "BOOL",
}  # fmt: skip
NAMES: dict[str, Any] = {
    "collections.OrderedDict": _table,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    **{f"torch.{name}Storage": _StorageClass(dtype) for name, dtype in _STORAGES.items()},
}
"""Every name that a program may use, with its replacement."""

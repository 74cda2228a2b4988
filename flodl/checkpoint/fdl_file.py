"""Checkpoints in the ``.fdl`` layout of the Rust flodl, plain or gzipped.

Little-endian: magic ``FDLC``; u32 version; 32 bytes of structural hash, all zero when unknown; u32
count; then for each tensor u32 name length, UTF-8 name, u32 number of dimensions, i64 sizes, u8
dtype, u64 byte length, data. Versions 1 and 2 have the same bytes: what changed between them is how
the Rust graphs named their parameters. So both are read alike, ``Checkpoint.version`` says which it
was, and names of version 1 are brought to a model by ``migrate_checkpoint``. Version 2 is written.

A file may come from anywhere. Every length is held against the bytes that are left before memory is
taken for it, and a gzipped file may not unpack to more than ``MAX_GZIP_RATIO`` times its size once it
passes ``GZIP_FLOOR`` bytes.
"""

from __future__ import annotations

import math
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from io import BufferedReader
from types import MappingProxyType
from typing import NoReturn

import torch
from torch import Tensor

from flodl.checkpoint.raw import bytes_of, check_saveable, refuse, tensor_from
from flodl.checkpoint.records import Checkpoint
from flodl.errors import printable
from flodl.files import open_regular, write_atomically
from flodl.safetensors_header import name_fault

__all__ = ["FDL_DTYPES", "GZIP_FLOOR", "MAX_GZIP_RATIO", "read", "scan", "write"]

MAGIC = b"FDLC"
VERSION = 2
MAX_GZIP_RATIO = 200
GZIP_FLOOR = 64 * 1024 * 1024
MAX_DIMS = 8
# 4 bytes of name length, 1 of name, 4 of dimensions, 1 of dtype, 8 of byte length.
MIN_ENTRY_BYTES = 18
MAX_NAME_BYTES = 4096

FDL_DTYPES: Mapping[torch.dtype, int] = MappingProxyType(
    {
        torch.float16: 1,
        torch.bfloat16: 2,
        torch.float32: 3,
        torch.float64: 4,
        torch.int32: 5,
        torch.int64: 6,
    }
)
"""The dtypes of the format and their tags."""

_BY_TAG = {tag: dtype for dtype, tag in FDL_DTYPES.items()}
_REMEDY = "Expected a whole flodl checkpoint, and the file is damaged or none; fetch or write it again."


def write(path: str, tensors: Mapping[str, Tensor], structural_hash: str, metadata: Mapping[str, str]) -> None:
    """Write a version 2 file, gzipped when ``path`` ends in ``.gz``."""
    check_saveable(path, tensors, FDL_DTYPES, "the .fdl format")
    if metadata:
        refuse(path, ["the .fdl format holds no metadata"], "Nothing was written. Save as .safetensors.")
    plain = _plain(tensors, structural_hash)
    write_atomically(path, _packed(path, plain) if path.lower().endswith(".gz") else plain)


def _plain(tensors: Mapping[str, Tensor], structural_hash: str) -> Iterator[bytes | memoryview]:
    yield MAGIC + struct.pack("<I", VERSION) + bytes.fromhex(structural_hash or "00" * 32)
    yield struct.pack("<I", len(tensors))
    for name, tensor in tensors.items():
        encoded = name.encode()
        yield struct.pack("<I", len(encoded)) + encoded
        yield struct.pack(f"<I{tensor.ndim}q", tensor.ndim, *tensor.shape)
        yield struct.pack("<BQ", FDL_DTYPES[tensor.dtype], tensor.numel() * tensor.element_size())
        yield bytes_of(tensor)


def _packed(path: str, plain: Iterator[bytes | memoryview]) -> Iterator[bytes]:
    packer = zlib.compressobj(wbits=31)
    taken = given = 0
    for chunk in plain:
        packed = packer.compress(chunk)
        taken, given = taken + len(chunk), given + len(packed)
        yield packed
    packed = packer.flush()
    given += len(packed)
    if taken > max(GZIP_FLOOR, MAX_GZIP_RATIO * given):
        refuse(
            path,
            [f"packs {taken / given:.0f} to 1, and a reader accepts at most {MAX_GZIP_RATIO} to 1"],
            "Nothing was written. Save as .fdl or .safetensors.",
        )
    yield packed


class _Source:
    """Bytes of a plain file, in order."""

    def __init__(self, path: str, file: BufferedReader, size: int) -> None:
        self.path = path
        self.file = file
        self.position = 0
        self.bound = size
        """No more bytes than this can come; exact for a plain file."""

    def fail(self, problem: str) -> NoReturn:
        refuse(self.path, [f"at byte {self.position}: {problem}"], _REMEDY)

    def take(self, count: int, what: str) -> bytearray:
        """Return exactly ``count`` bytes that may be written to."""
        if count > self.bound - self.position:
            self.fail(f"{what} takes {count} bytes, {self.bound - self.position} are left; the file is truncated")
        data = self.pull(count)
        if len(data) < count:
            self.fail(f"{what} takes {count} bytes, {len(data)} are left; the file is truncated")
        self.position += count
        return data

    def pull(self, count: int) -> bytearray:
        data = bytearray(count)
        got = self.file.readinto(data)
        return data if got == count else data[:got]

    def skip(self, count: int, what: str) -> None:
        if count > self.bound - self.position:
            self.fail(f"{what} takes {count} bytes, {self.bound - self.position} are left; the file is truncated")
        self.file.seek(count, os.SEEK_CUR)
        self.position += count

    def finish(self) -> None:
        if self.position != self.bound:
            self.fail(f"{self.bound - self.position} bytes after the last tensor, expected none")


class _GzipSource(_Source):
    """Bytes of a gzipped file: one member, nothing after it, unpacked no faster than they are asked for."""

    def __init__(self, path: str, file: BufferedReader, size: int) -> None:
        super().__init__(path, file, max(GZIP_FLOOR, MAX_GZIP_RATIO * size))
        self.unpacker = zlib.decompressobj(wbits=31)
        self.starved = False

    def take(self, count: int, what: str) -> bytearray:
        if count > self.bound - self.position:
            self.fail(
                f"{what} takes {count} bytes, past the {self.bound} that a gzipped file of this size may "
                f"unpack to (MAX_GZIP_RATIO={MAX_GZIP_RATIO})"
            )
        return super().take(count, what)

    def pull(self, count: int) -> bytearray:
        # Grows with what really comes, so a length that lies costs nothing.
        data = bytearray()
        while len(data) < count and not self.unpacker.eof:
            part = self.unpack(min(count - len(data), 1 << 20))
            if self.starved and not part:
                break
            data += part
        return data

    def unpack(self, count: int) -> bytes:
        packed = self.unpacker.unconsumed_tail or self.file.read(1 << 16)
        self.starved = not packed
        try:
            return self.unpacker.decompress(packed, count)
        except zlib.error as error:
            self.fail(f"the gzip stream is damaged ({error})")

    def skip(self, count: int, what: str) -> None:
        while count > 0:
            step = min(count, 1 << 20)
            self.take(step, what)
            count -= step

    def finish(self) -> None:
        while not self.unpacker.eof:
            if self.unpack(1):
                self.fail("bytes after the last tensor, expected none")
            if self.starved and not self.unpacker.eof:
                self.fail("the gzip stream ends early; the file is truncated")
        if self.unpacker.unused_data or self.file.read(1):
            self.fail("bytes after the gzip stream, expected none")


class _Head:
    """The fields before the first tensor."""

    def __init__(self, source: _Source) -> None:
        magic = bytes(source.take(4, "the magic number"))
        if magic != MAGIC:
            source.fail(f"begins with {magic!r}, expected {MAGIC!r}")
        (self.version,) = struct.unpack("<I", source.take(4, "the version"))
        if self.version not in (1, VERSION):
            source.fail(f"version {self.version}, expected 1 or {VERSION}")
        digest = bytes(source.take(32, "the structural hash"))
        self.structural_hash = digest.hex() if any(digest) else ""
        (self.count,) = struct.unpack("<I", source.take(4, "the number of tensors"))
        if self.count * MIN_ENTRY_BYTES > source.bound - source.position:
            source.fail(f"{self.count} tensors announced, more than the file can hold")


class _Entry:
    """The fields before one tensor's data."""

    def __init__(self, source: _Source, seen: Mapping[str, object]) -> None:
        (length,) = struct.unpack("<I", source.take(4, "a name's length"))
        if length > MAX_NAME_BYTES:
            source.fail(f"a name of {length} bytes, expected at most {MAX_NAME_BYTES}")
        try:
            self.name = source.take(length, "a name").decode("utf-8")
        except UnicodeDecodeError as error:
            source.fail(f"a name is not UTF-8 ({error.reason})")
        fault = name_fault(self.name)
        if fault:
            source.fail(f"name {printable(self.name)} {fault}")
        if self.name in seen:
            source.fail(f"name {printable(self.name)} stands twice")
        self.what = f"tensor {printable(self.name)}"
        (ndim,) = struct.unpack("<I", source.take(4, f"{self.what}: its number of dimensions"))
        if ndim > MAX_DIMS:
            source.fail(f"{self.what} has {ndim} dimensions, expected at most {MAX_DIMS}")
        self.shape = struct.unpack(f"<{ndim}q", source.take(8 * ndim, f"{self.what}: its shape"))
        if min(self.shape, default=0) < 0:
            source.fail(f"{self.what} has the negative size {min(self.shape)}")
        tag, self.num_bytes = struct.unpack("<BQ", source.take(9, f"{self.what}: its dtype and byte length"))
        if tag not in _BY_TAG:
            source.fail(f"{self.what} has dtype tag {tag}, expected 1 to {len(_BY_TAG)}")
        self.dtype = _BY_TAG[tag]
        expected = math.prod(self.shape) * self.dtype.itemsize
        if self.num_bytes != expected:
            source.fail(f"{self.what} has {self.num_bytes} bytes, its shape {self.shape} takes {expected}")


def read(path: str) -> Checkpoint:
    """Return the contents of an ``.fdl`` or ``.fdl.gz`` file of version 1 or 2."""
    tensors: dict[str, Tensor] = {}
    with _opened(path) as file:
        source = _source(path, file)
        head = _Head(source)
        for _ in range(head.count):
            entry = _Entry(source, tensors)
            data = source.take(entry.num_bytes, entry.what)
            try:
                tensors[entry.name] = tensor_from(data, entry.dtype, entry.shape)
            except ValueError as error:
                source.fail(f"{entry.what}: {error}")
        source.finish()
    return Checkpoint(tensors, head.structural_hash, head.version, {}, "fdl", path)


def scan(path: str) -> tuple[int, list[str]]:
    """Return version and names, in file order, without keeping any data."""
    seen: dict[str, object] = {}
    with _opened(path) as file:
        source = _source(path, file)
        head = _Head(source)
        for _ in range(head.count):
            entry = _Entry(source, seen)
            source.skip(entry.num_bytes, entry.what)
            seen[entry.name] = None
        source.finish()
    return head.version, list(seen)


def _opened(path: str) -> BufferedReader:
    return open(open_regular(path), "rb")


def _source(path: str, file: BufferedReader) -> _Source:
    kind = _GzipSource if path.lower().endswith(".gz") else _Source
    return kind(path, file, os.fstat(file.fileno()).st_size)

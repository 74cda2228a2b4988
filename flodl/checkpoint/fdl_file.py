"""Checkpoints in the ``.fdl`` format of the Rust flodl, plain or gzipped.

Little-endian: magic ``FDLC``; u32 version; 32 bytes of structural hash, all zero if unknown; u32 count; then for
each tensor u32 name length, UTF-8 name, u32 number of dimensions, i64 sizes, u8 dtype, u64 byte length, data.
Versions 1 and 2 have the same bytes and differ in the names of parameters; `migrate_checkpoint` renames them.
Version 2 is written.

Files are untrusted: every length is compared with the remaining bytes before memory is allocated, and a gzipped
file may not unpack to more than ``MAX_GZIP_RATIO`` times its size once it exceeds ``GZIP_FLOOR`` bytes.
"""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import BinaryIO, NoReturn

import torch
from torch import Tensor

from flodl.checkpoint.tensor_bytes import bytes_of, check_saveable, refuse, tensor_from
from flodl.errors import printable
from flodl.files import open_regular, write_atomically
from flodl.safetensors_header import name_fault

MAGIC = b"FDLC"
VERSION = 2
MAX_GZIP_RATIO = 200
GZIP_FLOOR = 64 * 1024 * 1024
MAX_DIMS = 8
MAX_NAME_BYTES = 4096
CHUNK_BYTES = 1 << 20

FDL_DTYPES: Mapping[torch.dtype, int] = {
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.float32: 3,
    torch.float64: 4,
    torch.int32: 5,
    torch.int64: 6,
}
"""The dtypes of the format and their tags."""

_BY_TAG = {tag: dtype for dtype, tag in FDL_DTYPES.items()}


def write(path: str, tensors: Mapping[str, Tensor], structural_hash: str, metadata: Mapping[str, str]) -> None:
    """Write a version 2 file, gzipped if ``path`` ends in ``.gz``."""
    check_saveable(path, tensors, FDL_DTYPES, "the .fdl format")
    if metadata:
        refuse(path, ["the .fdl format stores no metadata"], "Nothing was written. Save as .safetensors.")
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
    size = packed_size = 0
    for chunk in plain:
        size += len(chunk)
        packed = packer.compress(chunk)
        packed_size += len(packed)
        yield packed
    packed = packer.flush()
    if size > max(GZIP_FLOOR, MAX_GZIP_RATIO * (packed_size + len(packed))):
        problem = f"the file would be packed more than MAX_GZIP_RATIO={MAX_GZIP_RATIO} to 1, which is refused when read"
        refuse(path, [problem], "Nothing was written. Save as .fdl or .safetensors.")
    yield packed


def read(path: str) -> tuple[dict[str, Tensor], str, int]:
    """Return the tensors, the structural hash and the version of a file."""
    with open(open_regular(path), "rb") as file:
        return _Reader(path, file).read()


class _Reader:
    """Reads one file in order and refuses whatever breaks the format."""

    def __init__(self, path: str, file: BinaryIO) -> None:
        self.path = path
        size = os.fstat(file.fileno()).st_size
        is_packed = path.lower().endswith(".gz")
        # Length of a plain file, and the most that a gzipped file may unpack to.
        self.bound = max(GZIP_FLOOR, MAX_GZIP_RATIO * size) if is_packed else size
        self.limit = f" (MAX_GZIP_RATIO={MAX_GZIP_RATIO})" if is_packed else ""
        self.file = gzip.GzipFile(fileobj=file) if is_packed else file
        self.position = 0

    def fail(self, problem: str) -> NoReturn:
        refuse(
            self.path,
            [f"at byte {self.position}: {problem}"],
            "Expected a complete flodl checkpoint. Download or write the file again.",
        )

    def unpack(self, count: int) -> bytearray:
        """Return up to ``count`` bytes; memory grows only with bytes that the file really has."""
        data = bytearray()
        try:
            while part := self.file.read(min(CHUNK_BYTES, count - len(data))):
                data += part
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            self.fail(f"the gzip stream is damaged or truncated ({error})")
        return data

    def take(self, count: int, what: str) -> bytearray:
        """Return exactly ``count`` bytes."""
        if count > self.bound - self.position:
            self.fail(f"{what} takes {count} bytes, at most {self.bound - self.position} are left{self.limit}")
        data = self.unpack(count)
        if len(data) < count:
            self.fail(f"{what} takes {count} bytes, {len(data)} are left; the file is truncated")
        self.position += count
        return data

    def numbers(self, layout: str, what: str) -> tuple[int, ...]:
        return struct.unpack(f"<{layout}", self.take(struct.calcsize(f"<{layout}"), what))

    def read(self) -> tuple[dict[str, Tensor], str, int]:
        magic = bytes(self.take(4, "the magic number"))
        if magic != MAGIC:
            self.fail(f"found {magic!r}, expected {MAGIC!r}")
        (version,) = self.numbers("I", "the version")
        if version not in (1, VERSION):
            self.fail(f"found version {version}, expected 1 or {VERSION}")
        digest = bytes(self.take(32, "the structural hash"))
        (count,) = self.numbers("I", "the number of tensors")
        tensors: dict[str, Tensor] = {}
        for _ in range(count):
            name = self.name()
            if name in tensors:
                self.fail(f"found the name {printable(name)} twice")
            tensors[name] = self.tensor(f"tensor {printable(name)}")
        if self.unpack(1):
            self.fail("found bytes after the last tensor, expected none")
        return tensors, digest.hex() if any(digest) else "", version

    def name(self) -> str:
        (length,) = self.numbers("I", "the length of a name")
        if length > MAX_NAME_BYTES:
            self.fail(f"found a name of {length} bytes, expected at most {MAX_NAME_BYTES}")
        try:
            name = self.take(length, "a name").decode("utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"a name is not UTF-8 ({error.reason})")
        fault = name_fault(name)
        if fault:
            self.fail(f"the name {printable(name)} {fault}")
        return name

    def tensor(self, what: str) -> Tensor:
        (ndim,) = self.numbers("I", f"the number of dimensions of {what}")
        if ndim > MAX_DIMS:
            self.fail(f"{what} has {ndim} dimensions, expected at most {MAX_DIMS}")
        shape = self.numbers(f"{ndim}q", f"the shape of {what}")
        tag, num_bytes = self.numbers("BQ", f"the dtype of {what}")
        if tag not in _BY_TAG:
            self.fail(f"{what} has dtype tag {tag}, expected 1 to {len(_BY_TAG)}")
        if min(shape, default=0) < 0 or num_bytes != math.prod(shape) * _BY_TAG[tag].itemsize:
            self.fail(f"{what} has {num_bytes} bytes, which is not the size of shape {shape} of {_BY_TAG[tag]}")
        try:
            return tensor_from(self.take(num_bytes, what), _BY_TAG[tag], shape)
        except ValueError as error:
            self.fail(f"{what}: {error}")

"""The header of a safetensors file, checked before any data is read.

The checks are stricter than in the safetensors library: a duplicate key, a control character in a name, an
unknown field, more than eight dimensions, or data that does not tile the file exactly are refused. Each fault names
the file and the tensor.

Layout (safetensors format): u64 little-endian header length, that many bytes of JSON that may end in spaces, then
the data, to which ``data_offsets`` are relative.
"""

from __future__ import annotations

import json
import os
import re
import struct
import unicodedata
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from flodl.errors import CheckpointError, capped, printable
from flodl.files import POINTER_ADVICE, is_pointer, open_regular
from flodl.system import read_at

_NUMBERS = "U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ F4 F6_E2M3 F6_E3M2"
_WIDER = "I16 U16 F16 BF16 I32 U32 F32 I64 U64 F64 C64"
DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8,
    **{name: int(re.findall(r"\d+", name)[0]) for name in f"{_NUMBERS} {_WIDER}".split()},
}
"""Bits of one element for each dtype name of the format."""

# Bounds, so that a small hostile file cannot cost much time or memory; the first is the format's own.
MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 100_000
MAX_NAME_CHARS = 1_024
MAX_DIMS = 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: ``dtype`` as the format spells it, data from byte ``start`` to ``end``."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Length of the data in bytes."""
        return self.end - self.start


@dataclass(frozen=True)
class Header:
    """A checked header; ``order`` is the order of the data, ``data_start`` the position of offset 0."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    order: list[str]
    data_start: int


def read_header(path_or_fd: str | os.PathLike[str] | int, *, name: str = "") -> Header:
    """Return the checked header of a safetensors file.

    Args:
        path_or_fd: a path, or an open descriptor, which stays open at its position.
        name: name of the file in errors; the path by default.

    Raises:
        CheckpointError: not a regular file, truncated, or a header that breaks a rule. ``problems`` lists the
            faults, ``path`` is the file.
    """
    if isinstance(path_or_fd, int):
        return _Reader(path_or_fd, name or f"descriptor {path_or_fd}").read()
    descriptor = open_regular(path_or_fd)
    try:
        return _Reader(descriptor, name or os.fspath(path_or_fd)).read()
    finally:
        os.close(descriptor)


def name_fault(name: str) -> str:
    """Return why ``name`` cannot name a tensor, or an empty string."""
    if not name:
        return "is empty"
    if name == "__metadata__":
        return "is reserved by the safetensors format"
    if len(name) > MAX_NAME_CHARS:
        return f"has {len(name)} characters, expected at most {MAX_NAME_CHARS}"
    # Control characters and line separators could forge log lines; lone surrogates are not UTF-8.
    plain = name.isascii() and name.isprintable()
    if not plain and any(unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in name):
        return "contains a control character, a line separator or a lone surrogate"
    return ""


class _Reader:
    """Reads one header; contains the name of the file for errors."""

    def __init__(self, descriptor: int, name: str) -> None:
        self.descriptor = descriptor
        self.name = name

    def fail(self, *problems: str) -> NoReturn:
        text = problems[0] if len(problems) == 1 else f"{len(problems)} faults:\n{capped(problems)}"
        raise CheckpointError(
            f"{printable(self.name, 400)}: not a usable safetensors file: {text}\n"
            "Expected a file of the safetensors library. Download or write the file again.",
            problems=list(problems),
            path=self.name,
        )

    def read(self) -> Header:
        size = os.fstat(self.descriptor).st_size
        head = read_at(self.descriptor, 8, 0)
        if len(head) < 8:
            self.fail(f"found {size} bytes, expected at least 8 for the header length")
        if is_pointer(read_at(self.descriptor, 64, 0)):
            raise CheckpointError(
                f"{printable(self.name, 400)}: {POINTER_ADVICE}", path=self.name, problems=[POINTER_ADVICE]
            )
        (length,) = struct.unpack("<Q", head)
        if length > MAX_HEADER_BYTES:
            self.fail(f"found header length {length}, expected at most {MAX_HEADER_BYTES}")
        raw = read_at(self.descriptor, length, 8) if length <= size - 8 else b""
        if len(raw) != length:
            self.fail(f"found header length {length}, but only {size - 8} bytes follow; the file is truncated")
        table = self.parse(raw)
        # Some writers store null for no metadata, which the safetensors library accepts.
        stored = table.pop("__metadata__", None)
        metadata = {} if stored is None else stored
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            self.fail("__metadata__ is not a table of strings")
        if any("\ud800" <= char <= "\udfff" for pair in metadata.items() for text in pair for char in text):
            self.fail("__metadata__ contains a lone surrogate")
        tensors = self.entries(table)
        order = sorted(tensors, key=lambda key: (tensors[key].start, tensors[key].end))
        self.check_tiling(tensors, order, size - 8 - length)
        return Header({key: tensors[key] for key in order}, metadata, order, 8 + length)

    def parse(self, raw: bytes) -> dict[str, Any]:
        if not raw.startswith(b"{"):
            self.fail("the header does not begin with '{'")
        # Counting before parsing makes a file of a million empty tensors cheap to refuse.
        count = raw.count(b'"data_offsets"')
        if count > MAX_TENSORS:
            self.fail(f"found {count} tensors, expected at most {MAX_TENSORS}")
        try:
            text = raw.decode("utf-8")
            table, end = _DECODER.raw_decode(text)
        except (ValueError, RecursionError) as error:
            self.fail(f"the header is not valid JSON ({printable(str(error))})")
        if text[end:].strip(" "):
            self.fail("found text after the JSON object of the header")
        return table

    def entries(self, table: dict[str, Any]) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        problems: list[str] = []
        for key, entry in table.items():
            found = _entry(entry)
            fault = name_fault(key) or (found if isinstance(found, str) else "")
            if fault:
                problems.append(f"tensor {printable(key)}: {fault}")
            elif isinstance(found, TensorInfo):
                tensors[key] = found
        if problems:
            self.fail(*problems)
        return tensors

    def check_tiling(self, tensors: dict[str, TensorInfo], order: list[str], data_bytes: int) -> None:
        """Refuse gaps, overlaps, missing data, and data without a tensor."""
        position = 0
        problems: list[str] = []
        for key in order:
            info = tensors[key]
            if info.start != position:
                kind = "an overlap with" if info.start < position else "a gap after"
                problems.append(f"tensor {printable(key)}: found {kind} the tensor before it at byte {info.start}")
            elif info.end > data_bytes and not problems:
                problems.append(f"tensor {printable(key)}: ends at byte {info.end} of {data_bytes}; truncated file")
            position = info.end
        if not problems and position < data_bytes:
            problems.append(f"found {data_bytes - position} bytes after the last tensor, expected none")
        if problems:
            self.fail(*problems)


def _entry(entry: Any) -> TensorInfo | str:
    """Return the checked entry of a tensor, or its fault."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        found = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
        return f"found fields {printable(str(found))}, expected exactly dtype, shape and data_offsets"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        return f"found dtype {printable(str(dtype))}, expected one of {', '.join(DTYPE_BITS)}"
    if not _counts(shape) or len(shape) > MAX_DIMS:
        return f"found shape {printable(str(shape))}, expected at most {MAX_DIMS} sizes from 0 to 2^63 - 1"
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"found data_offsets {printable(str(offsets))}, expected two rising byte positions"
    bits = DTYPE_BITS[dtype]
    for size in shape:
        bits *= size
    if bits != 8 * (offsets[1] - offsets[0]):
        return f"shape {tuple(shape)} of {dtype} does not take the bytes {offsets[0]} to {offsets[1]}"
    return TensorInfo(dtype, tuple(shape), offsets[0], offsets[1])


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"found the key {key} twice in one object")
    return table


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)

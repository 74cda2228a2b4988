"""The header of a safetensors file, read and checked before a byte of its data is touched.

Decides which headers are accepted, and is stricter than the format's own library: a doubled key,
a control character in a name, an unknown field, more than eight dimensions, or data that does not
tile the file exactly are all refused, each fault naming the file and the tensor. Reading the data,
and what the tensors are for, is left to the callers.

Layout (safetensors format): u64 little-endian header length, that many bytes of JSON that may end
in spaces, then the data, to which ``data_offsets`` are relative.
"""

from __future__ import annotations

import json
import os
import struct
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

from flodl.errors import CheckpointError, capped, printable
from flodl.files import POINTER_ADVICE, is_pointer, open_regular
from flodl.system import read_at

__all__ = ["DTYPE_BITS", "Header", "HeaderLimits", "TensorInfo", "name_fault", "read_header"]

DTYPE_BITS: Mapping[str, int] = MappingProxyType(
    {
        "BOOL": 8,
        "U8": 8,
        "I8": 8,
        "F8_E5M2": 8,
        "F8_E4M3": 8,
        "F8_E8M0": 8,
        "F8_E4M3FNUZ": 8,
        "F8_E5M2FNUZ": 8,
        "F4": 4,
        "F6_E2M3": 6,
        "F6_E3M2": 6,
        "I16": 16,
        "U16": 16,
        "F16": 16,
        "BF16": 16,
        "I32": 32,
        "U32": 32,
        "F32": 32,
        "I64": 64,
        "U64": 64,
        "F64": 64,
        "C64": 64,
    }
)
"""Bits of one element for each dtype name of the format."""

_FIELDS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, kw_only=True)
class HeaderLimits:
    """The bounds a header must keep, so that a small hostile file cannot cost much time or memory."""

    max_header_bytes: int = 100_000_000
    """Length of the JSON text in bytes; the format's own bound."""
    max_tensors: int = 100_000
    """Number of tensors in one file."""
    max_name_chars: int = 1_024
    """Characters of one tensor name."""
    max_dims: int = 8
    """Dimensions of one tensor."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: ``dtype`` in the spelling of the format, data bytes ``start`` to ``end``."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Length of the tensor's data in bytes."""
        return self.end - self.start


@dataclass(frozen=True)
class Header:
    """A checked header; ``tensors`` and ``order`` follow the file, ``data_start`` is where offset 0 lies."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    order: list[str]
    data_start: int


class _DoubledKey(ValueError):
    """A JSON object holds one key twice; the key is the argument."""


def read_header(
    path_or_fd: str | os.PathLike[str] | int, limits: HeaderLimits | None = None, *, name: str = ""
) -> Header:
    """Return the header of a safetensors file, after every check the format allows without its data.

    Args:
        path_or_fd: a path, or an open descriptor (read by position; it stays open, its offset stays).
        limits: bounds to apply; ``HeaderLimits()`` when None.
        name: what error messages call the file; the path itself by default.

    Raises:
        CheckpointError: the file is no regular file, is truncated, or its header breaks a rule.
            ``problems`` lists the faults, ``path`` is the file.
    """
    limits = limits or HeaderLimits()
    if isinstance(path_or_fd, int):
        return _Reader(path_or_fd, name or f"descriptor {path_or_fd}", limits).read()
    descriptor = open_regular(path_or_fd)
    try:
        return _Reader(descriptor, name or os.fspath(path_or_fd), limits).read()
    finally:
        os.close(descriptor)


def name_fault(name: str, max_chars: int = 1_024) -> str:
    """Return why ``name`` cannot name a tensor in a file, or an empty string when it can."""
    if not name:
        return "is empty"
    if name == "__metadata__":
        return "is reserved by the safetensors format"
    if len(name) > max_chars:
        return f"has {len(name)} characters, expected at most {max_chars}"
    # Control characters and line separators could forge log lines; lone surrogates are not UTF-8.
    plain = name.isascii() and name.isprintable()
    if not plain and any(unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in name):
        return "holds a control character, a line separator or a lone surrogate"
    return ""


class _Reader:
    """One pass over one header; keeps the file's name for the messages."""

    def __init__(self, descriptor: int, name: str, limits: HeaderLimits) -> None:
        self.descriptor = descriptor
        self.name = name
        self.limits = limits

    def fail(self, problems: list[str]) -> NoReturn:
        text = problems[0] if len(problems) == 1 else f"{len(problems)} faults:\n{capped(problems)}"
        raise CheckpointError(
            f"{printable(self.name, 400)}: not a usable safetensors file: {text}\n"
            "Expected a file as the safetensors library writes it; fetch or write the file again.",
            problems=problems,
            path=self.name,
        )

    def read(self) -> Header:
        size = os.fstat(self.descriptor).st_size
        head = read_at(self.descriptor, 8, 0)
        if len(head) < 8:
            self.fail([f"{size} bytes long, expected at least 8 for the header length"])
        if is_pointer(read_at(self.descriptor, 64, 0)):
            raise CheckpointError(
                f"{printable(self.name, 400)}: {POINTER_ADVICE}", path=self.name, problems=[POINTER_ADVICE]
            )
        (length,) = struct.unpack("<Q", head)
        if length > self.limits.max_header_bytes:
            self.fail([f"header length {length}, expected at most max_header_bytes={self.limits.max_header_bytes}"])
        if length > size - 8:
            self.fail([f"header length {length}, but only {size - 8} bytes follow; the file is truncated"])
        raw = _read_exactly(self.descriptor, length, 8)
        if len(raw) != length:
            self.fail(["the file became shorter while it was read"])
        table = self.parse(raw)
        # Some writers store null for no metadata, which the safetensors library reads as absent.
        stored = table.pop("__metadata__", None)
        metadata = self.metadata({} if stored is None else stored)
        tensors = self.entries(table)
        order = sorted(tensors, key=lambda key: (tensors[key].start, tensors[key].end))
        self.tile(tensors, order, size - 8 - length)
        return Header({key: tensors[key] for key in order}, metadata, order, 8 + length)

    def parse(self, raw: bytes) -> dict[str, Any]:
        if not raw.startswith(b"{"):
            self.fail(["the header does not begin with '{'"])
        # Counting first keeps a file of a million empty tensors from being parsed at all.
        count = raw.count(b'"data_offsets"')
        if count > self.limits.max_tensors:
            self.fail([f"{count} tensors, expected at most max_tensors={self.limits.max_tensors}"])
        try:
            text = raw.decode("utf-8")
            table, end = _DECODER.raw_decode(text)
        except _DoubledKey as error:
            self.fail([f"key {printable(error.args[0])} stands twice in one object"])
        except UnicodeDecodeError as error:
            self.fail([f"the header is not UTF-8 at byte {8 + error.start}"])
        except RecursionError:
            self.fail(["the header is nested too deeply"])
        except ValueError as error:
            self.fail([f"the header is not JSON ({printable(str(error))})"])
        if text[end:].strip(" "):
            self.fail(["the header holds text after its JSON object"])
        if len(table) > self.limits.max_tensors + 1:
            self.fail([f"{len(table)} tensors, expected at most max_tensors={self.limits.max_tensors}"])
        return table

    def metadata(self, found: Any) -> dict[str, str]:
        if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
            self.fail(["__metadata__ is not a table of strings"])
        if any("\ud800" <= char <= "\udfff" for pair in found.items() for text in pair for char in text):
            self.fail(["__metadata__ holds a lone surrogate"])
        return found

    def entries(self, table: dict[str, Any]) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        problems: list[str] = []
        for key, entry in table.items():
            found = self.entry(entry)
            fault = name_fault(key, self.limits.max_name_chars) or (found if isinstance(found, str) else "")
            if fault:
                problems.append(f"tensor {printable(key)}: {fault}")
            elif isinstance(found, TensorInfo):
                tensors[key] = found
        if problems:
            self.fail(problems)
        return tensors

    def entry(self, entry: Any) -> TensorInfo | str:
        """Return the checked entry, or what is wrong with it."""
        if not isinstance(entry, dict) or entry.keys() != _FIELDS:
            found = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
            return f"fields {printable(str(found))}, expected exactly dtype, shape and data_offsets"
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
            return f"dtype {printable(str(dtype))}, expected one of {', '.join(DTYPE_BITS)}"
        if not _counts(shape):
            return f"shape {printable(str(shape))}, expected a list of sizes from 0 to 2^63 - 1"
        if len(shape) > self.limits.max_dims:
            return f"{len(shape)} dimensions, expected at most max_dims={self.limits.max_dims}"
        if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            return f"data_offsets {printable(str(offsets))}, expected two rising byte positions"
        bits = DTYPE_BITS[dtype]
        for size in shape:
            bits *= size
        if bits != 8 * (offsets[1] - offsets[0]):
            return (
                f"shape {tuple(shape)} of {dtype} takes {-(-bits // 8)} bytes, but data_offsets "
                f"{offsets[0]} to {offsets[1]} hold {offsets[1] - offsets[0]}"
            )
        return TensorInfo(dtype, tuple(shape), offsets[0], offsets[1])

    def tile(self, tensors: dict[str, TensorInfo], order: list[str], data_bytes: int) -> None:
        """Refuse gaps, overlaps, and data that the file does not have or no tensor owns."""
        position = 0
        problems: list[str] = []
        for key in order:
            info = tensors[key]
            if info.start != position:
                kind = "overlaps the tensor before it" if info.start < position else "leaves a gap before it"
                problems.append(f"tensor {printable(key)}: starts at byte {info.start}, expected {position}; {kind}")
            position = info.end
        if not problems and position > data_bytes:
            late = next(key for key in order if tensors[key].end > data_bytes)
            problems.append(
                f"tensor {printable(late)}: ends at byte {tensors[late].end}, but the file holds "
                f"{data_bytes} bytes of data; it is truncated"
            )
        elif not problems and position < data_bytes:
            problems.append(f"{data_bytes - position} bytes after the last tensor, expected none")
        if problems:
            self.fail(problems)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _read_exactly(descriptor: int, length: int, position: int) -> bytes:
    parts: list[bytes] = []
    while length:
        part = read_at(descriptor, length, position)
        if not part:
            break
        parts.append(part)
        position += len(part)
        length -= len(part)
    return b"".join(parts)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        raise _DoubledKey(next(key for key, _ in pairs if key in seen or seen.add(key)))
    return table


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)

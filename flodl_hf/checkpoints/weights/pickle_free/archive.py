"""Byte ranges of the members of a zip archive without compression.

Decides that an archive of tensors has no reason to be compressed, encrypted, overlapping or ambiguous. The
layout is that of PKWARE's APPNOTE, sections 4.3 and 4.5.3 (64-bit extension).
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple, NoReturn

from flodl.errors import CheckpointError, printable
from flodl.system import read_at

__all__ = ["Member", "stored_members"]

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

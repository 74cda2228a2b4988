"""The checksums that a zip archive keeps of its members, compared with their bytes.

torch writes them and does not look at them; a flipped bit in a weight is seen by nothing else. An archive that was
written without them (``set_crc32_options(False)``) has zeros there and is taken as it is.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from flodl.errors import CheckpointError, capped, printable
from flodl.system import read_at

from .archive import Member

__all__ = ["check_sums"]

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

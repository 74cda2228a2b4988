"""Archives as ``torch.save`` lays them out, with one thing otherwise: sizes, places, names, checksums."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Mapping
from random import Random

__all__ = ["ARCHIVES", "archived"]

ARCHIVES = (
    "compressed", "bomb", "twice", "encrypted", "two-programs", "no-program", "storage-gone", "storage-short",
    "storage-long", "big-endian",
    "script", "many", "prefix", "parent", "comment", "nested", "absolute", "case", "no-checksum",
    "wrong-checksum", "text-key", "folder",
)  # fmt: skip


def archived(program_: bytes, storages: Mapping[str, bytes], how: str = "", draw: int = 0) -> bytes:
    """Return an archive as ``torch.save`` lays it out, with one thing otherwise."""
    random, buffer = Random(draw), io.BytesIO()
    top = {"prefix": "a/b/c", "parent": "../up", "absolute": "/abs"}.get(how, "archive")
    packing = zipfile.ZIP_DEFLATED if how in ("compressed", "bomb") else zipfile.ZIP_STORED
    drop = random.choice(list(storages)) if storages else ""
    with zipfile.ZipFile(buffer, "w", packing) as out:

        def put(name: str, data: bytes) -> None:
            out.writestr(zipfile.ZipInfo(f"{top}/{name}"), data, packing)

        if how != "no-program":
            put("DATA.PKL" if how == "case" else "data.pkl", program_)
        if how == "two-programs":
            out.writestr(zipfile.ZipInfo("other/data.pkl"), program_)
        put("byteorder", b"big" if how == "big-endian" else b"little")
        if how == "bomb":
            put("data/0", bytes(50 << 20))
        for key, data in storages.items():
            if key == drop and how in ("storage-gone", "bomb"):
                continue
            data = data[:-4] if key == drop and how == "storage-short" else data
            data = data + b"1234" if key == drop and how == "storage-long" else data
            put(f"data/{key}", data)
        if how == "script":
            put("code/__torch__.py", b"import os")
            put("constants.pkl", b"\x80\x02).")
        if how == "many":
            for number in range(20_000):
                put(f"data/x{number}", b"")
        if how == "nested":
            put("data/model.zip", buffer.getvalue())
        if how == "folder":
            put("data/", b"")
        put("version", b"3\n")
        if how == "comment":
            out.comment = b"PK\x05\x06" + bytes(18)
    return _rewritten(buffer.getvalue(), how, random)


def _rewritten(data: bytes, how: str, random: Random) -> bytes:
    raw = bytearray(data)
    entries = [at for at in range(len(raw) - 4) if raw[at : at + 4] == b"PK\x01\x02"]
    at = random.choice(entries)
    if how == "encrypted":
        raw[at + 8] |= 1
    elif how == "no-checksum":
        for entry in entries:
            raw[entry + 16 : entry + 20] = bytes(4)
    elif how == "wrong-checksum":
        raw[at + 16] ^= 1
    elif how == "twice":
        names = [raw[e + 46 : e + 46 + struct.unpack_from("<H", raw, e + 28)[0]] for e in entries]
        one, other = next(
            (a, b)
            for a in entries
            for b in entries
            if a < b and len(names[entries.index(a)]) == len(names[entries.index(b)])
        )
        length = len(names[entries.index(one)])
        raw[one + 46 : one + 46 + length] = raw[other + 46 : other + 46 + length]
    return bytes(raw)

"""Ways to damage bytes, JSON and entries of a folder, by any suite.

What is drawn comes from the generator of the case; what is enumerated goes by its number.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

__all__ = [
    "BYTE_DAMAGE",
    "ENTRIES",
    "ESCAPES",
    "NUMBERS",
    "RAW",
    "VALUES",
    "damaged_bytes",
    "edited",
    "put_entry",
    "spelled",
]

ESCAPES = ("\x1b[31mred", "\x9b2J", "\x07bell", "\u202egpj.exe", "over\rwritten", "nul\0", "\ud800half", "a\u2028b")
"""Texts that move a terminal, forge lines, or are no text at all."""

NUMBERS = ("1e400", "-1e400", "1" + "0" * 400, "NaN", "-Infinity", "1" * 5000, "-0", "1e-400", "0x10", "1_000")
"""Numbers as text that JSON, Python and machines disagree about."""

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 1.5, -0.5, 1e308, -1e308, 2**31, 2**63, 2**64, 10**30, "", "x", "32", "\x1b[2J",
    "../x", "evil", [], [1], {}, {"a": 1}, [[[]]], "x" * 5000,
)  # fmt: skip
"""What a field may be given that is of another type or size."""


def damaged_bytes(data: bytes, what: Mapping[str, Any]) -> bytes:
    """Return bytes as one of `BYTE_DAMAGE` leaves them.

    Args:
        data: the file.
        what: from a maker of `BYTE_DAMAGE`.
    """
    how, at = what["how"], what.get("at", 0)
    if how == "flip":
        changed = bytearray(data)
        changed[at // 8] ^= 1 << at % 8
        return bytes(changed)
    if how == "cut":
        return data[:at]
    if how == "more":
        return data + bytes.fromhex(what["bytes"])
    if how == "put":
        raw = bytes.fromhex(what["bytes"])
        return data[:at] + raw + data[at + what["over"] :]
    raise ValueError(how)


def _flip(random: Random, _number: int, size: int) -> dict[str, Any]:
    return {"how": "flip", "at": random.randrange(8 * size)}


def _cut(_random: Random, number: int, size: int) -> dict[str, Any]:
    return {"how": "cut", "at": number % size}


def _more(random: Random, number: int, _size: int) -> dict[str, Any]:
    return {"how": "more", "bytes": random.randbytes((1, 2, 8, 64, 4096)[number % 5]).hex()}


def _put(random: Random, number: int, size: int) -> dict[str, Any]:
    """A few bytes over others, between them, or instead of them."""
    word = (
        b"\0",
        b"\xff",
        b'"',
        b"{",
        b"}",
        b"[",
        b",",
        b":",
        b"9",
        b"-",
        b"\\u0000",
        b"\xed\xa0\x80",
        b"null",
        b"e99",
    )
    raw = word[number % len(word)] if random.random() < 0.7 else random.randbytes(random.randint(1, 8))
    return {"how": "put", "at": random.randrange(size), "bytes": raw.hex(), "over": random.choice((0, len(raw), 1, 8))}


BYTE_DAMAGE: Mapping[str, Callable[[Random, int, int], dict[str, Any]]] = {
    "flip": _flip,
    "cut": _cut,
    "more": _more,
    "put": _put,
}
"""Makers of damage to any bytes, given a generator, the number among its kind, and the size."""


RAW = "=as it stands="
"""A text that begins so stands in JSON as it is, without this and without quotes: a number that Python has not."""


def spelled(value: Any) -> str:
    """Return JSON of a value, with texts that begin with `RAW` as they stand."""
    parts = json.dumps(value).split(f'"{RAW}')
    return parts[0] + "".join(part.replace('"', "", 1) for part in parts[1:])


def edited(value: Any, path: tuple[Any, ...], new: Any, *, remove: bool = False) -> Any:
    """Return a copy of nested lists and objects with one place changed or taken out."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1 and remove:
        del copy[path[0]]
        return copy
    if len(path) == 1:
        copy[path[0]] = new
        return copy
    copy[path[0]] = edited(copy[path[0]], path[1:], new, remove=remove)
    return copy


ENTRIES = (
    "outside", "outside-folder", "dangling", "loop", "pipe", "socket", "device", "zero", "folder", "absent", "empty",
    "sparse", "unreadable", "through-parent",
)  # fmt: skip
"""What may stand where a regular file is expected."""


def put_entry(folder: Path, name: str, kind: str, outside: Path | None = None) -> None:
    """Replace a file of a folder by another kind of entry.

    Args:
        folder: the folder.
        name: of the file; what it holds is moved where a link leads to it.
        kind: one of `ENTRIES`.
        outside: a folder to which links lead; None is ``outside`` beside the folder.
    """
    place = folder / name
    outside = folder.parent / "outside" if outside is None else outside
    data = place.read_bytes() if place.is_file() else b"{}"
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    elif os.path.lexists(place):
        place.unlink()
    target = outside / f"of-the-case-{Path(name).name}"
    if kind == "outside":
        target.write_bytes(data)
        place.symlink_to(target)
    elif kind == "outside-folder":
        place.symlink_to(outside)
    elif kind == "through-parent":
        target.write_bytes(data)
        place.symlink_to(os.path.relpath(target, folder))
    elif kind == "dangling":
        place.symlink_to(folder / "nowhere")
    elif kind == "loop":
        place.symlink_to(place.name)
    elif kind == "pipe":
        os.mkfifo(place)
    elif kind == "socket":
        _socket(place)
    elif kind == "device":
        place.symlink_to("/dev/null")
    elif kind == "zero":
        place.symlink_to("/dev/zero")
    elif kind == "folder":
        place.mkdir()
    elif kind == "empty":
        place.write_bytes(b"")
    elif kind == "sparse":
        with place.open("wb") as file:
            file.truncate(3_000_000_000)  # holds no block of the disk
    elif kind == "unreadable":
        place.write_bytes(data)
        place.chmod(stat.S_IWUSR)


def _socket(place: Path) -> None:
    """Make a socket; its path may be longer than an address allows, so it is bound from within its folder."""
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(place.parent)
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(place.name)
    finally:
        os.fchdir(here)
        os.close(here)

"""Suite ``states``: state files of the framework, ``.fdl`` plain and gzipped, damaged field by field.

Loading is in two phases: what is refused has changed no tensor of the model. What is accepted is compared with a
reading of the same bytes by the thirty lines of `plainly`.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from flodl_hf.torture.case import Case, Fault, Grade, Kind, Verdict, dealt, right, silent, stated
from flodl_hf.torture.damage import BYTE_DAMAGE, ENTRIES, ESCAPES, damaged_bytes, put_entry
from flodl_hf.torture.judging import judge
from flodl_hf.torture.subjects import Subject

__all__ = ["NAME", "cases", "plainly", "prepare", "run"]

NAME = "states"
HASH = "ab" * 32
_TAGS = {1: torch.float16, 2: torch.bfloat16, 3: torch.float32, 4: torch.float64, 5: torch.int32, 6: torch.int64}
_HEAD = 4 + 4 + 32 + 4


@cache
def tensors() -> dict[str, Tensor]:
    """Return what the undamaged file holds."""
    draw = torch.Generator().manual_seed(5)
    return {
        "encoder.layers.0.weight": torch.randn(6, 4, generator=draw), "encoder.layers.0.bias": torch.randn(4,
        generator=draw),
        "encoder.norm.weight": torch.randn(4, generator=draw).half(), "head.weight": torch.randn(3, 4,
        generator=draw).double(),
        "head.steps": torch.arange(5), "head.counts": torch.arange(3, dtype=torch.int32), "scale": torch.tensor(2.5),
        "encoder.norm.bias": torch.randn(4, generator=draw).bfloat16(), "empty": torch.zeros(0, 3),
    }  # fmt: skip


def entry(name: bytes, tensor: Tensor, **other: Any) -> bytes:
    """Return one tensor as the format has it, with some of its fields otherwise."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    tag = next(tag for tag, dtype in _TAGS.items() if dtype == tensor.dtype)
    sizes = other.get("sizes", tuple(tensor.shape))
    return (
        struct.pack("<I", other.get("name_length", len(name))) + name + struct.pack("<I", other.get("dims",
        len(sizes)))
        + struct.pack(f"<{len(sizes)}q", *sizes) + struct.pack("<BQ", other.get("tag", tag), other.get("length",
        len(raw))) + raw
    )  # fmt: skip


def file(entries: list[bytes], *, version: int = 2, count: int | None = None, digest: str = HASH) -> bytes:
    """Return a whole file of entries."""
    head = b"FDLC" + struct.pack("<I", version) + bytes.fromhex(digest)
    return head + struct.pack("<I", len(entries) if count is None else count) + b"".join(entries)


@cache
def whole(version: int = 2) -> bytes:
    """Return the undamaged file."""
    return file([entry(name.encode(), tensor) for name, tensor in tensors().items()], version=version)


def plainly(data: bytes) -> dict[str, Tensor]:
    """Return what the bytes of a good file hold; any exception says that they hold nothing."""
    if data[:4] != b"FDLC" or struct.unpack_from("<I", data, 4)[0] not in (1, 2):
        raise ValueError("no such file")
    (count,), at, found = struct.unpack_from("<I", data, 40), _HEAD, {}
    for _ in range(count):
        (length,) = struct.unpack_from("<I", data, at)
        name = data[at + 4 : at + 4 + length].decode()
        at += 4 + length
        (dims,) = struct.unpack_from("<I", data, at)
        sizes = struct.unpack_from(f"<{dims}q", data, at + 4)
        tag, size = struct.unpack_from("<BQ", data, at + 4 + 8 * dims)
        at += 4 + 8 * dims + 9
        if len(data) - at < size or name in found:
            raise ValueError("cut or doubled")
        flat = (
            torch.frombuffer(bytearray(data[at : at + size]), dtype=_TAGS[tag])
            if size
            else torch.zeros(0, dtype=_TAGS[tag])
        )
        found[name] = flat.reshape(sizes)
        at += size
    if at != len(data):
        raise ValueError("more")
    return found


# --- damage -----------------------------------------------------------------------------------------------------------

NUMBERS = (0, 1, 2, 3, 7, 8, 9, 255, 4096, 4097, 2**16, 2**31 - 1, 2**31, 2**32 - 1)
SIZES = (*NUMBERS, -1, -(2**63), 2**32, 2**62, 2**63 - 1)
FIELDS = ("name_length", "dims", "tag", "length", "sizes", "version", "count", "digest", "name")


def _undamaged(_random: Random, number: int) -> Fault:
    return Fault({"packed": bool(number % 2), "version": 1 + number // 2 % 2})


def _cut(_random: Random, number: int) -> Fault:
    return Fault({"how": "cut", "at": number % len(whole())}, ("state",))


def _flip(random: Random, number: int) -> Fault:
    return Fault({**BYTE_DAMAGE["flip"](random, number, len(whole()))}, ("state",))


def _bytes(random: Random, number: int) -> Fault:
    return Fault(BYTE_DAMAGE[("put", "more")[number % 5 == 4]](random, number, len(whole())), ("state",))


def _field(random: Random, number: int) -> Fault:
    field = FIELDS[number % len(FIELDS)]
    value: Any = random.choice(NUMBERS)
    if field == "tag":
        value = number // len(FIELDS) % 256
    elif field == "length":
        value = random.choice((*NUMBERS, 2**62, 2**63, 2**64 - 1))
    elif field == "sizes":
        value = [random.choice(SIZES) for _ in range(random.choice((0, 1, 2, 3, 8, 9, 64)))]
    elif field == "digest":
        value = random.choice(("00" * 32, "cd" * 32, "ab" * 31 + "ac"))
    elif field == "name":
        value = random.choice((*ESCAPES, "", "scale", "x" * 5000, "__metadata__", "a\nb"))
    return Fault({"field": field, "value": value, "of": random.choice(list(tensors()))}, ("state",))


def _packed(random: Random, number: int) -> Fault:
    ways = (
        "cut",
        "flip",
        "flip",
        "bomb",
        "deep-bomb",
        "two",
        "trailing",
        "no-trailer",
        "plain",
        "zlib",
        "empty",
        "headers",
    )
    return Fault({"packed": True, "pack": ways[number % len(ways)], "draw": random.randrange(2**32)}, ("state",))


def _misfit(random: Random, number: int) -> Fault:
    """Good files that do not fit the model, which must stay as it is."""
    ways = ("shape", "dtype", "nan", "inf", "absent", "extra", "overflow", "renamed", "hash")
    return Fault({"misfit": ways[number % len(ways)], "of": random.choice(list(tensors()))}, ("state",))


def _entry(_random: Random, number: int) -> Fault:
    return Fault({"entry": ENTRIES[number % len(ENTRIES)]}, ("state",))


KINDS = (
    Kind("undamaged", 1, _undamaged),
    Kind("cut", 20, _cut),
    Kind("flip", 40, _flip),
    Kind("bytes", 20, _bytes),
    Kind("field", 40, _field),
    Kind("gzip", 10, _packed),
    Kind("misfit", 8, _misfit),
    Kind("entry", 1, _entry, {"wall_s": 20.0}),
)


def prepare(_subject: Subject) -> None:
    """Pack what takes long before workers are forked."""
    for how in ("bomb", "deep-bomb"):
        packed({"pack": how}, b"")


cases = partial(dealt, NAME, KINDS)


def damaged(what: Mapping[str, Any]) -> bytes:
    """Return the file of a case, unpacked."""
    if "how" in what:
        return damaged_bytes(whole(), what)
    if "field" in what:
        field, value = what["field"], what["value"]
        if field in ("version", "count", "digest"):
            return file([entry(name.encode(), tensor) for name, tensor in tensors().items()], **{field: value})
        parts = []
        for name, tensor in tensors().items():
            here = name == what["of"]
            spelled = (value if here and field == "name" else name).encode("utf-8", "surrogatepass")
            parts.append(entry(spelled, tensor, **({field: value} if here and field != "name" else {})))
        return file(parts)
    if "misfit" in what:
        return _misfitting(what)
    return whole(what.get("version", 2))


def _misfitting(what: Mapping[str, Any]) -> bytes:
    table, name = dict(tensors()), what["of"]
    tensor = table[name]
    how = what["misfit"]
    if how == "shape":
        table[name] = torch.zeros(7, 2, dtype=tensor.dtype)
    elif how == "dtype":
        table[name] = (
            tensor.double() if not tensor.is_floating_point() else torch.zeros(tensor.shape, dtype=torch.int64)
        )
    elif how in ("nan", "inf") and tensor.is_floating_point():
        table[name] = torch.full_like(tensor, float(how))
    elif how == "absent":
        del table[name]
    elif how == "extra":
        table["new"] = tensor
    elif how == "overflow":
        table["encoder.norm.weight"] = torch.full((4,), 1e6)
    elif how == "renamed":
        table[name + "x"] = table.pop(name)
    digest = "cd" * 32 if how == "hash" else HASH
    return file([entry(key.encode(), value) for key, value in table.items()], digest=digest)


@cache
def zeros_behind(data: bytes, megabytes: int) -> bytes:
    """Return data and very many zeros gzipped, a thousand to one."""
    packer = zlib.compressobj(wbits=31)
    parts = [packer.compress(data), *(packer.compress(bytes(1 << 20)) for _ in range(megabytes)), packer.flush()]
    return b"".join(parts)


def packed(what: Mapping[str, Any], data: bytes) -> bytes:
    """Return a file gzipped, with the damage of the case to the packing."""
    random, how = Random(what.get("draw", 0)), what.get("pack", "")
    if how == "bomb":
        return zeros_behind(whole()[:_HEAD] + entry(b"zeros", torch.zeros(0)), 300)
    if how == "deep-bomb":
        return zeros_behind(file([entry(b"scale", torch.zeros(0, 1), sizes=(40 << 20,), length=160 << 20)]), 160)
    if how == "plain":
        return data
    if how == "zlib":
        return zlib.compress(data)
    raw = gzip.compress(data, 1, mtime=0)
    return {
        "cut": raw[: random.randrange(len(raw))], "flip": damaged_bytes(raw, {"how": "flip",
        "at": random.randrange(8 * len(raw))}),
        "two": raw + raw, "trailing": raw + b"x", "no-trailer": raw[:-8], "empty": b"", "headers": raw[:10] + raw,
    }.get(how, raw)  # fmt: skip


def run(case: Case, folder: Path, subject: Subject) -> Verdict:
    """Load what the case made into a model, and compare."""
    from flodl.checkpoint import load_into, load_tensors

    what = case.what
    data = damaged(what)
    name = "state.fdl.gz" if what.get("packed") else "state.fdl"
    (folder / name).write_bytes(packed(what, data) if what.get("packed") else data)
    if "entry" in what:
        put_entry(folder, name, what["entry"])
    model = {
        key: torch.nn.Parameter(torch.ones_like(value), value.is_floating_point()) for key, value in tensors().items()
    }
    before = {key: value.detach().clone() for key, value in model.items()}

    def act() -> Any:
        return load_into(model, load_tensors(folder / name), expected_hash=HASH)

    def check(report: Any) -> Verdict:
        return _right(case, model, report, data)

    verdict = judge(case, subject, act, check)
    if verdict.error and any(not _equal(model[key].detach(), before[key]) for key in model):
        return Verdict(Grade.PARTIAL, f"refused, and tensors were changed: {verdict.text}", verdict.error)
    return verdict


def _right(case: Case, model: Mapping[str, Tensor], report: Any, data: bytes) -> Verdict:
    clean = tensors()
    if not report.missing and not report.skipped and all(_equal(model[key].detach(), clean[key]) for key in clean):
        return right()
    try:
        found = plainly(data)
    except Exception as fault:
        return silent(f"loaded, and the bytes are no file: {fault!r}")
    wrong = [key for key in clean if key in found and not _equal(model[key].detach(), found[key].to(clean[key].dtype))]
    absent = [key for key in clean if key not in found]
    if wrong or absent != list(report.missing) or [key for key in found if key not in clean] != list(report.skipped):
        return silent(f"{(wrong or absent)[:3]} are not what the file says")
    return stated("the file's own numbers" + (f"; told that {absent[0]} is absent" if absent else ""))


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return not one.numel() or torch.equal(
        one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8)
    )

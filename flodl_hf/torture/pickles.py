"""Suite ``pickles``: ``pytorch_model.bin`` damaged, rebuilt, and made to run code.

Programs of every protocol name forty functions, in every place where a program may name one; each would leave a
canary behind. Archives lie about sizes and places. What is loaded has to be the undamaged weights to the bit; where a
file keeps no checksum, a flipped number is what the file says.
"""

from __future__ import annotations

import io
import json
import pickle
import zipfile
import zlib
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from flodl_hf.torture.archives import ARCHIVES, archived
from flodl_hf.torture.case import Case, Fault, Kind, Verdict, dealt, silent, stated
from flodl_hf.torture.checkpoints import checkpoint, write_files
from flodl_hf.torture.comparing import Seen, same_as, seen, undamaged
from flodl_hf.torture.damage import BYTE_DAMAGE, ENTRIES, damaged_bytes, put_entry
from flodl_hf.torture.judging import judge
from flodl_hf.torture.programs import GADGETS, HEAD, LIES, WAYS, lying, program, weights
from flodl_hf.torture.subjects import Subject
from flodl_hf.torture.watch import CANARY

__all__ = ["NAME", "SUBJECTS", "cases", "prepare", "run"]

NAME = "pickles"
SUBJECTS = ("ours", "transformers")
FILE = "pytorch_model.bin"
FORMATS = ("zip", "legacy")


@cache
def saved(form: str) -> bytes:
    """Return the weights as ``torch.save`` writes them, today or before torch 1.6."""
    buffer = io.BytesIO()
    torch.save(weights(), buffer, _use_new_zipfile_serialization=form == "zip")
    return buffer.getvalue()


def files(data: bytes) -> dict[str, bytes]:
    """Return a folder with these weights."""
    return {"config.json": checkpoint("bert", HEAD, 1)["config.json"], FILE: data}


def _evil(random: Random, number: int) -> Fault:
    gadget = GADGETS[number % len(GADGETS)]
    return Fault(
        {
            "gadget": number % len(GADGETS), "way": WAYS[number // len(GADGETS) % len(WAYS)],
            "protocol": random.randint(0, 5),
            "in": random.choice(("zip", "legacy", "raw", "front", "index")), "name": f"{gadget[0]}.{gadget[1]}",
        },
        (FILE, SHARD),
    )  # fmt: skip


SHARD = "pytorch_model-00001-of-00001.bin"
OPCODES = bytes(range(256))


def _opcodes(random: Random, number: int) -> Fault:
    """A program of random instructions, or of one that is repeated without end."""
    if number % 3:
        raw = bytes(random.choice(OPCODES) for _ in range(random.randint(1, 60)))
    else:
        raw = random.choice(
            (b"2", b"0", b"(", b"}", b"]", b")", b"N", b"a", b"s", b"u", b"t", b"\x85", b"e")
        ) * random.choice((9, 10**6))
    start = b"\x80\x02" if random.random() < 0.8 else b""
    return Fault({"raw": (start + raw + b".").hex() if len(raw) < 99 else [start.hex(), raw[:1].hex(), len(raw)],
                  "in": random.choice(("zip", "raw", "front"))}, (FILE,))  # fmt: skip


def _lie(random: Random, number: int) -> Fault:
    return Fault(
        {"lie": LIES[number % len(LIES)], "draw": random.randrange(2**32), "name": random.choice(sorted(weights()))},
        (FILE,),
    )


def _archive(random: Random, number: int) -> Fault:
    return Fault({"archive": ARCHIVES[number % len(ARCHIVES)], "draw": random.randrange(2**32)}, (FILE,))


# --- the rest ---------------------------------------------------------------------------------------------------------


def _undamaged(_random: Random, number: int) -> Fault:
    return Fault({"form": FORMATS[number % 2]})


def _bytes(random: Random, number: int) -> Fault:
    form, way = FORMATS[number % 2], ("flip", "flip", "put", "cut", "more")[number // 2 % 5]
    return Fault({"form": form, **BYTE_DAMAGE[way](random, random.randrange(10**6), len(saved(form)))}, (FILE,))


def _entry(_random: Random, number: int) -> Fault:
    return Fault({"form": FORMATS[number % 2], "entry": ENTRIES[number // 2 % len(ENTRIES)]}, (FILE,))


def _neighbours(random: Random, number: int) -> Fault:
    ways = (
        "safetensors-too",
        "named-in-safetensors-index",
        "index",
        "index-traversal",
        "index-absolute",
        "index-safetensors",
    )
    return Fault({"beside": ways[number % len(ways)], "gadget": random.randrange(len(GADGETS))}, (FILE, SHARD, "index"))


KINDS = (
    Kind("undamaged", 1, _undamaged),
    Kind("runs-code", 60, _evil),
    Kind("instructions", 20, _opcodes),
    Kind("bytes", 60, _bytes),
    Kind("lie", 30, _lie),
    Kind("archive", 12, _archive),
    Kind("entry", 2, _entry, {"wall_s": 20.0}),
    Kind("neighbours", 4, _neighbours),
)

cases = partial(dealt, NAME, KINDS)


def prepare(_subject: Subject) -> None:
    """Make the checkpoint before workers are forked."""
    for form in FORMATS:
        saved(form)


def _evil_file(what: Mapping[str, Any], raw: bytes) -> bytes:
    place = what.get("in", "zip")
    if place == "raw":
        return raw
    if place == "front":
        return raw + saved("legacy")
    if place == "legacy":
        head = b"".join(
            pickle.dumps(value, protocol=2) for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})
        )
        return head + raw + pickle.dumps([], protocol=2)
    return archived(raw, {})


def made(what: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files of a case."""
    if "gadget" in what and "beside" not in what:
        data = _evil_file(what, program(what["way"], what["protocol"], GADGETS[what["gadget"]]))
        if what["in"] == "index":
            index = {"metadata": {}, "weight_map": dict.fromkeys(weights(), SHARD)}
            found = files(b"")
            del found[FILE]
            return {**found, SHARD: data, "pytorch_model.bin.index.json": json.dumps(index).encode()}
        return files(data)
    if "raw" in what:
        given = what["raw"]
        raw = (
            bytes.fromhex(given)
            if isinstance(given, str)
            else bytes.fromhex(given[0]) + bytes.fromhex(given[1]) * given[2] + b"."
        )
        return files(_evil_file(what, raw))
    if "lie" in what:
        return files(archived(*lying(what)))
    if "archive" in what:
        return files(
            archived(*lying({"lie": "", "draw": 0, "name": next(iter(weights()))}), what["archive"], what["draw"])
        )
    if "beside" in what:
        return _beside(what)
    data = saved(what["form"])
    return files(damaged_bytes(data, what) if "how" in what else data)


def _beside(what: Mapping[str, Any]) -> dict[str, bytes]:
    evil = archived(program("reduce", 2, GADGETS[what["gadget"]]), {})
    found, how = files(evil), what["beside"]
    whole = {"metadata": {}, "weight_map": dict.fromkeys(weights(), FILE)}
    if how == "safetensors-too":
        found["model.safetensors"] = checkpoint("bert", HEAD, 1)["model.safetensors"]
    elif how in ("named-in-safetensors-index", "index"):
        kind = "model.safetensors" if how.startswith("named") else FILE
        found[f"{kind}.index.json"] = json.dumps(whole).encode()
    else:
        target = {"index-traversal": "../outside/evil.bin", "index-absolute": "/outside/evil.bin"}.get(
            how, "model.safetensors"
        )
        del found[FILE]
        found[f"{FILE}.index.json"] = json.dumps({"weight_map": dict.fromkeys(weights(), target)}).encode()
    return found


EVIL = b"open(%r, 'w')\n" % CANARY.encode()


def run(case: Case, folder: Path, subject: Subject) -> Verdict:
    """Load what the case made, and compare with what is right."""
    clean = undamaged(subject, folder.parent, NAME, files(saved("zip")), HEAD)
    found = made(case.what)
    write_files(folder, {**found, "evil.py": EVIL})
    if "entry" in case.what:
        put_entry(folder, FILE, case.what["entry"])
    return judge(
        case, subject, lambda: seen(subject, folder, HEAD), lambda it: _right(case, it, clean, found.get(FILE, b""))
    )


def _right(case: Case, it: Seen, clean: Seen, data: bytes) -> Verdict:
    same = same_as(it, clean)
    if same is not None:
        return same
    what = case.what
    if what.get("lie") in ("swap", "same", "stride", "key", "shape", "offset"):
        return stated("another table of tensors")
    if (
        what.get("how") in ("flip", "put")
        and (what["form"] == "legacy" or _unchecked(data))
        and len(data) == len(saved(what["form"]))
    ):
        wrong = [name for name, tensor in it.tensors.items() if not _there(tensor, data, name, what["form"])]
        return stated("the file's own numbers, which it keeps no checksum of") if not wrong else silent(f"{wrong[:2]}")
    return silent("weights or scores are others")


def _unchecked(data: bytes) -> bool:
    """Return whether an archive keeps no checksums."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return all(entry.CRC in (0, zlib.crc32(b"")) for entry in archive.infolist())


def _there(tensor: Tensor, data: bytes, name: str, form: str) -> bool:
    """Return whether a tensor's bytes are those of its place in a file whose length is the undamaged one's."""
    at = saved(form).find(weights()[name].contiguous().view(torch.uint8).numpy().tobytes())
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return data[at : at + len(raw)] == raw

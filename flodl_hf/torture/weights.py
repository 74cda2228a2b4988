"""Suite ``weights``: one safetensors file damaged in its header, its numbers or its length.

A load is right where every tensor and the scores of a text are those of the undamaged file, to the bit. Where the
file validly says other numbers, the model must hold just those.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from flodl_hf.torture.case import Case, Fault, Kind, Verdict, dealt, silent, stated
from flodl_hf.torture.checkpoints import checkpoint, parts_of, tensors_in, torch_dtype, whole, write_files
from flodl_hf.torture.comparing import IDS, Seen, same_as, seen, undamaged, unlike_file
from flodl_hf.torture.damage import BYTE_DAMAGE, damaged_bytes, spelled
from flodl_hf.torture.header_edits import EDITS
from flodl_hf.torture.judging import judge
from flodl_hf.torture.subjects import Subject

__all__ = ["NAME", "SUBJECTS", "cases", "prepare", "run"]

NAME = "weights"
SUBJECTS = ("ours", "transformers")
FILE = "model.safetensors"
HEAD = "sequence_classification"


def files() -> dict[str, bytes]:
    """Return the checkpoint that is damaged; without a tokenizer, which has a suite of its own."""
    whole_ = checkpoint("bert", HEAD, layers=1)
    return {name: whole_[name] for name in ("config.json", FILE)}


@cache
def _header() -> dict[str, Any]:
    return parts_of(files()[FILE])[0]


def _names() -> list[str]:
    return [name for name in _header() if name != "__metadata__"]


def _header_size() -> int:
    return 8 + struct.unpack("<Q", files()[FILE][:8])[0]


# --- damage -----------------------------------------------------------------------------------------------------------


def _undamaged(_random: Random, _number: int) -> Fault:
    return Fault()


def _header_flip(random: Random, number: int) -> Fault:
    size = 8 * _header_size()
    # Every bit once, in an order that spreads over the header, then again with a second one.
    at = number * 7919 % size
    what: dict[str, Any] = {"how": "flip", "at": at}
    return Fault(what if number < size else {**what, "and": random.randrange(size)}, (FILE,))


def _header_bytes(random: Random, number: int) -> Fault:
    return Fault(BYTE_DAMAGE["put"](random, number, _header_size()), (FILE,))


def _body_flip(random: Random, _number: int) -> Fault:
    start = 8 * _header_size()
    return Fault({"how": "flip", "at": start + random.randrange(8 * len(files()[FILE]) - start)}, (FILE,))


def _cut(random: Random, number: int) -> Fault:
    size = len(files()[FILE])
    return Fault({"how": "cut", "at": number if number < size else random.randrange(size)}, (FILE,))


def _more(random: Random, number: int) -> Fault:
    return Fault(BYTE_DAMAGE["more"](random, number, 0), (FILE,))


def _length(random: Random, number: int) -> Fault:
    real = _header_size() - 8
    known = (0, 1, 2, 7, real - 1, real + 1, real + 8, len(files()[FILE]), len(files()[FILE]) - 8, 10**8, 10**8 + 1,
             99_999_999, 2**31, 2**32, 2**62, 2**63, 2**63 - 1, 2**64 - 1, 2**64 - 8)  # fmt: skip
    value = known[number] if number < len(known) else random.randrange(2 ** random.randint(1, 64))
    return Fault({"how": "put", "at": 0, "bytes": struct.pack("<Q", value).hex(), "over": 8}, (FILE,))


def _header_edit(random: Random, number: int) -> Fault:
    names = list(EDITS)
    edit = names[number % len(names)]
    return Fault({"edit": edit, "name": random.choice(_names()), "draw": random.randrange(2**32)}, (FILE,))


def _not_finite(random: Random, number: int) -> Fault:
    names = _names()
    value = ("nan", "inf", "-inf")[number // len(names) % 3]
    return Fault({"value": value, "count": random.choice((1, 1, 3))}, (FILE, "weights"), (names[number % len(names)],))


def _stored_as(random: Random, number: int) -> Fault:
    dtype = ("F16", "BF16", "F64", "I64")[number % 4]
    return Fault({"stored": dtype, "names": random.choice(("all", "one")), "name": random.choice(_names())})


def _live(random: Random, number: int) -> Fault:
    return Fault({"fate": ("cut", "overwritten", "removed", "replaced")[number % 4], "early": random.random() < 0.2})


KINDS = (
    Kind("undamaged", 1, _undamaged),
    Kind("header-flip", 60, _header_flip),
    Kind("header-bytes", 20, _header_bytes),
    Kind("header-edit", 40, _header_edit),
    Kind("length", 5, _length),
    Kind("cut", 30, _cut),
    Kind("more", 3, _more),
    Kind("body-flip", 25, _body_flip),
    Kind("not-finite", 8, _not_finite),
    Kind("stored-as", 4, _stored_as),
    Kind("live", 4, _live),
)

cases = partial(dealt, NAME, KINDS)


def prepare(_subject: Subject) -> None:
    """Make the checkpoint before workers are forked."""
    files()


# --- what is written --------------------------------------------------------------------------------------------------


def damaged(case: Case) -> bytes:
    """Return the weight file of a case."""
    data, what = files()[FILE], case.what
    if "how" in what:
        changed = damaged_bytes(data, what)
        return damaged_bytes(changed, {"how": "flip", "at": what["and"]}) if "and" in what else changed
    if "edit" in what:
        header, body = parts_of(data)
        found = EDITS[what["edit"]](header, what["name"], Random(what["draw"]))
        if isinstance(found, (str, bytes)):
            return whole(found, body)
        header = header if found is None else found
        start, end = header.pop("\0cut", (0, 0))
        return whole(spelled(header), body[:start] + body[end:])
    if "value" in what:
        return _with_values(data, case.fault.keys[0], float(what["value"]), what["count"])
    if "stored" in what:
        return _stored(data, what)
    return data


def _with_values(data: bytes, name: str, value: float, count: int) -> bytes:
    header, body = parts_of(data)
    start, end = header[name]["data_offsets"]
    places = [start + 4 * ((end - start) // 4 * step // count) for step in range(count)]
    changed = bytearray(body)
    for place in places:
        changed[place : place + 4] = struct.pack("<f", value)
    return data[: len(data) - len(body)] + bytes(changed)


def _stored(data: bytes, what: Mapping[str, Any]) -> bytes:
    header, body = parts_of(data)
    new: dict[str, Any] = {"__metadata__": header.pop("__metadata__")}
    parts = b""
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        raw, dtype = body[start:end], entry["dtype"]
        if what["names"] == "all" or name == what["name"]:
            dtype = what["stored"]
            values = torch.frombuffer(bytearray(raw), dtype=torch.float32).to(torch_dtype(dtype))
            raw = values.view(torch.uint8).numpy().tobytes()
        new[name] = {**entry, "dtype": dtype, "data_offsets": [len(parts), len(parts) + len(raw)]}
        parts += raw
    return whole(new, parts)


# --- what is right ----------------------------------------------------------------------------------------------------


def run(case: Case, folder: Path, subject: Subject) -> Verdict:
    """Load what the case damaged, and compare with what is right."""
    clean = undamaged(subject, folder.parent, NAME, files(), HEAD)
    data = damaged(case)
    write_files(folder, {**files(), FILE: data})
    if "fate" in case.what:
        return _lives(case, folder, subject, clean)

    def check(found: Seen) -> Verdict:
        same = same_as(found, clean)
        if same is not None:
            return same
        if case.kind in ("body-flip", "stored-as") or case.what.get("edit") in ("swapped", "metadata_harmless"):
            wrong = unlike_file(found.tensors, tensors_in(data))
            return stated("the file's own numbers") if wrong is None else silent(wrong)
        wrong = unlike_file(found.tensors, tensors_in(files()[FILE]))
        return silent(f"loaded, and {wrong or 'the scores are others'}")

    return judge(case, subject, lambda: seen(subject, folder, HEAD), check)


def _lives(case: Case, folder: Path, subject: Subject, clean: Seen) -> Verdict:
    """The file changes under a loaded model."""
    file = folder / FILE
    model = subject.load(folder, HEAD, tokenizer=False)
    if case.what["early"]:
        subject.scores(model, IDS)
    if case.what["fate"] == "cut":
        with file.open("r+b") as opened:
            opened.truncate(10)
    elif case.what["fate"] == "overwritten":
        with file.open("r+b") as opened:
            opened.write(b"\x3f" * file.stat().st_size)
    else:
        file.unlink()
        if case.what["fate"] == "replaced":
            file.write_bytes(b"\x3f" * 20_000)
    return judge(
        case,
        subject,
        lambda: Seen(model, subject.tensors(model), subject.scores(model, IDS)),
        lambda found: same_as(found, clean) or silent("the loaded model changed"),
    )

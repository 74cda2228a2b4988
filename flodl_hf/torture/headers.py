"""Suite ``headers``: safetensors files alone, tens of thousands of them, without a model around.

The same damage as in `flodl_hf.torture.weights`, some hundred cases a second. What is accepted has to be just the
tensors that `strictly` reads, forty lines that know every rule of the format; what that refuses has to be refused.
"""

from __future__ import annotations

import json
import struct
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flodl_hf.torture.case import Case, Kind, Verdict, dealt, right, silent, stated
from flodl_hf.torture.checkpoints import tensors_in
from flodl_hf.torture.judging import judge
from flodl_hf.torture.subjects import Safetensors, Subject
from flodl_hf.torture.weights import KINDS as OF_WEIGHTS
from flodl_hf.torture.weights import damaged, files

__all__ = ["NAME", "SUBJECTS", "cases", "prepare", "run", "strictly"]

NAME = "headers"
SUBJECTS = ("ours", "safetensors")
FILE = "model.safetensors"
_SHARES = {"header-flip": 60, "header-bytes": 40, "header-edit": 40, "length": 6, "cut": 20, "more": 2, "body-flip": 4,
           "undamaged": 1}  # fmt: skip
KINDS = tuple(Kind(kind.name, _SHARES[kind.name], kind.make) for kind in OF_WEIGHTS if kind.name in _SHARES)
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2,
          "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1,
          "C64": 8}  # fmt: skip

cases = partial(dealt, NAME, KINDS)


def prepare(_subject: Subject) -> None:
    """Make the file before workers are forked."""
    files()


class _NotStrict(ValueError):
    pass


def strictly(data: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return each tensor's type, shape and bytes.

    Raises:
        ValueError: the bytes break a rule of the format.
    """

    def rule(holds: bool) -> None:
        if not holds:
            raise _NotStrict

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        rule(len(dict(pairs)) == len(pairs))
        return dict(pairs)

    def whole_numbers(value: Any) -> bool:
        return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)

    rule(len(data) >= 8)
    (length,) = struct.unpack("<Q", data[:8])
    rule(length <= min(10**8, len(data) - 8))
    text = data[8 : 8 + length].decode("utf-8").rstrip(" ")
    rule(text.startswith("{"))
    try:
        header = json.loads(text, object_pairs_hook=unique, parse_constant=lambda _: rule(False))
    except RecursionError:
        raise _NotStrict from None
    extra = header.pop("__metadata__", {})
    rule(isinstance(extra, dict) and all(isinstance(value, str) for value in extra.values()))
    body = data[8 + length :]
    found: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    places = []
    for name, entry in header.items():
        rule(isinstance(entry, dict) and set(entry) == {"dtype", "shape", "data_offsets"})
        rule(isinstance(entry["dtype"], str) and entry["dtype"] in _SIZES)
        rule(whole_numbers(entry["shape"]) and whole_numbers(entry["data_offsets"]) and len(entry["data_offsets"]) == 2)
        start, end = entry["data_offsets"]
        rule(end - start == prod(entry["shape"]) * _SIZES[entry["dtype"]])
        places.append((start, end))
        found[name] = (entry["dtype"], tuple(entry["shape"]), body[start:end])
    at = 0
    for start, end in sorted(places):
        rule(start == at)
        at = end
    rule(at == len(body))
    return found


def run(case: Case, folder: Path, subject: Subject) -> Verdict:
    """Read what the case damaged, and compare with the strict reading."""
    data = damaged(case)
    path = folder / FILE
    path.write_bytes(data)
    return judge(case, subject, lambda: _read(subject, path), lambda found: _right(found, data))


def _read(subject: Subject, path: Path) -> dict[str, Tensor]:
    if isinstance(subject, Safetensors):
        return subject.read(path)
    from flodl.checkpoint import load_tensors

    return dict(load_tensors(path).tensors)


def _right(found: dict[str, Tensor], data: bytes) -> Verdict:
    try:
        expected = strictly(data)
    except (ValueError, UnicodeDecodeError):
        return silent("accepted, and the file breaks a rule of the format")
    if found.keys() != expected.keys():
        return silent(f"other names: {sorted(found.keys() ^ expected.keys())[:4]}")
    for name, (_, shape, raw) in expected.items():
        tensor = found[name]
        mine = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        if tuple(tensor.shape) != shape or mine != raw:
            return silent(f"{name} is another")
    clean = tensors_in(files()[FILE])
    same = expected.keys() == clean.keys() and all(torch.equal(found[name], clean[name]) for name in clean)
    return right() if same else stated("the file's own tensors")

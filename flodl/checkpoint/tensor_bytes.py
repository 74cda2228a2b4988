"""Conversion between tensors and bytes, and checks shared by both file formats."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NoReturn

import torch
from torch import Tensor

from flodl.errors import CheckpointError, capped, printable
from flodl.safetensors_header import name_fault

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
"""The dtypes of safetensors that torch has, in the order of the library, which sorts tensors by it descending."""


def refuse(path: str, problems: list[str], remedy: str) -> NoReturn:
    """Raise a CheckpointError with the file and all problems."""
    text = problems[0] if len(problems) == 1 else f"{len(problems)} faults:\n{capped(problems)}"
    raise CheckpointError(f"{printable(path, 400)}: {text}\n{remedy}", problems=problems, path=path)


def check_hash(structural_hash: str) -> str:
    """Return the hash in lower case; empty if it is empty or all zero.

    Raises:
        ValueError: it is not 64 hexadecimal digits.
    """
    text = structural_hash.lower()
    if text and not re.fullmatch("[0-9a-f]{64}", text):
        raise ValueError(f"found structural hash {printable(structural_hash)}, expected 64 hexadecimal digits")
    return "" if set(text) == {"0"} else text


def check_saveable(path: str, tensors: Mapping[str, Tensor], dtypes: Mapping[torch.dtype, object], kind: str) -> None:
    """Raise one CheckpointError for all tensors that a format cannot store unchanged."""
    known = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    problems: list[str] = []
    for name, tensor in tensors.items():
        fault = name_fault(name)
        if fault:
            problems.append(f"name {printable(name)} {fault}")
        elif tensor.device.type == "meta":
            problems.append(f"tensor {printable(name)} is on the meta device and has no values")
        elif tensor.layout is not torch.strided:
            problems.append(f"tensor {printable(name)} has layout {tensor.layout}, expected a dense tensor")
        elif tensor.dtype not in dtypes:
            problems.append(f"tensor {printable(name)} is {tensor.dtype}; {kind} supports {known}")
        elif tensor.ndim > 8:
            problems.append(f"tensor {printable(name)} has {tensor.ndim} dimensions, expected at most 8")
    if problems:
        refuse(path, problems, "Nothing was written. Rename, convert or omit these tensors.")


def bytes_of(tensor: Tensor) -> memoryview:
    """Return tensor values as little-endian bytes; a dense CPU tensor is not copied."""
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy().data


def tensor_from(data: memoryview | bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor that uses the memory of ``data``.

    Raises:
        ValueError: torch cannot create this shape, or a boolean is neither 0 nor 1.
    """
    flat = torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
    if dtype is torch.bool and flat.numel() and int(flat.max()) > 1:
        raise ValueError(f"found the boolean {int(flat.max())}, expected 0 or 1")
    try:
        return flat.view(dtype).reshape(shape)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"torch cannot create shape {shape} of {dtype}") from error

"""Checkpoints as safetensors files.

Names, dtypes and shapes stand in the header, as the format has it; its metadata adds ``format=pt``,
``flodl.version`` and, where known, ``flodl.structural_hash``. The data is read into memory of our
own: a mapped file that is truncated later would kill the process, one that is overwritten would
change the model.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from io import FileIO
from types import MappingProxyType

import torch
from torch import Tensor

from flodl.checkpoint.raw import bytes_of, check_hash, check_saveable, refuse, tensor_from
from flodl.checkpoint.records import Checkpoint
from flodl.errors import printable
from flodl.files import open_regular, write_atomically
from flodl.safetensors_header import DTYPE_BITS, Header, read_header

__all__ = ["TORCH_DTYPES", "compose_head", "header_of", "read", "version_of", "write"]

VERSION = 1

TORCH_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
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
        "I64": torch.int64,
        "U64": torch.uint64,
        "F64": torch.float64,
        "C64": torch.complex64,
    }
)
"""The dtypes of the format that torch has."""

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_OURS = "flodl."


def write(path: str, tensors: Mapping[str, Tensor], structural_hash: str, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file; ``metadata`` may not use the keys that flodl sets itself."""
    check_saveable(path, tensors, _NAMES, "a safetensors file")
    problems = [
        f"metadata {printable(str(key))}: expected a text under a key other than 'format' and 'flodl.*'"
        for key, value in metadata.items()
        if not isinstance(key, str) or not isinstance(value, str) or key == "format" or key.startswith(_OURS)
    ]
    if problems:
        refuse(path, problems, "Nothing was written. Rename the keys and give strings.")
    written = {"format": "pt", **metadata, f"{_OURS}version": str(VERSION)}
    if structural_hash:
        written[f"{_OURS}structural_hash"] = structural_hash
    try:
        head, order = compose_head(tensors, written)
    except UnicodeEncodeError:
        refuse(path, ["metadata holds a lone surrogate"], "Nothing was written. Give valid text.")

    def chunks() -> Iterator[bytes | memoryview]:
        yield head
        for name in order:
            yield bytes_of(tensors[name])

    write_atomically(path, chunks())


def compose_head(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[bytes, list[str]]:
    """Return what stands before the data of a file with these tensors, and the order in which their bytes follow.

    Raises:
        UnicodeEncodeError: a text holds a lone surrogate.
    """
    # Wide elements first keeps every tensor aligned to its element size, as readers that map the file want.
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    table: dict[str, object] = {"__metadata__": dict(metadata)}
    position = 0
    for name in order:
        tensor = tensors[name]
        end = position + tensor.numel() * tensor.element_size()
        dtype = _NAMES[tensor.dtype]
        table[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    head = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head, order


def read(path: str) -> Checkpoint:
    """Return the contents of a safetensors file, whoever wrote it."""
    descriptor = open_regular(path)
    try:
        header = read_header(descriptor, name=path)
        version, structural_hash = version_of(path, header), _hash_of(path, header)
        unknown = [
            f"tensor {printable(name)}: torch has no dtype for {info.dtype}"
            for name, info in header.tensors.items()
            if info.dtype not in TORCH_DTYPES
        ]
        if unknown:
            refuse(path, unknown, "Convert these tensors with the tool that wrote them.")
        with open(descriptor, "rb", buffering=0, closefd=False) as file:
            tensors = {name: _tensor(path, file, header, name) for name in header.order}
    finally:
        os.close(descriptor)
    metadata = {key: text for key, text in header.metadata.items() if key != "format" and not key.startswith(_OURS)}
    return Checkpoint(tensors, structural_hash, version, metadata, "safetensors", path)


def header_of(path: str) -> Header:
    """Return the checked header."""
    return read_header(path)


def version_of(path: str, header: Header) -> int:
    """Return the version in the metadata, 0 for a file that flodl did not write."""
    text = header.metadata.get(f"{_OURS}version", "0")
    if text not in ("0", str(VERSION)):
        refuse(
            path,
            [f"flodl.version {printable(text)}, expected {VERSION}"],
            "Update flodl, or save the file again with this version.",
        )
    return int(text)


def _hash_of(path: str, header: Header) -> str:
    try:
        return check_hash(header.metadata.get(f"{_OURS}structural_hash", ""))
    except ValueError as error:
        refuse(path, [str(error)], "The file was changed by hand or damaged; save it again.")


def _tensor(path: str, file: FileIO, header: Header, name: str) -> Tensor:
    info = header.tensors[name]
    assert DTYPE_BITS[info.dtype] == 8 * TORCH_DTYPES[info.dtype].itemsize
    data = torch.empty(info.num_bytes, dtype=torch.uint8).numpy().data
    file.seek(header.data_start + info.start)
    done = 0
    while done < info.num_bytes:
        count = file.readinto(data[done:])
        if not count:
            refuse(
                path,
                [f"tensor {printable(name)}: the file became shorter while it was read"],
                "Fetch it again.",
            )
        done += count
    try:
        return tensor_from(data, TORCH_DTYPES[info.dtype], info.shape)
    except ValueError as error:
        refuse(path, [f"tensor {printable(name)}: {error}"], "Fetch or write the file again.")

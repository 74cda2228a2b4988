"""Checkpoints as safetensors files.

The metadata adds ``format=pt``, ``flodl.version`` and, if known, ``flodl.structural_hash``. Data is read into own
memory: if a mapped file is truncated later the process is killed, and if it is overwritten the model changes.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from flodl.checkpoint.stored_rows import rows_of
from flodl.checkpoint.tensor_bytes import TORCH_DTYPES, bytes_of, check_hash, check_saveable, refuse
from flodl.errors import printable
from flodl.files import open_regular, write_atomically
from flodl.safetensors_header import read_header

VERSION = 1
_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_PREFIX = "flodl."


def write(path: str, tensors: Mapping[str, Tensor], structural_hash: str, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file; ``metadata`` may not use the keys that flodl sets."""
    check_saveable(path, tensors, _NAMES, "a safetensors file")
    problems = [
        f"metadata {printable(str(key))}: expected a text under a key other than 'format' and 'flodl.*'"
        for key, value in metadata.items()
        if not isinstance(key, str) or not isinstance(value, str) or key == "format" or key.startswith(_PREFIX)
    ]
    if problems:
        refuse(path, problems, "Nothing was written. Rename the keys and pass strings.")
    written = {"format": "pt", **metadata, f"{_PREFIX}version": str(VERSION)}
    if structural_hash:
        written[f"{_PREFIX}structural_hash"] = structural_hash
    try:
        head, order = compose_head(tensors, written)
    except UnicodeEncodeError:
        refuse(path, ["the metadata contains a lone surrogate"], "Nothing was written. Pass valid text.")

    def chunks() -> Iterator[bytes | memoryview]:
        yield head
        for name in order:
            yield bytes_of(tensors[name])

    write_atomically(path, chunks())


def compose_head(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[bytes, list[str]]:
    """Return the bytes before the data, and the order of the tensors.

    Raises:
        UnicodeEncodeError: a text contains a lone surrogate.
    """
    # Wide elements first aligns every tensor to its element size, as readers that map the file need.
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


def read(path: str) -> tuple[dict[str, Tensor], str, int, dict[str, str]]:
    """Return tensors, structural hash, version and metadata of a safetensors file."""
    descriptor = open_regular(path)
    try:
        header = read_header(descriptor, name=path)
        version = header.metadata.get(f"{_PREFIX}version", "0")
        if version not in ("0", str(VERSION)):
            refuse(path, [f"found flodl.version {printable(version)}, expected {VERSION}"], "Update flodl.")
        try:
            digest = check_hash(header.metadata.get(f"{_PREFIX}structural_hash", ""))
        except ValueError as error:
            refuse(path, [str(error)], "The file was changed by hand or is damaged. Save it again.")
        tensors = {name: rows.read(descriptor) for name, rows in rows_of(path, header).items()}
    finally:
        os.close(descriptor)
    metadata = {key: text for key, text in header.metadata.items() if key != "format" and not key.startswith(_PREFIX)}
    return tensors, digest, int(version), metadata

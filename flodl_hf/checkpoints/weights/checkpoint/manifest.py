"""Contents of a folder of weights: records without behaviour, enough to write the same folder again.

Decides which facts of a source are stored. Reading them is for :mod:`flodl_hf.checkpoints.weights.checkpoint.folder`,
using them to write is for :mod:`flodl_hf.checkpoints.saving.state`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Literal

import torch

__all__ = ["DTYPES", "DTYPE_NAMES", "Layout", "SourceFile", "SourceManifest", "StoredTensor"]

Layout = Literal["single", "sharded", "bin", "bin-sharded"]

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
}
"""safetensors' name of a number type to torch's."""

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
"""torch's number type to safetensors' name."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as a file declares it.

    Attributes:
        name: the name in the file, prefix and old spelling included.
        dtype: safetensors' name of the number type, such as ``"F32"``.
        shape: the sizes, slowest first; ``()`` for a single number.
        file: the name of the file in its folder.
        position: the place of its bytes among the tensors of that file, from 0.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    position: int

    @property
    def nbytes(self) -> int:
        """Return the size of the tensor in bytes."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One weight file of a folder.

    Attributes:
        name: the name in the folder.
        size: bytes of the file.
        header: the header of a safetensors file, byte for byte with its padding; empty for a ``.bin`` file.
            Writing the same tensors behind it gives the identical file again.
    """

    name: str
    size: int
    header: bytes = b""


@dataclass(frozen=True, slots=True)
class SourceManifest:
    """Everything the files of a checkpoint declare, without one byte of their weights.

    Attributes:
        folder: the folder of the files.
        layout: ``"single"`` or ``"sharded"`` safetensors, ``"bin"`` or ``"bin-sharded"`` torch files.
        files: the weight files, in the order of their names in the index or of the single file.
        tensors: each tensor by its stored name, in the order of the files and of the bytes in them.
        metadata: of each file, the free text pairs of its header.
        index_name: the file name of the shard index, None without one.
        index_text: the unchanged text of the index, None without one.
        index_metadata: the index without its weight map.
        ties: a name to the earlier name with the same storage; only ``.bin`` files record this.
        passed_over: description of weights in the folder that are not read; "" if there are none.
    """

    folder: Path
    layout: Layout
    files: tuple[SourceFile, ...]
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, Mapping[str, str]]
    index_name: str | None = None
    index_text: str | None = None
    index_metadata: Mapping[str, object] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)
    passed_over: str = ""

    @property
    def nbytes(self) -> int:
        """Return the total bytes of all tensors: the memory that reading everything takes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

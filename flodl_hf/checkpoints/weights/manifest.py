"""Contents of a folder of weights: one opened file, and a manifest of all.

Decides which facts of a source are stored: enough for :mod:`flodl_hf.checkpoints.saving.state` to write the same folder
again.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from flodl.checkpoint.tensor_bytes import TORCH_DTYPES as DTYPES
from flodl.errors import ConfigError, capped, nearest, printable
from flodl.memory import available_memory
from flodl.safetensors_header import read_header
from flodl.system import read_at
from flodl_hf.checkpoints.folders import refused
from flodl_hf.checkpoints.weights.prefetch import Extent, cut, extents_of, fill, memory_of

Weights = Literal["memory", "disk"]
Layout = Literal["single", "sharded", "bin", "bin-sharded"]

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
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str

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


class Shard:
    """An open safetensors file; `parse` comes first and reads no weights. Torch files are a subclass.

    Args:
        descriptor: the open file, which the shard closes.
        name: its name in the folder.
        path: its path, for messages.

    Attributes:
        file: its name, size and header.
        metadata: the text pairs of its header.
        entries: dtype and shape by tensor name, in the order of their bytes.
        ties: a name to the earlier name with the same bytes.
    """

    def __init__(self, descriptor: int, name: str, path: str) -> None:
        self.file = SourceFile(name, os.fstat(descriptor).st_size)
        self.metadata: Mapping[str, str] = {}
        self.entries: Mapping[str, tuple[str, tuple[int, ...]]] = {}
        self.ties: Mapping[str, str] = {}
        self._where = path
        self._descriptor: int | None = descriptor
        self._extents: dict[str, Extent] = {}

    def close(self) -> None:
        """Release the file; closing twice is harmless."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open_descriptor(self) -> int:
        if self._descriptor is None:
            raise refused(self._where, "is closed", "an open file; read its tensors before it is closed")
        return self._descriptor

    def parse(self) -> None:
        """Read and check the header.

        Raises:
            CheckpointError: a damaged header, or a number type that torch does not have.
        """
        descriptor = self._open_descriptor()
        header = read_header(descriptor, name=self._where)
        extents = extents_of(header)
        unknown = [f"{printable(extent.name)}: {extent.dtype}" for extent in extents if extent.dtype not in DTYPES]
        if unknown:
            found = f"{len(unknown)} tensors have a dtype that torch does not support:\n{capped(unknown)}\n"
            raise refused(self._where, found, f"one of {', '.join(DTYPES)}", problems=unknown)
        self.file = SourceFile(self.file.name, self.file.size, read_at(descriptor, header.data_start, 0))
        self.metadata = header.metadata
        self._extents = {extent.name: extent for extent in extents}
        self.entries = {extent.name: (extent.dtype, extent.shape) for extent in extents}

    def read(self, names: Sequence[str], *, mapped: bool = False) -> list[Tensor]:
        """Return the tensors of ``names``, in that order, copied or mapped."""
        extents = [self._extents[name] for name in names]
        return (map_extents if mapped else read_extents)(self._open_descriptor(), self._where, extents)


def read_extents(descriptor: int, path: str, extents: Sequence[Extent]) -> list[Tensor]:
    """Return copies of the tensors at ``extents``, in that order, each in a separate allocation.

    Args:
        descriptor: the open file.
        path: the path for messages.
        extents: which bytes to read; reading is quickest when they are in file order.

    Raises:
        CheckpointError: the file is shorter than its header states.
    """
    ready = memory_of(descriptor)
    tensors: list[Tensor] = []
    missing: list[int] = []
    for at, extent in enumerate(extents):
        dtype = DTYPES[extent.dtype]
        memory = ready.pop(extent.start, None)
        if memory is not None:
            tensors.append(torch.frombuffer(memory, dtype=dtype).view(extent.shape))
        else:
            tensors.append(torch.empty(extent.shape, dtype=dtype))
            missing.append(at)
    if missing:
        views = [tensors[at].reshape(-1).view(torch.uint8).numpy().data for at in missing]
        fill(descriptor, path, [extents[at] for at in missing], views)
    return tensors


def map_extents(descriptor: int, path: str, extents: Sequence[Extent]) -> list[Tensor]:
    """Return tensors that map the file, in the order of ``extents``; writing to one copies its pages.

    Pages are read on first use and shared with every process that maps the file. In return
    the file must not change while one of them is alive: overwriting it changes them, truncating it kills the process.

    Raises:
        CheckpointError: the file is shorter than its header states.
    """
    size = os.fstat(descriptor).st_size
    end = max((extent.start + extent.nbytes for extent in extents), default=0)
    if end > size:
        raise cut(path, size, end - size)
    if end == 0:
        return read_extents(descriptor, path, extents)
    mapping = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
    tensors: list[Tensor] = []
    for extent in extents:
        dtype = DTYPES[extent.dtype]
        if extent.nbytes == 0 or extent.start % dtype.itemsize:
            tensors += read_extents(descriptor, path, [extent])  # torch wants numbers at multiples of their size
            continue
        # Each tensor keeps the mapping alive through its own storage, so saving or sharing one of them does
        # not drag its neighbours along.
        count = extent.nbytes // dtype.itemsize
        flat = torch.frombuffer(mapping, dtype=dtype, count=count, offset=extent.start)
        tensors.append(flat.view(extent.shape))
    return tensors


def stays_on_disk(
    weights: str | None,
    manifest: SourceManifest,
    used: Iterable[str],
    dtype: torch.dtype,
    device: torch.device,
    *,
    mapped: bool | None,
    notes: list[str],
) -> bool:
    """Return whether a folder's weights stay on disk: requested by the caller, or too large for memory.

    Args:
        weights: "memory", "disk", or None to decide by the memory that is free.
        manifest: the folder's weight files.
        used: stored names that the model takes.
        dtype: dtype of the model's weights.
        device: device of the model.
        mapped: the caller's ``mapped`` argument.
        notes: receives a line if the decision was made here.

    Raises:
        ConfigError: another word, or weights that cannot stay on disk.
    """
    if weights not in (None, "memory", "disk"):
        hint = nearest(str(weights), ("memory", "disk"))
        raise ConfigError(f"weights={weights!r}{hint}; expected 'memory', 'disk' or None", problems=["weights"])
    if weights == "memory":
        return False
    stored = [manifest.tensors[name] for name in dict.fromkeys(used) if name in manifest.tensors]
    kinds = {tensor.dtype for tensor in stored}
    is_safetensors = manifest.layout in ("single", "sharded")
    faults = []
    if device.type not in ("cpu", "cuda"):
        faults.append(f"layers are loaded on demand on CPUs and CUDA devices, not on a {device.type}")
    if mapped is False:
        faults.append("mapped=False requests copies in memory")
    if not is_safetensors:
        faults.append(f"{Path(manifest.files[0].name).name} has to be converted once, by flodl-hf convert")
    if any(DTYPES[kind] != dtype for kind in kinds):
        word = str(dtype).removeprefix("torch.")
        faults.append(
            f"weights are stored in {', '.join(sorted(kinds))} but {word} needs copies; pass dtype= as "
            "they are stored, and predict with precision= to compute in another dtype"
        )
    if weights == "disk":
        if faults:
            raise ConfigError(f"{manifest.folder}: weights='disk' cannot be: {'; '.join(faults)}", problems=faults)
        return True
    need = sum(prod(tensor.shape) for tensor in stored) * dtype.itemsize
    free = available_memory(device)
    if free is None or need <= free or not is_safetensors:
        return False
    short = f"weights take {need / 1e9:.1f} GB, and {free / 1e9:.1f} GB of {device} are free"
    if faults:
        notes.append(f"{short}; they could stay on disk (weights='disk'), but {'; '.join(faults)}")
        return False
    said = f"{short}: they stay on disk and are read layer by layer for each call (weights='disk'; 'memory' insists)"
    notes.append(said)
    warnings.warn(f"{manifest.folder}: {said}", stacklevel=2)
    return True

"""One opened weight file: its header and its tensors, copied or mapped."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flodl.errors import CheckpointError, capped, printable
from flodl.safetensors_header import read_header
from flodl.system import read_at
from flodl_hf.checkpoints.weights.checkpoint.manifest import DTYPES, SourceFile
from flodl_hf.checkpoints.weights.prefetch import Extent, cut, extents_of, fill, memory_of


class Shard:
    """An open safetensors file; `parse` comes first and reads no weights. Torch files are a subclass.

    Args:
        descriptor: the open file, which the shard closes.
        name: its name in the folder.
        where: its path, for messages.

    Attributes:
        file: its name, size and header.
        metadata: the text pairs of its header.
        entries: dtype and shape by tensor name, in the order of their bytes.
        ties: a name to the earlier name with the same bytes.
    """

    def __init__(self, descriptor: int, name: str, where: str) -> None:
        self.file = SourceFile(name, os.fstat(descriptor).st_size)
        self.metadata: Mapping[str, str] = {}
        self.entries: Mapping[str, tuple[str, tuple[int, ...]]] = {}
        self.ties: Mapping[str, str] = {}
        self._where = where
        self._descriptor: int | None = descriptor
        self._extents: dict[str, Extent] = {}

    def close(self) -> None:
        """Release the file; closing twice is harmless."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open_descriptor(self) -> int:
        if self._descriptor is None:
            raise CheckpointError(
                f"{self._where}: is closed; read its tensors before the checkpoint is closed",
                path=self._where,
                problems=["closed"],
            )
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
            raise CheckpointError(
                f"{self._where}: {len(unknown)} tensors have a dtype that torch does not support:\n"
                f"{capped(unknown)}\nexpected one of {', '.join(DTYPES)}; convert the checkpoint",
                path=self._where,
                problems=unknown,
            )
        self.file = SourceFile(self.file.name, self.file.size, read_at(descriptor, header.data_start, 0))
        self.metadata = header.metadata
        self._extents = {extent.name: extent for extent in extents}
        self.entries = {extent.name: (extent.dtype, extent.shape) for extent in extents}

    def read(self, names: Sequence[str], *, mapped: bool = False) -> list[Tensor]:
        """Return the tensors of ``names``, in that order, copied or mapped."""
        extents = [self._extents[name] for name in names]
        return (map_extents if mapped else read_extents)(self._open_descriptor(), self._where, extents)


def read_extents(descriptor: int, where: str, extents: Sequence[Extent]) -> list[Tensor]:
    """Return copies of the tensors at ``extents``, in that order, each in a separate allocation.

    Args:
        descriptor: the open file.
        where: the path for messages.
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
        fill(descriptor, where, [extents[at] for at in missing], views)
    return tensors


def map_extents(descriptor: int, where: str, extents: Sequence[Extent]) -> list[Tensor]:
    """Return tensors that map the file, in the order of ``extents``; writing to one copies its pages.

    Pages are read on first use and shared with every process that maps the file. In return
    the file must not change while one of them is alive: overwriting it changes them, truncating it kills the process.

    Raises:
        CheckpointError: the file is shorter than its header states.
    """
    size = os.fstat(descriptor).st_size
    end = max((extent.start + extent.nbytes for extent in extents), default=0)
    if end > size:
        raise cut(where, size, end - size)
    if end == 0:
        return read_extents(descriptor, where, extents)
    mapping = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
    tensors: list[Tensor] = []
    for extent in extents:
        dtype = DTYPES[extent.dtype]
        if extent.nbytes == 0 or extent.start % dtype.itemsize:
            tensors += read_extents(descriptor, where, [extent])  # torch wants numbers at multiples of their size
            continue
        # Each tensor keeps the mapping alive through its own storage, so saving or sharing one of them does
        # not drag its neighbours along.
        count = extent.nbytes // dtype.itemsize
        flat = torch.frombuffer(mapping, dtype=dtype, count=count, offset=extent.start)
        tensors.append(flat.view(extent.shape))
    return tensors

"""One opened weight file: its header and its tensors.

Decides the interface that a safetensors file and a ``.bin`` file share.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from flodl.errors import CheckpointError, capped, printable
from flodl.safetensors_header import read_header
from flodl.system import read_at

from .manifest import DTYPES, SourceFile
from .parallel_read import Extent
from .read import map_extents, read_extents, read_extents_into

__all__ = ["OpenShard", "SafetensorsShard", "Shard"]


class Shard(Protocol):
    """An open weight file; ``parse`` comes first and reads no weights."""

    @property
    def file(self) -> SourceFile:
        """Name and size."""
        ...

    @property
    def metadata(self) -> Mapping[str, str]:
        """The free part of the file."""
        ...

    @property
    def entries(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Tensor name to (dtype name, shape), in the order of their bytes."""
        ...

    @property
    def ties(self) -> Mapping[str, str]:
        """Map a name to the earlier name with the same bytes."""
        ...

    def parse(self) -> None:
        """Read and check everything but the weights."""
        ...

    def read(self, names: Sequence[str], *, mapped: bool = False) -> list[Tensor]:
        """Return the tensors of ``names``, in that order, copied or mapped."""
        ...

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Fill ``tensor``, contiguous, on the CPU, of the stored dtype and shape."""
        ...

    def close(self) -> None:
        """Release the file; closing twice is harmless."""
        ...


class OpenShard:
    """What open weight files share: a descriptor that is closed once, and what `parse` finds.

    Args:
        descriptor: the open file, which the shard closes.
        name: its name in the folder.
        where: its path, for messages.
    """

    def __init__(self, descriptor: int, name: str, where: str) -> None:
        self.file = SourceFile(name, os.fstat(descriptor).st_size)
        self.metadata: Mapping[str, str] = {}
        self.entries: Mapping[str, tuple[str, tuple[int, ...]]] = {}
        self.ties: Mapping[str, str] = {}
        self._where = where
        self._descriptor: int | None = descriptor

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


class SafetensorsShard(OpenShard):
    """An open safetensors file."""

    def __init__(self, descriptor: int, name: str, where: str) -> None:
        super().__init__(descriptor, name, where)
        self._extents: dict[str, Extent] = {}

    def parse(self) -> None:
        """Read and check the header.

        Raises:
            CheckpointError: a damaged header, or a number type that torch does not have.
        """
        descriptor = self._open_descriptor()
        header = read_header(descriptor, name=self._where)
        unknown = [
            f"{printable(n)}: {header.tensors[n].dtype}" for n in header.order if header.tensors[n].dtype not in DTYPES
        ]
        if unknown:
            raise CheckpointError(
                f"{self._where}: {len(unknown)} tensors have a dtype that torch does not support:\n"
                f"{capped(unknown)}\nexpected one of {', '.join(DTYPES)}; convert the checkpoint",
                path=self._where,
                problems=unknown,
            )
        self.file = SourceFile(self.file.name, self.file.size, read_at(descriptor, header.data_start, 0))
        self.metadata = header.metadata
        for name in header.order:
            info = header.tensors[name]
            start = header.data_start + info.start
            self._extents[name] = Extent(name, info.dtype, info.shape, start, info.num_bytes)
        self.entries = {name: (extent.dtype, extent.shape) for name, extent in self._extents.items()}

    def read(self, names: Sequence[str], *, mapped: bool = False) -> list[Tensor]:
        """Return the tensors of ``names``, in that order, copied or mapped."""
        extents = [self._extents[name] for name in names]
        return (map_extents if mapped else read_extents)(self._open_descriptor(), self._where, extents)

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Fill ``tensor``, contiguous, on the CPU, of the stored dtype and shape."""
        read_extents_into(self._open_descriptor(), self._where, [self._extents[name]], [tensor])

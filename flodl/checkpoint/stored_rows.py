"""Tensors that lie in files, of which rows are read when they are asked for: a rank needs a part of a checkpoint."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import EllipsisType

import torch
from torch import Tensor

from flodl.checkpoint.raw import tensor_from
from flodl.checkpoint.safetensors_file import TORCH_DTYPES
from flodl.errors import CheckpointError
from flodl.files import open_regular
from flodl.safetensors_header import read_header
from flodl.system import read_at

__all__ = ["StoredRows", "stored_tensors"]


@dataclass(frozen=True)
class _Piece:
    """Rows that lie end to end in a file, from a byte on."""

    path: str
    start: int
    rows: int


class StoredRows:
    """A tensor in one file, or in several that hold its rows one after another; ``stored[2:5]`` reads three rows.

    Args:
        pieces: where the rows lie.
        shape: of the whole.
        dtype: of the whole.
    """

    def __init__(self, pieces: Sequence[_Piece], shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._pieces, self.shape, self.dtype = tuple(pieces), torch.Size(shape), dtype

    def __repr__(self) -> str:
        return f"StoredRows({tuple(self.shape)}, {self.dtype}, in {len(self._pieces)} file(s))"

    def dim(self) -> int:
        """Return how many dimensions the tensor has."""
        return len(self.shape)

    def joined(self, others: Sequence[StoredRows]) -> StoredRows:
        """Return the tensor whose first rows are these, and whose next ones are those of ``others``."""
        every = (self, *others)
        rows = sum(part.shape[0] for part in every)
        return StoredRows([piece for part in every for piece in part._pieces], (rows, *self.shape[1:]), self.dtype)

    def __getitem__(self, which: slice | EllipsisType) -> Tensor:
        """Return the rows of a slice, or with ``...`` the whole, read now into memory of their own.

        Raises:
            CheckpointError: a file is shorter than it was.
        """
        first, last, _ = slice(None).indices(self._rows) if which is ... else which.indices(self._rows)
        last = max(first, last)
        size = self._row_bytes
        data, at, before = bytearray((last - first) * size), 0, 0
        for piece in self._pieces:
            begin, end = max(first - before, 0), min(last - before, piece.rows)
            before += piece.rows
            if begin < end:
                length = (end - begin) * size
                _read_into(memoryview(data)[at : at + length], piece.path, piece.start + begin * size)
                at += length
        shape = self.shape if which is ... else (last - first, *self.shape[1:])
        return tensor_from(data, self.dtype, tuple(shape))

    @property
    def _rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def _row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize


def _read_into(target: memoryview, path: str, position: int) -> None:
    descriptor = open_regular(path)
    try:
        done = 0
        while done < len(target):
            data = read_at(descriptor, len(target) - done, position + done)
            if not data:
                raise CheckpointError(
                    f"{path}: ends at byte {position + done:,}, where {len(target) - done:,} more were; expected the "
                    "file to stay as it is while it is read.",
                    path=path,
                )
            target[done : done + len(data)] = data
            done += len(data)
    finally:
        os.close(descriptor)


def stored_tensors(path: str | os.PathLike[str]) -> dict[str, StoredRows]:
    """Return the tensors of a safetensors file by name, none of them read yet.

    Raises:
        CheckpointError: the file's header breaks a rule, or has a dtype that torch has not.
    """
    header = read_header(path)
    found = {}
    for name, info in header.tensors.items():
        if info.dtype not in TORCH_DTYPES:
            raise CheckpointError(
                f"{path}: {name} is of the dtype {info.dtype}; expected one that torch has", path=str(path)
            )
        rows = info.shape[0] if info.shape else 1
        piece = _Piece(os.fspath(path), header.data_start + info.start, rows)
        found[name] = StoredRows([piece], info.shape, TORCH_DTYPES[info.dtype])
    return found

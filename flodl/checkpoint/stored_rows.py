"""Tensors in safetensors files, read row by row on request: a rank needs a part of a checkpoint."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import NoReturn

import torch
from torch import Tensor

from flodl.checkpoint.tensor_bytes import TORCH_DTYPES, refuse, tensor_from
from flodl.errors import printable
from flodl.files import open_regular
from flodl.safetensors_header import Header, read_header
from flodl.system import read_vectors_at


@dataclass(frozen=True)
class _Piece:
    """Consecutive rows in a file, from a byte position on."""

    path: str
    start: int
    rows: int
    name: str


class StoredRows:
    """A tensor with rows in one file or in several; ``stored[2:5]`` reads three rows.

    Args:
        pieces: where the rows are.
        shape: of the whole tensor.
        dtype: of the whole tensor.
    """

    def __init__(self, pieces: Sequence[_Piece], shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._pieces, self.shape, self.dtype = tuple(pieces), torch.Size(shape), dtype

    def __repr__(self) -> str:
        return f"StoredRows({tuple(self.shape)}, {self.dtype}, in {len(self._pieces)} file(s))"

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    def joined(self, others: Sequence[StoredRows]) -> StoredRows:
        """Return the tensor of these rows followed by the rows of ``others``."""
        every = (self, *others)
        rows = sum(part.shape[0] for part in every)
        return StoredRows([piece for part in every for piece in part._pieces], (rows, *self.shape[1:]), self.dtype)

    def __getitem__(self, which: slice | EllipsisType) -> Tensor:
        """Read the rows of a slice, or all rows with ``...``, into new memory.

        Raises:
            CheckpointError: a file became shorter, or a value is invalid.
        """
        return self.read(None, slice(None) if which is ... else which)

    def read(self, descriptor: int | None, which: slice = slice(None)) -> Tensor:
        """Read rows; with a ``descriptor`` from this open file instead of opening the files of the tensor."""
        size = math.prod(self.shape[1:]) * self.dtype.itemsize
        first, last, _ = which.indices(self.shape[0] if self.shape else 1)
        last = max(first, last)
        data = torch.empty((last - first) * size, dtype=torch.uint8).numpy().data
        position = before = 0
        for piece in self._pieces:
            begin, end = max(first - before, 0), min(last - before, piece.rows)
            before += piece.rows
            if begin < end and size:
                length = (end - begin) * size
                _read_into(data[position : position + length], piece, piece.start + begin * size, descriptor)
                position += length
        shape = (last - first, *self.shape[1:]) if self.shape else ()
        try:
            return tensor_from(data, self.dtype, shape)
        except ValueError as error:
            _damaged(self._pieces[0], str(error))


def _read_into(target: memoryview, piece: _Piece, position: int, descriptor: int | None) -> None:
    opened = open_regular(piece.path) if descriptor is None else descriptor
    try:
        done = 0
        while done < len(target):
            count = read_vectors_at(opened, [target[done:]], position + done)
            if not count:
                _damaged(piece, "the file became shorter while it was read")
            done += count
    finally:
        if descriptor is None:
            os.close(opened)


def _damaged(piece: _Piece, problem: str) -> NoReturn:
    refuse(piece.path, [f"tensor {printable(piece.name)}: {problem}"], "Download or write the file again.")


def stored_tensors(path: str | os.PathLike[str]) -> dict[str, StoredRows]:
    """Return the named tensors of a safetensors file, without reading their data.

    Raises:
        CheckpointError: the header breaks a rule, or has a dtype that torch lacks.
    """
    return rows_of(os.fspath(path), read_header(path))


def rows_of(path: str, header: Header) -> dict[str, StoredRows]:
    """Return the tensors of a file with this header, in file order; errors as for `stored_tensors`."""
    unknown = [
        f"tensor {printable(name)}: torch has no dtype for {info.dtype}"
        for name, info in header.tensors.items()
        if info.dtype not in TORCH_DTYPES
    ]
    if unknown:
        refuse(path, unknown, "Convert these tensors with the tool that wrote them.")
    return {
        name: StoredRows(
            [_Piece(path, header.data_start + info.start, info.shape[0] if info.shape else 1, name)],
            info.shape,
            TORCH_DTYPES[info.dtype],
        )
        for name, info in ((name, header.tensors[name]) for name in header.order)
    }

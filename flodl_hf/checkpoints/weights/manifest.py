"""Contents of a folder of weights: one opened file, the index of several, and a manifest of all.

Decides which facts of a source are stored: enough for :mod:`flodl_hf.checkpoints.saving.state` to write the same folder
again.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from flodl.checkpoint.tensor_bytes import TORCH_DTYPES as DTYPES
from flodl.errors import CheckpointError, UnsafeFileError, capped, printable
from flodl.safetensors_header import read_header
from flodl.system import read_at
from flodl_hf.checkpoints.folders import plain_name_fault
from flodl_hf.checkpoints.weights.prefetch import Extent, cut, extents_of, fill, memory_of

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


INDEX_LIMIT = 32 << 20
_MAX_SHARDS = 10_000
_EXAMPLE = '{"metadata": {...}, "weight_map": {"tensor name": "model-00001-of-00002.safetensors"}}'


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """Contents of a shard index.

    Attributes:
        name: its file name.
        text: the unchanged file text.
        weight_map: tensor name to shard name, in the order of the file.
        metadata: the ``metadata`` object of the index.
        files: shard names, each once, in sorted order (their numbers are zero-filled).
    """

    name: str
    text: str
    weight_map: Mapping[str, str]
    metadata: Mapping[str, object]
    files: tuple[str, ...]


def parse_index(data: bytes, name: str, path: str) -> ShardIndex:
    """Return the index in ``data``.

    Args:
        data: the contents of the file.
        name: its file name.
        path: its path, for messages.

    Raises:
        UnsafeFileError: a shard name is anything else than the plain name of a sibling file.
        CheckpointError: the text is not JSON of the expected types, repeats a key, or lists too many shards.
    """

    def refuse(problems: Sequence[str], kind: type[CheckpointError] = CheckpointError) -> CheckpointError:
        return kind(
            f"{path}: not a usable shard index:\n{capped(problems)}\nexpected {_EXAMPLE}; fetch the file again",
            path=path,
            problems=list(problems),
        )

    repeated: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            seen: set[str] = set()
            repeated.extend(key for key, _ in items if key in seen or seen.add(key))
        return found

    try:
        text = data.decode("utf-8")
        content = json.loads(text, object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise refuse([f"found no JSON ({type(error).__name__}: {printable(str(error))[1:-1]})"]) from error
    if not isinstance(content, dict):
        raise refuse([f"found a JSON {_json_kind(content)} at the top, expected an object"])
    if repeated:
        raise refuse([f"{printable(key)} is present more than once" for key in repeated])
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict):
        found = "no 'weight_map'" if weight_map is None else f"'weight_map' is a JSON {_json_kind(weight_map)}"
        raise refuse([f"found {found}, expected an object from tensor names to file names"])
    if not weight_map:
        raise refuse(["found an empty 'weight_map'"])
    metadata = content.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise refuse([f"found 'metadata' as a JSON {_json_kind(metadata)}, expected an object"])
    wrong_types = [key for key, value in weight_map.items() if not isinstance(value, str)]
    if wrong_types:
        raise refuse(
            [f"{printable(k)}: found a JSON {_json_kind(weight_map[k])}, not a file name" for k in wrong_types]
        )
    files = sorted(set(weight_map.values()))
    unsafe = [(file, fault) for file in files if (fault := plain_name_fault(file))]
    if unsafe:
        raise refuse([f"shard {printable(file)}: {fault}" for file, fault in unsafe], UnsafeFileError)
    if len(files) > _MAX_SHARDS:
        raise refuse([f"found {len(files):,} shards, more than {_MAX_SHARDS:,}"])
    return ShardIndex(name, text, weight_map, metadata, tuple(files))


def check_shards(index: ShardIndex, contents: Mapping[str, Sequence[str]], path: str) -> None:
    """Compare the index with the tensor names in the headers of its shards.

    Raises:
        CheckpointError: a listed tensor is missing, in another shard, or in two; or a shard contains a
            tensor that the index does not list.
    """
    homes: dict[str, list[str]] = {}
    for file in index.files:
        for name in contents[file]:
            homes.setdefault(name, []).append(file)
    problems: list[str] = []
    for name, file in index.weight_map.items():
        found = homes.get(name, [])
        if not found:
            problems.append(f"{printable(name)}: listed for {file}, found in no shard")
        elif len(found) == 1 and found[0] != file:
            problems.append(f"{printable(name)}: listed for {file}, found in {found[0]}")
    for name, found in homes.items():
        if len(found) > 1:
            problems.append(f"{printable(name)}: found in {len(found)} shards, {', '.join(found)}")
        elif name not in index.weight_map:
            problems.append(f"{printable(name)}: found in {found[0]}, not listed")
    if problems:
        raise CheckpointError(
            f"{path}: index and shards disagree about {len(problems)} tensors:\n{capped(problems)}\n"
            f"expected each tensor once, in the shard that the index names; "
            f"the files are from different versions, fetch the folder again",
            path=path,
            problems=problems,
        )


def _json_kind(value: object) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


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

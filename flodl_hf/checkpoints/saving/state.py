"""Safetensors files: which tensors go into which file, under which name and in which order.

Decides that a source is repeated: its names, their order, its shards, and whether a tied tensor is stored
once or twice. Without a source the order is the one of the safetensors library. Files are written in one pass and
hashed on the way, with headers that the library would write too; an unchanged header of a source is reused.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flodl.checkpoint.tensor_bytes import bytes_of
from flodl.errors import capped, printable
from flodl.safetensors_header import name_fault
from flodl_hf.checkpoints.folders import SAFETENSORS, SAFETENSORS_INDEX, refused
from flodl_hf.checkpoints.weights.checksums import compare_files
from flodl_hf.checkpoints.weights.manifest import DTYPE_NAMES, DTYPES, SourceManifest
from flodl_hf.errors import ExportError

DEFAULT_SHARD_SIZE = 5_000_000_000
"""Bytes above which a checkpoint without a source layout is cut into shards."""


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file to write: name, tensors in order, metadata, and the source's header if it may still fit."""

    file: str
    names: tuple[str, ...]
    metadata: Mapping[str, str]
    header: bytes | None = None


@dataclass(frozen=True, slots=True)
class WritePlan:
    """Contents of an export.

    Attributes:
        files: the weight files in order.
        tensors: stored name to tensor, for every name in `files`.
        index: the text of the shard index, None for a single file.
    """

    files: tuple[FilePlan, ...]
    tensors: Mapping[str, Tensor]
    index: str | None

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors that will be written."""
        return sum(self.tensors[name].nbytes for plan in self.files for name in plan.names)


def plan_state(
    tensors: Mapping[str, Tensor],
    manifest: SourceManifest | None = None,
    *,
    ties: Mapping[str, str] | None = None,
    max_shard_size: int | str | None = None,
) -> WritePlan:
    """Return what to write so that a source is repeated, or a canonical layout where there is none.

    With a safetensors source: its names in its order and shards; a name of ``ties`` is written if the source
    had it, and not otherwise; new names follow in canonical order. Each tensor keeps the dtype it has now.

    Args:
        tensors: stored name to tensor.
        manifest: the source. One of ``.bin`` files records neither order nor ties; it is treated as none.
        ties: a name to the name that it is tied to and that is written. Either of the two may be missing in
            ``tensors``.
        max_shard_size: cut above this size, in bytes or as ``"500MB"`` (powers of 1000); None keeps the
            layout of the source, or cuts at `DEFAULT_SHARD_SIZE`.

    Raises:
        ExportError: two names share memory without being declared tied, a tie leads nowhere, or there is
            nothing to write.
    """
    source = manifest if manifest is not None and manifest.layout in ("single", "sharded") else None
    known = source.tensors if source else {}
    available = _resolve_ties(tensors, dict(ties or {}), known)
    if not available:
        raise refused("export", "no tensors", "at least one; give the model's state", kind=ExportError)
    added = tuple(canonical_order((name, available[name]) for name in available if name not in known))
    free_text = {"format": "pt"}  # which other readers require
    limit = parse_size(max_shard_size) if max_shard_size is not None else None
    if source is not None and limit is None:
        files = _source_files(source, available, added)
        index = _source_index(source, files, available)
    else:
        order = [name for name in known if name in available] + list(added)
        if source is not None:
            free_text = dict(next(iter(source.metadata.values()), {}))
        files = _cut(order, available, limit or DEFAULT_SHARD_SIZE, free_text)
        if source is not None and source.layout == "single" and len(files) == 1:
            files = [FilePlan(files[0].file, files[0].names, free_text, source.files[0].header)]
        index = _new_index(files, available, {}) if len(files) > 1 else None
    return WritePlan(tuple(files), available, index)


def write_state(folder: Path, plan: WritePlan) -> list[WrittenFile]:
    """Write the files of ``plan`` into ``folder``, index last; return their sizes and hashes.

    Raises:
        ExportError: a name or dtype that the format does not support.
        OSError: the disk is full or refuses.
    """
    written = []
    for item in plan.files:
        named = [(name, plan.tensors[name]) for name in item.names]
        written.append(write_safetensors(folder / item.file, named, item.metadata, header=item.header))
    if plan.index is not None:
        written.append(write_bytes(folder / SAFETENSORS_INDEX, plan.index.encode("utf-8")))
    return written


def canonical_order(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return the names in the order of the safetensors library: wide number types first, then alphabetical."""
    rank = {name: place for place, name in enumerate(DTYPES)}
    return [name for name, _ in sorted(tensors, key=lambda item: (-rank[DTYPE_NAMES[item[1].dtype]], item[0].encode()))]


def parse_size(size: int | str) -> int:
    """Return bytes for a number or a text such as ``"5GB"``, ``"500 MB"`` (powers of 1000).

    Raises:
        ExportError: anything else, or less than one byte.
    """
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*((?:[KMGT]?B)?)\s*", str(size), re.IGNORECASE)
    unit = match[2].upper() if match else "?"
    if match is None or unit not in units or (found := int(float(match[1]) * units[unit])) < 1:
        found, expected = f"found {printable(str(size))}", "bytes or a text such as '5GB'"
        raise refused("max_shard_size", found, expected, problems=[str(size)], kind=ExportError)
    return found


def _resolve_ties(
    tensors: Mapping[str, Tensor], ties: Mapping[str, str], known: Mapping[str, object]
) -> dict[str, Tensor]:
    """Return the tensors to write by name."""
    available = dict(tensors)
    dangling: list[str] = []
    for alias, kept in ties.items():
        held, other = tensors.get(kept, tensors.get(alias)), tensors.get(alias)
        if held is not None and other is not None and not same_bits(held, other):
            continue  # declared by the family, but this checkpoint has them apart: both are written
        if held is None:
            if alias in known or kept in known:
                dangling.append(f"{printable(alias)}: tied to {printable(kept)}, and neither was given")
            continue
        wanted = [name for name in (kept, alias) if name in known] or [kept]
        for name in (kept, alias):
            available.pop(name, None)
        for name in wanted:
            available[name] = held
    if dangling:
        found, expected = (
            f"ties that lead nowhere:\n{capped(dangling)}\n",
            "one tensor for each pair, under either name",
        )
        raise refused("export", found, expected, problems=dangling, kind=ExportError)
    declared = {frozenset(pair) for pair in ties.items()}
    problems: list[str] = []
    holders: dict[tuple[object, ...], str] = {}
    for name, tensor in available.items():
        if tensor.is_meta or tensor.numel() == 0:
            continue
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        other = holders.setdefault(key, name)
        if other != name and frozenset((other, name)) not in declared and not (name in known and other in known):
            problems.append(f"{printable(name)}: is the same memory as {printable(other)}")
    if problems:
        found = f"tensors share memory without being declared tied:\n{capped(problems)}\n"
        expected = "declared ties, or clones of the tensors"
        raise refused("export", found, expected, problems=problems, kind=ExportError)
    return available


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape, device and bits: a NaN equals itself, 0.0 not -0.0."""
    if one is other:
        return True
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return True
    bits = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*bits)


def _source_files(source: SourceManifest, available: Mapping[str, Tensor], added: Sequence[str]) -> list[FilePlan]:
    homes: dict[str, list[str]] = {file.name: [] for file in source.files}
    for name, stored in source.tensors.items():
        if name in available:
            homes[stored.file].append(name)
    last = source.files[-1].name
    homes[last] += added
    headers = {file.name: file.header for file in source.files}
    name_of = {file: file for file in homes}
    if source.layout == "single":
        name_of[last] = SAFETENSORS
    return [
        FilePlan(name_of[file], tuple(names), dict(source.metadata[file]), headers[file])
        for file, names in homes.items()
        if names
    ]


def _source_index(source: SourceManifest, files: Sequence[FilePlan], available: Mapping[str, Tensor]) -> str | None:
    if source.layout == "single" or source.index_text is None:
        return None
    unchanged = {name: stored.file for name, stored in source.tensors.items()} == {
        name: item.file for item in files for name in item.names
    } and all(DTYPES[stored.dtype] == available[n].dtype for n, stored in source.tensors.items() if n in available)
    if unchanged:
        return source.index_text
    return _new_index(files, available, source.index_metadata)


def _new_index(files: Sequence[FilePlan], available: Mapping[str, Tensor], metadata: Mapping[str, object]) -> str:
    names = [name for item in files for name in item.names]
    table = {
        "metadata": {
            **metadata,
            "total_parameters": sum(available[name].numel() for name in names),
            "total_size": sum(available[name].nbytes for name in names),
        },
        "weight_map": {name: item.file for item in files for name in item.names},
    }
    return json.dumps(table, indent=2, sort_keys=True) + "\n"


def _cut(
    order: Sequence[str], available: Mapping[str, Tensor], limit: int, metadata: Mapping[str, str]
) -> list[FilePlan]:
    """Fill shards in order, opening the next when a tensor would not fit; a larger tensor stands alone."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name in order:
        nbytes = available[name].nbytes
        if groups[-1] and filled + nbytes > limit:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += nbytes
    if len(groups) == 1:
        return [FilePlan(SAFETENSORS, tuple(groups[0]), metadata)]
    total = len(groups)
    return [
        FilePlan(f"model-{place:05d}-of-{total:05d}.safetensors", tuple(names), metadata)
        for place, names in enumerate(groups, 1)
    ]


_CHUNK = 16 << 20


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A written file: name, size in bytes, and the SHA-256 of all of it in hexadecimal."""

    name: str
    size: int
    sha256: str


def write_safetensors(
    path: str | os.PathLike[str],
    tensors: Iterable[tuple[str, Tensor]],
    metadata: Mapping[str, str] | None = None,
    *,
    header: bytes | None = None,
) -> WrittenFile:
    """Write ``tensors`` in the given order to the new file ``path``; return its size and SHA-256.

    The tensors are streamed, at most one of them is copied at a time (when it is not contiguous or not on the
    CPU). Tensors may share storage; each name gets its bytes.

    Args:
        path: must not exist; write into the folder that `publish_folder` hands out.
        tensors: names and tensors.
        metadata: free text pairs of the header.
        header: the header to put before the data, length field included, as a source file had it. Used only
            if it declares exactly these tensors at exactly these places; otherwise one is composed.

    Raises:
        ExportError: ``path`` exists, a name is invalid in a header or duplicate, or a dtype is not in the
            format; no file remains.
        OSError: the disk is full or refuses; nothing is left behind.
    """
    place = Path(path)
    items = list(tensors)
    _check(place, items)
    composed = compose_header(items, metadata)
    with suppress(ValueError):  # the source's header, if it declares the same tensors, places and metadata
        if header is not None and json.loads(header[8:]) == json.loads(composed[8:]):
            composed = header
    try:
        return _write(place, _chunks(composed, items))
    except FileExistsError as error:
        # A file that is open elsewhere must not change under its reader.
        raise refused(place, "exists", "a new name; remove it first", kind=ExportError) from error


def write_bytes(path: str | os.PathLike[str], data: bytes) -> WrittenFile:
    """Write ``data`` to the new file ``path``; return its size and SHA-256.

    Raises:
        OSError: it exists, or the disk is full or refuses; nothing is left behind then.
    """
    return _write(Path(path), [data])


def compose_header(items: Iterable[tuple[str, Tensor]], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the length field and header of a file with tensors in that order.

    The spelling is that of the safetensors library: compact JSON, padded with spaces to a multiple of eight
    bytes, so that the data after it is aligned.
    """
    table: dict[str, object] = {}
    if metadata:
        table["__metadata__"] = dict(metadata)
    position = 0
    for name, tensor in items:
        end = position + tensor.nbytes
        table[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def verify_files(folder: str | os.PathLike[str], files: Iterable[WrittenFile]) -> None:
    """Read ``files`` of ``folder`` again and compare sizes and hashes with the written ones.

    Raises:
        ExportError: files that are missing or differ, all listed.
    """
    listed = {written.name: (written.size, written.sha256) for written in files}
    problems = [str(state) for state in compare_files(Path(folder), listed, "the writer").faults]
    if problems:
        found = f"verification failed after writing: {len(problems)} files differ:\n{capped(problems)}\n"
        expected = "the same bytes; check the disk and export again"
        raise refused(folder, found, expected, problems=problems, kind=ExportError)


def _check(path: Path, items: Sequence[tuple[str, Tensor]]) -> None:
    problems: list[str] = []
    seen: set[str] = set()
    for name, tensor in items:
        fault = name_fault(name)
        if fault:
            problems.append(f"{printable(name)}: the name {fault}")
        if name in seen:
            problems.append(f"{printable(name)}: comes twice")
        seen.add(name)
        if tensor.dtype not in DTYPE_NAMES:
            problems.append(f"{printable(name)}: {tensor.dtype} is not in the format")
        elif tensor.layout != torch.strided or tensor.is_meta:
            problems.append(f"{printable(name)}: has no dense memory ({tensor.layout}, {tensor.device})")
    if problems:
        found, expected = f"cannot store these tensors:\n{capped(problems)}\n", "dense tensors under printable names"
        raise refused(path, found, expected, problems=problems, kind=ExportError)


def _chunks(header: bytes, items: Iterable[tuple[str, Tensor]]) -> Iterable[memoryview]:
    yield memoryview(header)
    for _, tensor in items:
        data = bytes_of(tensor)
        for start in range(0, len(data), _CHUNK):
            yield data[start : start + _CHUNK]


def _write(path: Path, chunks: Iterable[bytes | memoryview]) -> WrittenFile:
    digest, size = hashlib.sha256(), 0
    file = open(path, "xb", buffering=0)  # noqa: SIM115 - the file is removed below on any failure
    try:
        with file:
            for chunk in chunks:
                rest = memoryview(chunk)
                while rest:
                    rest = rest[os.write(file.fileno(), rest) :]
                digest.update(chunk)
                size += len(chunk)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return WrittenFile(path.name, size, digest.hexdigest())

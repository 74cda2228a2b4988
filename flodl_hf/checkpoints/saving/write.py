"""Safetensors files, written in one pass and hashed on the way.

Decides the bytes: the given order is the written order, in headers that the format's own library would write
too, and a header of a source file is reused unchanged. :mod:`flodl_hf.checkpoints.saving.state` selects tensors
and names; :mod:`flodl_hf.checkpoints.saving.publish` publishes the folder of the files in one step.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from flodl.errors import capped, printable
from flodl.safetensors_header import name_fault
from flodl_hf.checkpoints.weights.checkpoint.manifest import DTYPE_NAMES, DTYPES
from flodl_hf.checkpoints.weights.checksums import compare_files
from flodl_hf.errors import ExportError

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
    composed = compose_header([(n, DTYPE_NAMES[t.dtype], tuple(t.shape)) for n, t in items], metadata)
    if header is not None and _same_meaning(header, composed):
        composed = header
    try:
        return _write(place, _chunks(composed, items))
    except FileExistsError as error:
        raise ExportError(
            f"{place}: exists; expected a new name, because a file that is open elsewhere must not change "
            f"under its reader; remove it first",
            path=str(place),
            problems=["exists"],
        ) from error


def write_bytes(path: str | os.PathLike[str], data: bytes) -> WrittenFile:
    """Write ``data`` to the new file ``path``; return its size and SHA-256.

    Raises:
        OSError: it exists, or the disk is full or refuses; nothing is left behind then.
    """
    return _write(Path(path), [data])


def compose_header(
    entries: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the length field and header of a file with ``entries`` (name, dtype name, shape) in that order.

    The spelling is that of the safetensors library: compact JSON, padded with spaces to a multiple of eight
    bytes, so that the data after it is aligned.
    """
    table: dict[str, object] = {}
    if metadata:
        table["__metadata__"] = dict(metadata)
    position = 0
    for name, dtype, shape in entries:
        nbytes = DTYPES[dtype].itemsize * prod(shape)
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + nbytes]}
        position += nbytes
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
        raise ExportError(
            f"{folder}: verification failed after writing: {len(problems)} files differ:\n{capped(problems)}\n"
            f"expected the same bytes; check the disk and export again",
            path=str(folder),
            problems=problems,
        )


def _check(place: Path, items: Sequence[tuple[str, Tensor]]) -> None:
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
        raise ExportError(
            f"{place}: cannot store these tensors:\n{capped(problems)}\n"
            f"expected dense tensors under distinct, printable names; rename or convert them",
            path=str(place),
            problems=problems,
        )


def _same_meaning(header: bytes, composed: bytes) -> bool:
    """Return whether two headers declare the same tensors, places and metadata."""
    try:
        return json.loads(header[8:]) == json.loads(composed[8:])
    except ValueError:
        return False


def _chunks(header: bytes, items: Iterable[tuple[str, Tensor]]) -> Iterable[memoryview]:
    yield memoryview(header)
    for _, tensor in items:
        dense = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
        data = dense.reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(data), _CHUNK):
            yield data[start : start + _CHUNK]


def _write(place: Path, chunks: Iterable[bytes | memoryview]) -> WrittenFile:
    digest, size = hashlib.sha256(), 0
    file = open(place, "xb", buffering=0)  # noqa: SIM115 - the file is removed below on any failure
    try:
        with file:
            for chunk in chunks:
                rest = memoryview(chunk)
                while rest:
                    rest = rest[os.write(file.fileno(), rest) :]
                digest.update(chunk)
                size += len(chunk)
    except BaseException:
        place.unlink(missing_ok=True)
        raise
    return WrittenFile(place.name, size, digest.hexdigest())

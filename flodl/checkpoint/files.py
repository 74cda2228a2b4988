"""Checkpoint files of both formats; the suffix of the path selects the format."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from flodl.checkpoint import fdl_file, safetensors_file
from flodl.checkpoint.tensor_bytes import check_hash, refuse
from flodl.safetensors_header import read_header


@dataclass(frozen=True)
class Checkpoint:
    """The contents of one checkpoint file, checked and copied.

    Attributes:
        tensors: named tensors, on the CPU, in the dtype and order of the file.
        structural_hash: 64 hexadecimal digits, or empty if the file has none.
        version: version of the file's format; 0 for a safetensors file of another writer.
        metadata: texts stored with the tensors.
        format: ``"safetensors"`` or ``"fdl"``.
        path: the file.
    """

    tensors: dict[str, Tensor]
    structural_hash: str
    version: int
    metadata: dict[str, str]
    format: str
    path: str = ""


def save_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    *,
    structural_hash: str = "",
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors to a file atomically.

    ``.safetensors`` accepts every dtype of that format and ``metadata``; ``.fdl`` and ``.fdl.gz`` accept float16,
    bfloat16, float32, float64, int32 and int64. Values are written bit for bit.

    Args:
        path: the file; its folder must exist.
        tensors: named tensors.
        structural_hash: 64 hexadecimal digits of the model's structure; empty for no check when loading.
        metadata: texts to store with the tensors.

    Raises:
        CheckpointError: the suffix, a name, a dtype or the metadata does not fit the format. ``problems`` lists
            all faults; nothing was written.
        OSError: the file could not be written; an earlier file is unchanged.
    """
    text = os.fspath(path)
    try:
        digest = check_hash(structural_hash)
    except ValueError as error:
        refuse(text, [str(error)], "Nothing was written. Pass graph.structural_hash().")
    if _is_fdl(text):
        fdl_file.write(text, tensors, digest, metadata or {})
    else:
        safetensors_file.write(text, tensors, digest, metadata or {})


def load_tensors(path: str | os.PathLike[str]) -> Checkpoint:
    """Return the checked contents of a checkpoint file.

    Raises:
        CheckpointError: the file is absent, damaged, truncated, or breaks a rule of its format.
    """
    text = os.fspath(path)
    if _is_fdl(text):
        return Checkpoint(*fdl_file.read(text), {}, "fdl", text)
    return Checkpoint(*safetensors_file.read(text), "safetensors", text)


def checkpoint_keys(path: str | os.PathLike[str]) -> list[str]:
    """Return the names of the tensors in a checkpoint, in file order."""
    text = os.fspath(path)
    return list(fdl_file.read(text)[0]) if _is_fdl(text) else read_header(text).order


def _is_fdl(path: str) -> bool:
    lowered = path.lower()
    if not lowered.endswith((".safetensors", ".fdl", ".fdl.gz")):
        problem = "found another suffix, expected .safetensors, .fdl or .fdl.gz"
        refuse(path, [problem], "Rename the file.")
    return not lowered.endswith(".safetensors")

"""Which file format a path means, and the same calls for each of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import ModuleType

from torch import Tensor

from flodl.checkpoint import fdl_file, safetensors_file
from flodl.checkpoint.raw import check_hash, refuse
from flodl.checkpoint.records import Checkpoint

__all__ = ["checkpoint_keys", "checkpoint_version", "load_tensors", "save_tensors"]


def save_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    *,
    structural_hash: str = "",
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write ``tensors`` to ``path``, in the format that its suffix names, whole or not at all.

    ``.safetensors`` keeps every dtype torch shares with that format and takes ``metadata``; ``.fdl`` and
    ``.fdl.gz`` keep float16, bfloat16, float32, float64, int32 and int64. Values are written bit by bit
    as they are; no dtype is changed.

    Args:
        path: the file; its folder must exist.
        tensors: what to write, by name.
        structural_hash: 64 hexadecimal digits of the model's structure; empty means "do not check".
        metadata: free texts to keep beside the tensors.

    Raises:
        CheckpointError: the suffix, a name, a dtype or the metadata does not fit the format. All faults
            are in ``problems`` and nothing was written.
        OSError: the file could not be written; what was there before still is.
    """
    kind, text = _format(path)
    try:
        digest = check_hash(structural_hash)
    except ValueError as error:
        refuse(text, [str(error)], "Nothing was written. Pass graph.structural_hash().")
    kind.write(text, tensors, digest, metadata or {})


def load_tensors(path: str | os.PathLike[str]) -> Checkpoint:
    """Return everything in a checkpoint file, copied out of it and checked to the last byte.

    Raises:
        CheckpointError: the file is absent, damaged, truncated, or breaks a rule of its format.
    """
    kind, text = _format(path)
    return kind.read(text)


def checkpoint_version(path: str | os.PathLike[str]) -> int:
    """Return the version of the file's format; 0 for a safetensors file that flodl did not write."""
    kind, text = _format(path)
    if kind is fdl_file:
        return fdl_file.scan(text)[0]
    return safetensors_file.version_of(text, safetensors_file.header_of(text))


def checkpoint_keys(path: str | os.PathLike[str]) -> list[str]:
    """Return the names in a checkpoint, in file order, without keeping any values."""
    kind, text = _format(path)
    return fdl_file.scan(text)[1] if kind is fdl_file else safetensors_file.header_of(text).order


def _format(path: str | os.PathLike[str]) -> tuple[ModuleType, str]:
    text = os.fspath(path)
    lowered = text.lower()
    if lowered.endswith(".safetensors"):
        return safetensors_file, text
    if not lowered.endswith((".fdl", ".fdl.gz")):
        refuse(
            text,
            ["the suffix names no checkpoint format; expected .safetensors, .fdl or .fdl.gz"],
            "Rename the file, or choose one of these suffixes.",
        )
    return fdl_file, text

"""Checkpoints read back: compared with their manifests before use, whole or by the part that a rank needs of one.

How they come to be is `flodl.train.saving.keeper`'s; what is in them is decided in `flodl.train.saving.resume`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors

from flodl.checkpoint.stored_rows import stored_tensors
from flodl.errors import CheckpointError
from flodl.files import open_regular, read_regular, unseal
from flodl.train.saving.state import MODEL, SHARDS

__all__ = ["FORMAT", "Checkpoint", "list_checkpoints", "open_checkpoint", "read_checkpoint", "read_manifest"]

_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?$")
FORMAT = "flodl-run/1"
"""Of the manifest."""
_UNSEALED = ("format", "step", "world", "metrics", "files")  # all that manifests held before they were sealed


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint as read back: ``tensors`` and ``values`` by file name without suffix.

    Of one that was opened rather than read, some tensors are `flodl.checkpoint.stored_rows.StoredRows`.
    """

    path: Path
    step: int
    world: int
    metrics: Mapping[str, float]
    tensors: Mapping[str, Mapping[str, Any]] = field(repr=False)
    values: Mapping[str, Any] = field(repr=False)


def read_manifest(path: Path) -> dict[str, Any]:
    """Return what the checkpoint at ``path`` says of itself.

    Raises:
        ValueError: it is not as it was written.
        OSError: it cannot be read.
    """
    return unseal(read_regular(path / "manifest.json"), _UNSEALED)


def read_checkpoint(path: Path, *, weights_only: bool = False) -> Checkpoint:
    """Return the checkpoint at ``path`` after comparing every file with the manifest.

    Args:
        path: its folder.
        weights_only: of the tensors, return those of the model and of its average, and let go of all others: of a run
            in shards a file is read and dropped after another.

    Raises:
        CheckpointError: a file is missing, cut, changed or unreadable.
    """

    def take(name: str, entry: Mapping[str, Any]) -> Any:
        data = read_regular(path / name, int(entry["bytes"]))
        _compare(name, entry, len(data), hashlib.sha256(data))
        if name.endswith(".json"):
            return json.loads(data)
        held = parse_tensors(data)
        return _weights_in(_stem(name), held) if weights_only else held

    return _opened(path, take)


def open_checkpoint(path: Path, rank: int = 0, world: int = 1) -> Checkpoint:
    """Return the checkpoint at ``path`` with weights and optimiser unread: `flodl.checkpoint.stored_rows.StoredRows`.

    Files of tensors are compared with the manifest a piece at a time, and none is kept; each rank compares its share.

    Args:
        path: its folder.
        rank: this one, whose own tensors (random states and such) are read.
        world: how many ranks compare.

    Raises:
        CheckpointError: a file is missing, unreadable, or is among those that this rank compares and was changed.
    """
    turn = count()

    def take(name: str, entry: Mapping[str, Any]) -> Any:
        if name.endswith(".json"):
            data = read_regular(path / name, int(entry["bytes"]))
            _compare(name, entry, len(data), hashlib.sha256(data))
            return json.loads(data)
        if next(turn) % world == rank:
            _compare(name, entry, *_hashed(path / name))
        stem, held = _stem(name), stored_tensors(path / name)
        if stem in ("model", "ema", "optimizer"):
            return held
        own = stem in ("losses", f"rank-{rank}")
        return {
            part: stored if part.startswith(SHARDS) else stored[...]
            for part, stored in held.items()
            if own or part.startswith(SHARDS)
        }

    return _opened(path, take)


def _opened(path: Path, take: Callable[[str, Mapping[str, Any]], Any]) -> Checkpoint:
    """Return a checkpoint of what ``take`` makes of its files, each given by name with what the manifest says of it."""

    def fault(what: str) -> CheckpointError:
        return CheckpointError(
            f"checkpoint {path}: {what}. Expected the files that its manifest lists, unchanged. "
            "Use an earlier checkpoint.",
            path=str(path),
            problems=[what],
        )

    try:
        manifest = read_manifest(path)
        if manifest["format"] != FORMAT:
            raise fault(f"format {manifest['format']!r} is not {FORMAT!r}")
        tensors, values = {}, {}
        for name, entry in manifest["files"].items():
            if "/" in name or name.startswith("."):
                raise fault(f"the manifest names {name!r}, outside the folder")
            try:
                found = take(name, entry)
            except _Changed as changed:
                raise fault(f"{changed} is not as it was written") from None
            (tensors if name.endswith(".safetensors") else values)[_stem(name)] = found
        return Checkpoint(path, manifest["step"], manifest["world"], manifest["metrics"], tensors, values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise fault(f"{type(error).__name__}: {error}") from error


class _Changed(Exception):
    """A file is not as it was written; the argument is its name."""


def _compare(name: str, entry: Mapping[str, Any], size: int, digest: Any) -> None:
    if size != entry["bytes"] or digest.hexdigest() != entry["sha256"]:
        raise _Changed(name)


def _hashed(path: Path) -> tuple[int, Any]:
    """Return length and hash of a file, of which a piece is in memory at a time."""
    size, digest = 0, hashlib.sha256()
    with os.fdopen(open_regular(path), "rb") as file:
        while piece := file.read(1 << 20):
            size += len(piece)
            digest.update(piece)
    return size, digest


def _stem(name: str) -> str:
    return name.rsplit(".", 1)[0]


def _weights_in(stem: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a file that are weights, in memory of their own."""
    every = stem in ("model", "ema")
    return {name: tensor.clone() for name, tensor in tensors.items() if every or name.startswith(MODEL)}


def list_checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the checkpoints in ``folder``, oldest first."""
    found = [(m, path) for path in Path(folder).glob("step-*") if (m := _NAME.match(path.name))]
    return [path for m, path in sorted(found, key=lambda e: (int(e[0][1]), int(e[0][2] or 0)))]

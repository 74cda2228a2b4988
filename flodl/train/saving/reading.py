"""Reads checkpoints: whole, or the part that a rank needs; files are compared with the manifest first.

`flodl.train.saving.keeper` writes them; `flodl.train.saving.resume` defines their contents.
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

_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?$")
FORMAT = "flodl-run/1"
"""Format of the manifest."""
_UNSEALED = (
    "format",
    "step",
    "world",
    "metrics",
    "files",
)  # fields of manifests of old versions, which had no checksum


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: ``tensors`` and ``values`` by file name without suffix.

    Some tensors of an opened checkpoint are `flodl.checkpoint.stored_rows.StoredRows`, which are not read yet.
    """

    path: Path
    step: int
    world: int
    metrics: Mapping[str, float]
    tensors: Mapping[str, Mapping[str, Any]] = field(repr=False)
    values: Mapping[str, Any] = field(repr=False)


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of the checkpoint at ``path``.

    Raises:
        ValueError: its checksum differs.
        OSError: it cannot be read.
    """
    return unseal(read_regular(path / "manifest.json"), _UNSEALED)


def read_checkpoint(path: Path, *, weights_only: bool = False) -> Checkpoint:
    """Return the checkpoint at ``path`` after comparing every file with the manifest.

    Args:
        path: its folder.
        weights_only: return only the tensors of the model and of its average; files are read one after another.

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
    """Return the checkpoint at ``path`` without reading weights and optimiser.

    They are `flodl.checkpoint.stored_rows.StoredRows`. Each rank compares its share of the files with the manifest,
    in pieces.

    Args:
        path: its folder.
        rank: this rank, for which its own tensors (such as random states) are read.
        world: number of ranks.

    Raises:
        CheckpointError: a file is missing or unreadable, or a file that this rank compares was changed.
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
    """Return a checkpoint whose files were read by ``take(name, entry of the manifest)``."""

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
                raise fault(f"{changed} was changed") from None
            (tensors if name.endswith(".safetensors") else values)[_stem(name)] = found
        return Checkpoint(path, manifest["step"], manifest["world"], manifest["metrics"], tensors, values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise fault(f"{type(error).__name__}: {error}") from error


class _Changed(Exception):
    """A file was changed; the argument is its name."""


def _compare(name: str, entry: Mapping[str, Any], size: int, digest: Any) -> None:
    if size != entry["bytes"] or digest.hexdigest() != entry["sha256"]:
        raise _Changed(name)


def _hashed(path: Path) -> tuple[int, Any]:
    """Return length and hash of a file, read in pieces."""
    size, digest = 0, hashlib.sha256()
    with os.fdopen(open_regular(path), "rb") as file:
        while piece := file.read(1 << 20):
            size += len(piece)
            digest.update(piece)
    return size, digest


def _stem(name: str) -> str:
    return name.rsplit(".", 1)[0]


def _weights_in(stem: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies of the tensors of a file that are weights."""
    every = stem in ("model", "ema")
    return {name: tensor.clone() for name, tensor in tensors.items() if every or name.startswith(MODEL)}


def list_checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the checkpoints in ``folder``, oldest first."""
    found = [(m, path) for path in Path(folder).glob("step-*") if (m := _NAME.match(path.name))]
    return [path for m, path in sorted(found, key=lambda e: (int(e[0][1]), int(e[0][2] or 0)))]

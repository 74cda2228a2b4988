"""Reads checkpoints, after a comparison of their files with the manifest, and orders them by step or by a metric.

`flodl.train.saving.keeper` writes them; `flodl.train.saving.resume` defines their contents.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from flodl.checkpoint.stored_rows import stored_tensors
from flodl.errors import CheckpointError
from flodl.files import open_regular, read_regular, unseal
from flodl.train.saving.state import MODEL

_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?$")
# Format of the manifest.
FORMAT = "flodl-run/1"
_UNSEALED = ("format", "step", "world", "metrics", "files")  # fields of manifests of old versions, without a checksum
_FAULTS = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: ``tensors`` and ``values`` by file name without suffix.

    Tensors of an opened checkpoint are `flodl.checkpoint.stored_rows.StoredRows`, which are not read yet.
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
    """Return the checkpoint at ``path`` with its tensors in memory.

    Args:
        path: its folder.
        weights_only: read only the tensors of the model and of its average.

    Raises:
        CheckpointError: a file is missing, cut, changed or unreadable.
    """
    opened, tensors = open_checkpoint(path), {}
    for stem, held in opened.tensors.items():
        all_of_it = not weights_only or stem in ("model", "ema")
        tensors[stem] = {name: stored[...] for name, stored in held.items() if all_of_it or name.startswith(MODEL)}
    return replace(opened, tensors=tensors)


def open_checkpoint(path: Path, rank: int = 0, world: int = 1) -> Checkpoint:
    """Return the checkpoint at ``path`` without reading its tensors.

    Args:
        path: its folder.
        rank: this rank, which compares its share of the files with the manifest, in pieces.
        world: number of ranks.

    Raises:
        CheckpointError: a file is missing or unreadable, or a file that this rank compares was changed.
    """
    try:
        manifest = read_manifest(path)
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']!r} is not {FORMAT!r}")
        tensors, values = {}, {}
        for number, (name, entry) in enumerate(manifest["files"].items()):
            if "/" in name or name.startswith("."):
                raise ValueError(f"the manifest lists {name!r}, outside of the folder")
            stem, suffix = name.rsplit(".", 1)
            if suffix == "json" or number % world == rank:
                _check_unchanged(path / name, entry)
            if suffix == "json":
                values[stem] = json.loads(read_regular(path / name, int(entry["bytes"])))
            else:
                tensors[stem] = stored_tensors(path / name)
        return Checkpoint(path, manifest["step"], manifest["world"], manifest["metrics"], tensors, values)
    except (CheckpointError, *_FAULTS) as error:
        found = error.message if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"checkpoint {path}: {found}. Expected the files that its manifest lists, unchanged. Use an earlier "
            "checkpoint.",
            path=str(path),
            problems=[found],
        ) from error


def _check_unchanged(path: Path, entry: Mapping[str, Any]) -> None:
    """Compare length and hash of a file, read in pieces, with its entry in the manifest."""
    with os.fdopen(open_regular(path), "rb") as file:
        digest, size = hashlib.file_digest(file, "sha256"), file.tell()
    if size != entry["bytes"] or digest.hexdigest() != entry["sha256"]:
        raise ValueError(f"{path.name} was changed")


def list_checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the checkpoints in ``folder``, oldest first."""
    found = [(m, path) for path in Path(folder).glob("step-*") if (m := _NAME.match(path.name))]
    return [path for m, path in sorted(found, key=lambda e: (int(e[0][1]), int(e[0][2] or 0)))]


def signed(metric: str, figures: Mapping[str, float]) -> float | None:
    """Return the value of a metric with greater values better; None if it is missing or NaN.

    Args:
        metric: its name, with a leading ``-`` where less is better.
        figures: figures by name.
    """
    value = figures.get(metric.lstrip("-"))
    if value is None or math.isnan(value):
        return None
    return -value if metric.startswith("-") else value


def ranked(folder: str | os.PathLike[str], metric: str) -> list[tuple[float, int, Path]]:
    """Return value (greater is better), step and path of the checkpoints with this metric, the best first.

    The earliest comes first on ties. Checkpoints with an unreadable manifest are skipped.
    """
    found = []
    for path in list_checkpoints(folder):
        with contextlib.suppress(*_FAULTS):
            manifest = read_manifest(path)
            value = signed(metric, manifest["metrics"])
            if value is not None:
                found.append((value, int(manifest["step"]), path))
    return sorted(found, key=lambda entry: (-entry[0], entry[1]))

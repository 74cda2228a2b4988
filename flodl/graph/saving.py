"""Checkpoints of graphs; the file formats are in `flodl.checkpoint`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from flodl.graph.core import GraphCore
from flodl.graph.fingerprint import structural_hash

if TYPE_CHECKING:
    from flodl.checkpoint import LoadReport


def _stored_tensors(graph: GraphCore) -> dict[str, Tensor]:
    """Return the named parameters and persistent buffers; tied ones only under their first name."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in graph.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and id(value) not in seen:
            seen.add(id(value))
            found[name] = value
    return found


def save(graph: GraphCore, path: str | os.PathLike[str], config: str | None) -> None:
    """Write the tensors with the structural hash, and the configuration, if any, to a second file."""
    from flodl.checkpoint import save_tensors
    from flodl.files import write_atomically

    tensors = {name: value.detach() for name, value in _stored_tensors(graph).items()}
    save_tensors(path, tensors, structural_hash=structural_hash(graph))
    if config is not None:
        write_atomically(_sidecar(Path(path)), [config.encode()])


def load(graph: GraphCore, path: str | os.PathLike[str], *, allow_nonfinite: bool = False) -> LoadReport:
    """Copy a checkpoint of the same structure into the graph."""
    from flodl.checkpoint import load_into, load_tensors

    named: dict[str, Any] = _stored_tensors(graph)
    found = load_tensors(path)
    return load_into(named, found, expected_hash=structural_hash(graph), allow_nonfinite=allow_nonfinite)


def _sidecar(path: Path) -> Path:
    name = path.name.removesuffix(".gz").removesuffix(".fdl").removesuffix(".safetensors")
    return path.with_name(f"{name}.config.json")

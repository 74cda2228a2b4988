"""An opened folder of weights: its manifest and its tensors, validated before use.

This package handles tensors, files and names. The key tables map names to parameters, the caller decides which
tensors are required, and `flodl_hf.checkpoints.saving` writes folders.

    safe_open      which files of a folder may be opened, and how
    manifest       contents of the files: names, dtypes, shapes, order, metadata
    index          a shard index, checked against the shards it lists
    parallel_read  bytes of a file into memory
    ahead          the same while torch is imported
    read           bytes of a file into tensors, copied or mapped
    folder         `Checkpoint`, the four of them together
    placing        tensors of a checkpoint onto the slots of a model
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .folder import Checkpoint
    from .manifest import SourceManifest, StoredTensor
    from .placing import place

__all__ = ["Checkpoint", "SourceManifest", "StoredTensor", "place"]

_WHERE = {"Checkpoint": "folder", "SourceManifest": "manifest", "StoredTensor": "manifest", "place": "placing"}


def __getattr__(name: str) -> Any:
    # Tensors bring torch, which members and their bytes do without.
    if name in _WHERE:
        return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""An opened folder of weights: its manifest and its tensors, validated before use.

This package handles tensors, files and names. The key tables map names to parameters, the caller decides which
tensors are required, and `flodl_hf.checkpoints.saving` writes folders.

    safe_open      which files of a folder may be opened, and how
    manifest       contents of the files: names, dtypes, shapes, metadata; the index of several files
    parallel_read  bytes of a file into memory, also while torch is imported
    shard          one file: bytes into tensors, copied or mapped
    folder         `Checkpoint`, all of them together, and tensors onto the parameters of a model
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flodl_hf.checkpoints.weights.checkpoint.folder import Checkpoint, place
    from flodl_hf.checkpoints.weights.checkpoint.manifest import SourceManifest, StoredTensor

__all__ = ["Checkpoint", "SourceManifest", "StoredTensor", "place"]

_WHERE = {"Checkpoint": "folder", "SourceManifest": "manifest", "StoredTensor": "manifest", "place": "folder"}


def __getattr__(name: str) -> Any:
    # Tensors bring torch, which members and their bytes do without.
    if name in _WHERE:
        return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

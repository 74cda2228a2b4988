"""Tensors in files: safetensors, and the ``.fdl`` files of the Rust flodl. Files are read as untrusted input."""

from flodl.checkpoint.files import checkpoint_keys, load_tensors, save_tensors
from flodl.checkpoint.loading import load_into, migrate_checkpoint

__all__ = [
    "checkpoint_keys",
    "load_into",
    "load_tensors",
    "migrate_checkpoint",
    "save_tensors",
]

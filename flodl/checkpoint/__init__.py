"""Tensors in files: safetensors, and the ``.fdl`` files of the Rust flodl. Files are read as untrusted input."""

from flodl.checkpoint.files import checkpoint_keys, load_into, load_tensors, migrate_checkpoint, save_tensors

__all__ = [
    "checkpoint_keys",
    "load_into",
    "load_tensors",
    "migrate_checkpoint",
    "save_tensors",
]

"""Tensors in files: safetensors, and the ``.fdl`` files of the Rust flodl. Files are read as untrusted input."""

from flodl.checkpoint.files import Checkpoint, checkpoint_keys, load_tensors, save_tensors
from flodl.checkpoint.loading import LoadReport, MigrateReport, load_into, migrate_checkpoint

__all__ = [
    "Checkpoint",
    "LoadReport",
    "MigrateReport",
    "checkpoint_keys",
    "load_into",
    "load_tensors",
    "migrate_checkpoint",
    "save_tensors",
]

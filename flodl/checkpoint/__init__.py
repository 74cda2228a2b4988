"""Tensors in files: safetensors, and the ``.fdl`` files of the Rust flodl, read as if they were hostile."""

from flodl.checkpoint.formats import checkpoint_keys, checkpoint_version, load_tensors, save_tensors
from flodl.checkpoint.migrate import migrate_checkpoint
from flodl.checkpoint.place import load_into
from flodl.checkpoint.records import Checkpoint, LoadReport, MigrateReport

__all__ = [
    "Checkpoint",
    "LoadReport",
    "MigrateReport",
    "checkpoint_keys",
    "checkpoint_version",
    "load_into",
    "load_tensors",
    "migrate_checkpoint",
    "save_tensors",
]

"""A folder of weights, opened: what it holds, and its tensors, checked before they are believed.

This package knows tensors, files and names. What a name means to a model is for the key tables, which
tensors must be there is for the caller, and writing folders is for :mod:`flodl_hf.export`.

    members    which files of a folder may be opened, and how
    manifest   what the files say they hold: names, dtypes, shapes, order, metadata
    index      a shard index, checked against the shards it lists
    read       bytes of a file into tensors, copied or mapped
    folder     `Checkpoint`, the four of them together
    place      tensors of a checkpoint onto the slots of a model
"""

from .folder import Checkpoint
from .manifest import SourceManifest, StoredTensor
from .place import place

__all__ = ["Checkpoint", "SourceManifest", "StoredTensor", "place"]

"""An opened folder of weights: its manifest and its tensors, validated before use.

This package handles tensors, files and names. The key tables map names to parameters, the caller decides which
tensors are required, and `flodl_hf.checkpoints.saving` writes folders.

    safe_open      which files of a folder may be opened, and how
    manifest       contents of the files: names, dtypes, shapes, metadata; the index of several files
    shard          one file: bytes into tensors, copied or mapped
    folder         `Checkpoint`: the tensors of all files
"""

"""An opened folder of weights: its manifest and its tensors, validated before use.

This package handles tensors, files and names. The key tables map names to parameters, the caller decides which
tensors are required, and `flodl_hf.checkpoints.saving` writes folders.

    safe_open      which files of a folder may be opened, and how
    manifest       one file: names, dtypes, shapes, metadata, bytes into tensors; the index of several files
    folder         `Checkpoint`: the tensors of all files, copied or mapped
"""

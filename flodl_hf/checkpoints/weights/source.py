"""Source of a loaded model, stored with it so that an export writes it back unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from flodl_hf.checkpoints.weights.checkpoint.manifest import SourceManifest


@dataclass
class Source:
    """Source of a loaded model: everything needed to write it back unchanged.

    Attributes:
        name: the repository or path as the caller gave it.
        folder: the local folder.
        commit: the resolved Hub commit, or None.
        manifest: names, dtypes, shapes and order of the stored tensors.
        placed: our name -> stored name.
        duplicates: stored names that repeat another, ``(repeated, kept)``.
        carried: stored tensors that the model does not use and an unchanged export writes back.
        kept: the carried names that any export writes, as named in new files.
        same_head: the file was written for the head that was loaded.
        config_text: the text of ``config.json``.
        tokenizer_files: files of a folder without a loaded tokenizer, by name, byte for byte.
    """

    name: str
    folder: Path
    commit: str | None
    manifest: SourceManifest = field(repr=False)
    placed: Mapping[str, str] = field(repr=False)
    duplicates: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    carried: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    kept: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    same_head: bool = True
    config_text: str = field(default="", repr=False)
    tokenizer_files: Mapping[str, bytes] = field(default_factory=dict, repr=False)

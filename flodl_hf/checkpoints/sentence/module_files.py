"""Files of a module of sentence-transformers: its settings, and its tensors without pickle."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from flodl.errors import ConfigError, printable, shown
from flodl_hf.checkpoints.sentence.small_files import settings_in, warn_of_unknown
from flodl_hf.checkpoints.weights.checkpoint import Checkpoint
from flodl_hf.checkpoints.weights.checkpoint.safe_open import is_entry, read_member

__all__ = ["module_files", "read_module", "refuse_setting", "wrong_tensors"]

_MOST = 1 << 30
_SETTINGS = "config.json"


def read_module(
    root: Path, part: str, known: Collection[str], name: str = _SETTINGS
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, bytes]]:
    """Return the settings and tensors of a module in a folder below ``root``, and its files by relative names.

    Args:
        root: the folder of the model.
        part: the folder of the module, from there.
        known: names of settings; others are ignored with one warning.
        name: the file of settings.

    Raises:
        ConfigError: the settings are damaged.
        CheckpointError: the weights are damaged.
    """
    file = f"{part}/{name}"
    settings = settings_in(root, file)
    warn_of_unknown(root / file, settings, known)
    with Checkpoint.open(root / part) as checkpoint:
        names = {f"{part}/{file.name}" for file in checkpoint.manifest.files}
        tensors = checkpoint.read_all()
    files = {file: read_member(root, file, _MOST) for file in sorted({file, *names}) if is_entry(root, file)}
    return settings, tensors, files


def module_files(
    part: str, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str = _SETTINGS
) -> dict[str, bytes]:
    """Return the files of a module as sentence-transformers reads them."""
    from safetensors.torch import save

    found = {f"{part}/{name}": (json.dumps(dict(settings), indent=2) + "\n").encode()}
    if tensors:
        stored = {key: tensor.contiguous() for key, tensor in tensors.items()}
        found[f"{part}/model.safetensors"] = save(stored, {"format": "pt"})
    return found


def refuse_setting(where: Path, key: str, value: Any, expected: str) -> ConfigError:
    """Return the error of a setting that changes numbers and is not supported."""
    said = printable(value, 80) if isinstance(value, str) else shown(value, 80)
    return ConfigError(
        f"{where}: found {key}: {said}, expected {expected}; other values are not supported. Correct it, or load the "
        "transformer's own folder without it.",
        where=str(where),
        problems=[key],
        key=key,
        value=value,
    )


def wrong_tensors(where: Path, tensors: Mapping[str, Tensor], expected: str) -> ConfigError:
    """Return the error for a module with tensors that contradict its settings."""
    found = {name: tuple(tensor.shape) for name, tensor in sorted(tensors.items())}
    return ConfigError(
        f"{where}: found tensors {shown(found, 120)}, expected {expected}. Fetch the folder again.",
        where=str(where),
        problems=sorted(tensors),
    )

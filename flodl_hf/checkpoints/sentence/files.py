"""Files of a module of sentence-transformers: its settings, and its tensors without pickle."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from flodl.errors import ConfigError, FlodlError, printable, shown
from flodl_hf.checkpoints.folders import is_entry, read_member, refused
from flodl_hf.checkpoints.weights.checkpoint import Checkpoint

_MOST = 1 << 30
_SETTINGS = "config.json"


def read_module(
    root: Path, part: str, known: Collection[str], name: str, *, weights: bool
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, bytes]]:
    """Return the settings and tensors of a module in a folder below ``root``, and its files by relative names.

    Args:
        root: the folder of the model.
        part: the folder of the module, from there.
        known: names of settings; others are ignored with one warning.
        name: the file of settings.
        weights: the module has tensors; settings of others are optional.

    Raises:
        ConfigError: the settings are damaged.
        CheckpointError: the weights are damaged.
    """
    file = f"{part}/{name}"
    settings, names, tensors = settings_in(root, file, known, optional=not weights), {file}, {}
    if weights:
        with Checkpoint.open(root / part) as checkpoint:
            names |= {f"{part}/{file.name}" for file in checkpoint.manifest.files}
            tensors = checkpoint.read_all()
    files = {file: read_member(root, file, _MOST) for file in sorted(names) if is_entry(root, file)}
    return settings, tensors, files


def module_files(
    part: str, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str = _SETTINGS
) -> dict[str, bytes]:
    """Return the files of a module as sentence-transformers reads them."""
    from safetensors.torch import save

    found = {f"{part}/{name}": json_bytes(dict(settings))}
    if tensors:
        stored = {key: tensor.contiguous() for key, tensor in tensors.items()}
        found[f"{part}/model.safetensors"] = save(stored, {"format": "pt"})
    return found


def json_bytes(value: Any) -> bytes:
    """Return a value as the text of a JSON file."""
    return (json.dumps(value, indent=2) + "\n").encode()


def refuse_setting(path: Path, key: str, value: Any, expected: str) -> FlodlError:
    """Return the error of a setting that changes numbers and is not supported."""
    advice = f"{expected}; other values are not supported. Correct it, or load the transformer's own folder without it"
    found = f"found {key}: {shown(value, 80)}"
    return refused(path, found, advice, problems=[key], kind=ConfigError, key=key, value=value)


_LIMIT = 1_000_000


def wrong(path: Path, problem: str, expected: str) -> FlodlError:
    """Return the error for a file with unexpected contents."""
    advice = f"{expected}. Fetch the file again or correct it"
    return refused(path, problem, advice, problems=[path.name], kind=ConfigError)


def read_json(root: Path, name: str) -> Any:
    """Return the contents of a JSON file."""
    path = root / name
    try:
        return json.loads(bytes_of(root, name).decode("utf-8"))
    except (ValueError, RecursionError) as fault:
        reason = "nested too deeply" if isinstance(fault, RecursionError) else str(fault)
        raise wrong(path, f"cannot be read as JSON ({reason})", "JSON in UTF-8") from None


def settings_in(root: Path, name: str, known: Collection[str] = (), *, optional: bool = False) -> dict[str, Any]:
    """Return the contents of a JSON file with an object of settings; nothing if it is optional and absent.

    Warns of settings that are not ``known``, if names are given.
    """
    if optional and not is_entry(root, name):
        return {}
    value = read_json(root, name)
    if not isinstance(value, dict):
        raise wrong(root / name, f"contains a JSON {type(value).__name__}", "an object with settings")
    if known:
        warn_of_unknown(root / name, value, known)
    return value


def warn_of_unknown(path: Path, settings: Mapping[str, Any], known: Collection[str]) -> None:
    """Warn once of the settings of a file that are not known and therefore ignored."""
    unknown = sorted(str(key) for key in settings if key not in known)
    if unknown:
        names = ", ".join(printable(key, 60) for key in unknown[:10])
        warnings.warn(f"{path}: found unknown settings, which are ignored: {names}", UserWarning, stacklevel=2)


def bytes_of(root: Path, name: str) -> bytes:
    """Return the bytes of a small file."""
    return read_member(root, name, _LIMIT, ConfigError)


def folder_of(root: Path, module: Mapping[str, Any]) -> str:
    """Return the folder of a module from the root, "." for the root; it must be inside ``root``."""
    path = module.get("path")
    folder = root / str(path or "")
    try:
        inner = folder.resolve().relative_to(root.resolve())
    except (OSError, RuntimeError, ValueError):  # outside, a name that cannot be, or a link that leads to itself
        found = f"the path {printable(str(path), 80)} leads out of the folder, or nowhere"
        raise wrong(root / "modules.json", found, "the name of a folder inside") from None
    return (folder.relative_to(root) if folder.is_relative_to(root) else inner).as_posix()

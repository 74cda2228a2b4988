"""The small files of a sentence-transformers folder, read with care: bounded in size, of paths that stay inside."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from flodl.errors import ConfigError, printable
from flodl_hf.checkpoints.weights.checkpoint.safe_open import read_member

__all__ = ["bytes_of", "place_in", "read_json", "settings_in", "warn_of_unknown", "wrong"]

_LIMIT = 1_000_000


def wrong(path: Path, found: str, expected: str) -> ConfigError:
    """Return the error for a file with unexpected contents."""
    return ConfigError(
        f"{path}: {found}; expected {expected}. Fetch the file again or correct it.",
        where=str(path),
        problems=[path.name],
    )


def read_json(root: Path, name: str) -> Any:
    """Return the contents of a JSON file."""
    path = root / name
    try:
        return json.loads(bytes_of(root, name).decode("utf-8"))
    except (ValueError, RecursionError) as fault:
        reason = "nested too deeply" if isinstance(fault, RecursionError) else str(fault)
        raise wrong(path, f"cannot be read as JSON ({reason})", "JSON in UTF-8") from None


def settings_in(root: Path, name: str) -> dict[str, Any]:
    """Return the contents of a JSON file with an object of settings."""
    value = read_json(root, name)
    if not isinstance(value, dict):
        raise wrong(root / name, f"contains a JSON {type(value).__name__}", "an object with settings")
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


def place_in(root: Path, part: object) -> Path:
    """Return the folder of a module, which must be inside ``root``."""
    place = root / str(part or "")
    try:
        lies_inside = place.resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError, ValueError):  # a name that cannot be, or a link that leads to itself
        lies_inside = False
    if not lies_inside:
        found = f"the path {printable(str(part), 80)} leads out of the folder, or nowhere"
        raise wrong(root / "modules.json", found, "the name of a folder inside")
    return place

"""Adapters in the configured directories: every folder is one adapter under the folder's name.

Only the configuration file is read here; workers load the adapters (`flodl_hf.serving.adapter_models`).
"""

from __future__ import annotations

import os
from pathlib import Path

from flodl.errors import ConfigError, FlodlError, capped, nearest
from flodl_hf.checkpoints.weights.file_names import ADAPTER_CONFIG
from flodl_hf.serving.settings import Settings


def find_adapters(settings: Settings) -> list[dict[str, str]]:
    """Return name, folder and base of each adapter; files and folders with a leading dot are ignored.

    Raises:
        ConfigError: a directory cannot be listed, a folder is not an adapter, a name is not unique, or a base is not
            served.
    """
    found: list[dict[str, str]] = []
    problems: list[str] = []
    taken = {model.name: f"the model {model.name}" for model in settings.models}
    for given in settings.adapters:
        where, base = _directory(settings, given)
        try:
            names = sorted(entry.name for entry in os.scandir(where) if entry.is_dir() and entry.name[0] != ".")
        except OSError as fault:
            problems.append(f"{where} cannot be listed ({fault.strerror}), expected a directory of adapters")
            continue
        for name in names:
            folder = where / name
            if not (folder / ADAPTER_CONFIG).is_file():
                problems.append(f"{folder} is not an adapter: it contains no {ADAPTER_CONFIG}")
            elif name in taken:
                problems.append(f"{folder}: the name {name!r} is already used by {taken[name]}")
            else:
                taken[name] = str(folder)
                try:
                    found.append({"name": name, "folder": str(folder), "base": base or _base_of(settings, folder)})
                except FlodlError as fault:
                    problems.append(str(fault))
    if problems:
        raise ConfigError(
            f"serve: adapters:\n{capped(problems)}\nexpected directories with one folder for each adapter. Remove "
            "other folders, and select the base with NAME=DIR if several models are served.",
            problems=problems,
        )
    return found


def _directory(settings: Settings, value: str) -> tuple[Path, str | None]:
    """Return a directory and its base: the model of ``NAME=DIR``, or the only served model, or None."""
    names = [model.name for model in settings.models]
    name, equal, where = value.partition("=")
    if equal and name in names:
        return Path(where).expanduser(), name
    if equal and not os.path.isdir(value):
        raise ConfigError(
            f"serve: adapters {value!r}: no model {name!r} is served{nearest(name, names)}; expected DIR, or NAME=DIR "
            f"with one of {', '.join(names)}",
            problems=[value],
        )
    return Path(value).expanduser(), names[0] if len(names) == 1 else None


def _base_of(settings: Settings, folder: Path) -> str:
    """Return the name of the served model that an adapter's configuration names as its base."""
    from flodl_hf.checkpoints.config.file import MAX_CONFIG_BYTES, read_json
    from flodl_hf.checkpoints.weights.checkpoint.safe_open import read_member

    text = read_member(folder, ADAPTER_CONFIG, MAX_CONFIG_BYTES, ConfigError)
    named = str(read_json(text, str(folder / ADAPTER_CONFIG)).get("base_model_name_or_path") or "")
    able = [model.name for model in settings.models if named and _same(model.source, named)]
    if len(able) != 1:
        raise ConfigError(
            f"{folder}: its base is {named!r}, which {len(able) or 'none'} of the served models "
            f"{'are' if able else 'is'} read from"
        )
    return able[0]


def _same(source: str, named: str) -> bool:
    return source == named or os.path.realpath(os.path.expanduser(source)) == os.path.realpath(named)

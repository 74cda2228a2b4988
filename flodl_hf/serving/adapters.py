"""Which adapters there are beside the models that are served: every folder in a directory, under its name.

Nothing is opened here but the file that says which base an adapter is for; that is the workers'
(`flodl_hf.serving.adapted`).
"""

from __future__ import annotations

import os
from pathlib import Path

from flodl.errors import ConfigError, FlodlError, capped, nearest
from flodl_hf.checkpoints.weights.file_names import ADAPTER_CONFIG
from flodl_hf.serving.settings import Settings

__all__ = ["find_adapters"]


def find_adapters(settings: Settings) -> list[dict[str, str]]:
    """Return name, folder and base of each adapter; files, and folders with a dot first, are passed over.

    Raises:
        ConfigError: a directory is not there, a folder in it is no adapter, a name is taken, or a base is not served.
    """
    found: list[dict[str, str]] = []
    problems: list[str] = []
    taken = {model.name: f"the model {model.name}" for model in settings.models}
    for given in settings.adapters:
        where, base = _place(settings, given)
        try:
            names = sorted(entry.name for entry in os.scandir(where) if entry.is_dir() and entry.name[0] != ".")
        except OSError as fault:
            problems.append(f"{where} cannot be listed ({fault.strerror}); expected a directory of adapters")
            continue
        for name in names:
            folder = where / name
            if not (folder / ADAPTER_CONFIG).is_file():
                problems.append(f"{folder} is no adapter: it holds no {ADAPTER_CONFIG}")
            elif name in taken:
                problems.append(f"{folder}: {name!r} is the name of {taken[name]}")
            else:
                taken[name] = str(folder)
                try:
                    found.append({"name": name, "folder": str(folder), "base": base or _base_of(settings, folder)})
                except FlodlError as fault:
                    problems.append(str(fault))
    if problems:
        raise ConfigError(
            f"serve: adapters:\n{capped(problems)}\nexpected directories that hold one folder for each adapter; take "
            "out what is none, and name the base with NAME=DIR where several models are served",
            problems=problems,
        )
    return found


def _place(settings: Settings, given: str) -> tuple[Path, str | None]:
    """Return a directory and the model that is named for it; ``NAME=DIR`` names one, and a single model is the base."""
    names = [model.name for model in settings.models]
    name, equal, where = given.partition("=")
    if equal and name in names:
        return Path(where).expanduser(), name
    if equal and not os.path.isdir(given):
        raise ConfigError(
            f"serve: adapters {given!r}: no model {name!r} is served{nearest(name, names)}; expected DIR, or NAME=DIR "
            f"with one of {', '.join(names)}",
            problems=[given],
        )
    return Path(given).expanduser(), names[0] if len(names) == 1 else None


def _base_of(settings: Settings, folder: Path) -> str:
    """Return the name of the served model that an adapter's file names as its base."""
    from flodl_hf.checkpoints.config.file import MAX_CONFIG_BYTES, read_json
    from flodl_hf.checkpoints.weights.checkpoint.members import read_member

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

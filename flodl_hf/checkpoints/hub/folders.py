"""From a name to a local folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flodl.errors import ConfigError, shown
from flodl_hf.checkpoints.weights.file_names import ADAPTER_CONFIG, CONFIG_NAME, is_vocabulary_in, vocabularies_below
from flodl_hf.errors import no_tokenizer


def holds_adapter(name_or_path: str | os.PathLike[str]) -> bool:
    """Return whether a name is a local folder with an adapter and no model."""
    path = os.path.expanduser(_text(name_or_path))
    return os.path.lexists(os.path.join(path, ADAPTER_CONFIG)) and not os.path.lexists(os.path.join(path, CONFIG_NAME))


def resolve_folder(
    name_or_path: str | os.PathLike[str], hub: Mapping[str, Any], files: Sequence[str]
) -> tuple[Path, str | None]:
    """Return the local folder behind a name, and the Hub commit it was resolved to.

    A folder that exists is taken as it is, without importing the Hub client.
    """
    text = _text(name_or_path)
    if not text:
        raise ConfigError("model: found an empty name; expected a folder, or a name of the Hub", problems=["empty"])
    path = Path(os.path.expanduser(text))
    if os.path.isdir(path):  # no for a name that no folder can have, where Path.is_dir raises
        subfolder = str(hub.get("subfolder") or "")
        inside = path / subfolder if subfolder else path
        if subfolder and not inside.resolve().is_relative_to(path.resolve()):
            raise ConfigError(f"subfolder {subfolder!r} leads out of {path}", problems=[subfolder])
        if subfolder and not inside.is_dir():
            raise ConfigError(f"{path}: has no folder {subfolder!r}; check subfolder", problems=[subfolder])
        return inside, None
    from flodl_hf.checkpoints.hub.download import resolve

    resolved = resolve(text, files=list(files), modules=_modules, **hub)
    return Path(resolved.folder), resolved.commit


def _text(name_or_path: Any) -> str:
    """Return the name as text.

    Raises:
        ConfigError: it is neither text nor a path.
    """
    text = os.fspath(name_or_path) if isinstance(name_or_path, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise ConfigError(
            f"model: found {shown(name_or_path, 60)}; expected a folder, or a name of the Hub", problems=["model"]
        )
    return text


def _modules(folder: Path) -> Mapping[str, bool]:
    from flodl_hf.checkpoints.sentence.routing import module_folders

    return module_folders(folder)


def expect_tokenizer(name_or_path: Any, task: str) -> None:
    """Refuse a local folder without a tokenizer before its weights or any texts are read, which may take minutes.

    Args:
        name_or_path: as of `lacks_tokenizer`.
        task: the task that needs a tokenizer, for the message.

    Raises:
        PredictError: the folder lacks a tokenizer.
    """
    if lacks_tokenizer(name_or_path):
        raise no_tokenizer(task)


def lacks_tokenizer(name_or_path: Any) -> bool:
    """Return whether a local folder has a configuration and no vocabulary file, in the folder or directly below.

    Args:
        name_or_path: the name to load; False for names of the Hub and for models.
    """
    if not isinstance(name_or_path, (str, os.PathLike)):
        return False
    path = Path(os.path.expanduser(os.fspath(name_or_path)))
    known = os.path.isdir(path) and os.path.lexists(path / CONFIG_NAME)
    return known and not is_vocabulary_in(path) and not vocabularies_below(path)

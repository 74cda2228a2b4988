"""From a name to a local folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flodl_hf.checkpoints.weights.file_names import ADAPTER_CONFIG, CONFIG_NAME, is_vocabulary_in, vocabularies_below
from flodl_hf.errors import no_tokenizer


def holds_adapter(name_or_path: Any) -> bool:
    """Return whether a name is a local folder with an adapter and no model."""
    path = _local(name_or_path)
    return path is not None and os.path.lexists(path / ADAPTER_CONFIG) and not os.path.lexists(path / CONFIG_NAME)


def resolve_folder(
    name_or_path: str | os.PathLike[str], hub: Mapping[str, Any], files: Sequence[str]
) -> tuple[Path, str | None]:
    """Return the local folder behind a name, and the Hub commit it was resolved to.

    A folder that exists is used without a request, and without an import of the Hub client if there is no subfolder.

    Args:
        name_or_path: a folder, or a repository of the Hub.
        hub: keyword arguments of `flodl_hf.checkpoints.hub.download.resolve`: ``subfolder``, ``revision`` and others.
        files: patterns of the requested files, relative to the subfolder.

    Raises:
        HubError: as in `flodl_hf.checkpoints.hub.download.resolve`.
    """
    path = _local(name_or_path)
    if path is not None and not hub.get("subfolder"):
        return path, None
    from flodl_hf.checkpoints.hub.download import resolve

    resolved = resolve(name_or_path, files=list(files), modules=True, **hub)
    return Path(resolved.folder), resolved.commit


def _local(name_or_path: Any) -> Path | None:
    """Return the folder that a name is the path of; None for all other names."""
    if not isinstance(name_or_path, (str, os.PathLike)) or not os.fspath(name_or_path):
        return None  # an empty name is not the current directory
    path = Path(os.path.expanduser(os.fspath(name_or_path)))
    return path if os.path.isdir(path) else None  # Path.is_dir raises for a name that no folder can have


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
    path = _local(name_or_path)
    if path is None or not os.path.lexists(path / CONFIG_NAME):
        return False
    return not is_vocabulary_in(path) and not vocabularies_below(path)

"""From a name to a local folder, and which of its files are fetched for a model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flodl.errors import ConfigError, shown

__all__ = [
    "ADAPTER_CONFIG",
    "BASE_OF_ADAPTER",
    "BIN_FILES",
    "BOUNDS",
    "CONFIG_NAME",
    "MODEL_FILES",
    "RECIPE_FILES",
    "VOCABULARY_FILES",
    "holds_adapter",
    "is_vocabulary_in",
    "resolve_folder",
    "vocabularies_below",
]

CONFIG_NAME = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
BASE_OF_ADAPTER = "base_model_name_or_path"
# A folder with one of these has a tokenizer; asked here so that folders without one import none.
VOCABULARY_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "sentencepiece.bpe.model",
    "spm.model",
    "spiece.model",
)
BIN_FILES = ("pytorch_model*.bin", "pytorch_model.bin.index.json")
BOUNDS = tuple(
    f"sentence_{family}_config.json"
    for family in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Names of the file that says how many tokens a folder of sentence-transformers reads; the first of them counts."""
RECIPE_FILES = (
    "modules.json",
    "router_config.json",
    "*/router_config.json",
    "*/config.json",
    *BOUNDS,
    "config_sentence_transformers.json",
    "*_Dense/model.safetensors",
    "*_Dense/pytorch_model.bin",
    "artifact.metadata",
    "colbert_linear.pt",
    "sparse_linear.pt",
)
"""What says how states become vectors."""
MODEL_FILES = (
    *VOCABULARY_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    CONFIG_NAME,
    "model.safetensors",  # for the weights in whatever parts they come, pickled ones where there are no others
    "checksums.json",
    *RECIPE_FILES,
)


def holds_adapter(name_or_path: str | os.PathLike[str]) -> bool:
    """Return whether a name is that of a local folder with an adapter and no model."""
    path = os.path.expanduser(_text(name_or_path))
    return os.path.lexists(os.path.join(path, ADAPTER_CONFIG)) and not os.path.lexists(os.path.join(path, CONFIG_NAME))


def is_vocabulary_in(folder: Path) -> bool:
    """Return whether a folder holds a file that a vocabulary is read from."""
    return any(os.path.lexists(folder / name) for name in VOCABULARY_FILES)


def vocabularies_below(folder: Path) -> list[str]:
    """Return the names of folders directly below one that hold a vocabulary."""
    try:
        return sorted(path.name for path in folder.iterdir() if path.is_dir() and is_vocabulary_in(path))
    except OSError:
        return []


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
    from flodl_hf.hub.download import resolve

    resolved = resolve(text, files=list(files), modules=_modules, **hub)
    return Path(resolved.folder), resolved.commit


def _text(name_or_path: Any) -> str:
    """Return what was named as text.

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
    from flodl_hf.sentence.routing import module_folders

    return module_folders(folder)

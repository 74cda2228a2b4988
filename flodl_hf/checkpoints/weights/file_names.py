"""File names of a model folder, and the files that are fetched for a model."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from fnmatch import translate
from pathlib import Path
from typing import Any

from flodl.errors import ConfigError, printable, shown

CONFIG_NAME = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
WEIGHTS_KEY = "transformers_weights"
"""The key of ``config.json`` that names the file of the weights."""
BASE_OF_ADAPTER = "base_model_name_or_path"
# A folder with one of these has a tokenizer; checked here so that folders without one import none.
VOCABULARY_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "sentencepiece.bpe.model",
    "spm.model",
    "spiece.model",
    "sentencepiece.model",
    "tokenizer.model",
)
TOKENIZER_FILES = (
    *VOCABULARY_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "bpe.codes",
)
SAFETENSORS, BIN = "model.safetensors", "pytorch_model.bin"
SAFETENSORS_INDEX, BIN_INDEX = f"{SAFETENSORS}.index.json", f"{BIN}.index.json"
WEIGHT_FILES = (SAFETENSORS, SAFETENSORS_INDEX, BIN, BIN_INDEX)
"""A folder with one of these contains the weights of a transformer."""
BIN_FILES = ("pytorch_model*.bin", BIN_INDEX)
WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model*.bin.index.json")
"""The same files, their shards, and files of weights with other names."""
BOUNDS = tuple(
    f"sentence_{family}_config.json"
    for family in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Names of the file with the maximum tokens of a sentence-transformers folder; the first present one counts."""
RECIPE_FILES = (
    "modules.json",
    "router_config.json",
    "*/router_config.json",
    "*/config.json",
    *BOUNDS,
    "config_sentence_transformers.json",
    "*/cnn_config.json",
    *(
        f"*_{kind}/{name}"
        for kind in ("Dense", "LayerNorm", "CNN", "WeightedLayerPooling")
        for name in (SAFETENSORS, BIN)
    ),
    "config_setfit.json",
    "artifact.metadata",
    "colbert_linear.pt",
    "sparse_linear.pt",
)
"""Files that define how states become vectors."""
MODEL_FILES = (
    *TOKENIZER_FILES,
    CONFIG_NAME,
    SAFETENSORS,  # for the weights in whatever parts they come, pickled ones where there are no others
    "checksums.json",
    *RECIPE_FILES,
)


def matching(names: Iterable[str], patterns: Iterable[str]) -> set[str]:
    """Return the names that match one of the patterns; ``*`` does not match ``/``."""
    tests = [(pattern.count("/"), re.compile(translate(pattern)).match) for pattern in patterns]
    return {name for name in names if any(name.count("/") == depth and match(name) for depth, match in tests)}


def is_vocabulary_in(folder: Path) -> bool:
    """Return whether a folder contains a vocabulary file."""
    return any(os.path.lexists(folder / name) for name in VOCABULARY_FILES)


def vocabularies_below(folder: Path) -> list[str]:
    """Return the names of direct subfolders with a vocabulary file."""
    try:
        return sorted(path.name for path in folder.iterdir() if path.is_dir() and is_vocabulary_in(path))
    except OSError:
        return []


def weights_named(value: Any, path: str) -> str | None:
    """Return the weight file that a configuration names, relative to its folder; None if it names none.

    Args:
        value: the value of `WEIGHTS_KEY`.
        path: the configuration, for messages.

    Raises:
        ConfigError: it is not the name of a safetensors file or index in the folder or below it.
    """
    if value in (None, ""):
        return None
    parts = value.split("/") if isinstance(value, str) else []
    if not parts or any(part in ("", ".", "..") or set(part) & set('\\:*?"<>|') for part in parts):
        why = "expected the name of a file in the folder"
    elif not value.endswith((".safetensors", ".safetensors.index.json")):
        why = "expected the name of a .safetensors file, or of a .safetensors.index.json"
    elif len(parts) > 1 and not value.endswith(".safetensors"):
        why = "expected an index in the folder of config.json, where its shards are searched"
    else:
        return value
    what = shown(value, 80) if not isinstance(value, str) else printable(value, 80)
    raise ConfigError(
        f"{path}: {WEIGHTS_KEY}: found {what}; {why}. Name the weight file, relative to the folder of "
        "config.json, or remove the key if the file has its usual name",
        where=path,
        problems=[WEIGHTS_KEY],
    )

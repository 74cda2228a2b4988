"""The tokenizer of a model's folder, fitted to the model."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flodl.errors import FlodlError
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.checkpoints.hub.choosing import TOKENIZER_FILES
from flodl_hf.checkpoints.weights.checkpoint.safe_open import is_entry
from flodl_hf.checkpoints.weights.file_names import VOCABULARY_FILES

if TYPE_CHECKING:
    from flodl_hf.tokenization.tokenizer import Tokenizer


def load_tokenizer(
    folder: Path, config: ModelConfig, *, strict: bool = True, overrides: Mapping[str, Any] | None = None
) -> Tokenizer | None:
    """Return the folder's tokenizer, or None if tokenizer files are missing or, unless strict, incomplete.

    Args:
        folder: with the files.
        config: of the model.
        strict: raise if the files are incomplete.
        overrides: values that override ``tokenizer_config.json``.

    Raises:
        TokenizerError: damaged files, or a token id without a row in the word table.
    """
    if not any(is_entry(folder, name) for name in VOCABULARY_FILES):
        return None
    from flodl_hf.tokenization.tokenizer import Tokenizer

    try:
        tokenizer = Tokenizer.from_folder(folder, model_type=config.model_type)
        if overrides:
            tokenizer = overridden(tokenizer, overrides, folder, config.model_type)
    except FlodlError as fault:
        if strict or "words" not in fault.details:
            raise
        return warnings.warn(f"the model has no tokenizer: {fault.message}", UserWarning, stacklevel=2)
    types = config.token_types if tokenizer.settings.type_ids else 0
    tokenizer.check_fits(config.encoder.vocab_size, types or None)
    return tokenizer


def overridden(tokenizer: Tokenizer, overrides: Mapping[str, Any], folder: Path, model_type: str) -> Tokenizer:
    """Return the tokenizer with other values in its ``tokenizer_config.json``.

    Raises:
        TokenizerError: a value is not understood.
    """
    from flodl_hf.tokenization.source import with_settings

    files = with_settings(tokenizer.files(), overrides, str(folder))
    return type(tokenizer).from_files(files, folder=folder, model_type=model_type)


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Return the tokenizer files of a folder without a loaded tokenizer, by file name, so that saving keeps them.

    No output depends on them, so an unreadable file is skipped.
    """
    found: dict[str, bytes] = {}
    for name in TOKENIZER_FILES:
        if os.path.lexists(folder / name):
            from flodl_hf.tokenization.source import read_bytes

            with contextlib.suppress(FlodlError, OSError):
                found[name] = read_bytes(folder / name)
    return found

"""The tokenizer of a folder's files: ``tokenizer.json``, or one that is built from the vocabulary files.

Decides: which of the two is read.
Leaves to others: building (``build.py``), tokens that only settings files name (``added.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers

from .added import add_missing
from .backend import load_json
from .classes import PYTHON_BUILDERS, class_name, class_rules, guess_model_type
from .guard import guarded
from .source import parse_json

__all__ = ["read_backend"]


def read_backend(
    files: Mapping[str, bytes],
    folder: str,
    model_type: str | None,
    config: Mapping[str, Any],
    byte_fallback: bool,
) -> tuple[tokenizers.Tokenizer, list[str]]:
    """Return the tokenizer of a folder, and notes about contradictions of its files.

    Args:
        files: tokenizer files by name.
        folder: the folder of the files, for messages.
        model_type: family, if the caller specifies it.
        config: ``config.json`` of the model, or an empty mapping.
        byte_fallback: split characters that a unigram sentencepiece model lacks into its byte pieces.

    Raises:
        TokenizerError: if the files are damaged, or the tokenizer class is not supported.
    """
    stated, mapped, added = (
        parse_json(files[name], f"{folder}/{name}") if name in files else {}
        for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    )
    size = config.get("vocab_size")
    rows = size if isinstance(size, int) else None
    rules = class_rules(class_name(stated, config))
    # No definition contains words that Python code splits, so transformers reads the files of such a class.
    by_code = (
        rules is not None
        and rules.build in PYTHON_BUILDERS
        and any(name in files for name in (rules.files[0], "spiece.model"))
    )
    if "tokenizer.json" not in files or by_code:
        from .build import build_backend

        family = model_type or guess_model_type(config, stated)
        backend = build_backend(
            files, folder=folder, model_type=family, settings=stated, config=config, rows=rows,
            byte_fallback=byte_fallback,
        )  # fmt: skip
        return backend, []
    backend = load_json(files["tokenizer.json"], f"{folder}/tokenizer.json")
    with guarded(f"{folder}/tokenizer_config.json", "the settings are damaged; fetch them again"):
        notes = add_missing(backend, stated, mapped, added, rows, decoder=True)
    if rules is not None and rules.words:
        notes.append(f"tokenizer.json is read as it is; its class splits words by {rules.words}: ids may differ")
    return backend, notes

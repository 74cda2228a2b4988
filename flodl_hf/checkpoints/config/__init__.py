"""Read ``config.json``: strictly, by tables, with the text stored for export.

    file              find the file in a folder and read it as strict JSON
    model_config      its meaning: typed settings, labels, the source text
    labels            names of labels, their minimum scores, the activation of scores
    warnings          warnings about ignored settings

`flodl_hf.families.schema.config_rows` maps one key to one field.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flodl_hf.checkpoints.config.model_config import (
        MAX_LABELS,
        PROBLEM_TYPES,
        ModelConfig,
        family_of,
        listed_texts,
        read_config,
        read_config_file,
    )

__all__ = ["MAX_LABELS", "PROBLEM_TYPES", "ModelConfig", "family_of", "listed_texts", "read_config", "read_config_file"]


def __getattr__(name: str) -> Any:
    # Only on demand: families and files use modules of this package without the rest of it.
    if name in __all__:
        return getattr(import_module("flodl_hf.checkpoints.config.model_config"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

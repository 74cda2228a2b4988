"""What ``config.json`` says, and how it is read: strictly, by tables, with the text kept for export.

    file              found in a folder, read as strict JSON
    model_config      what it means: settings in our words, labels, the text it came from
    label_thresholds  scores from which labels hold

How one key becomes one field is `flodl_hf.families.schema.config_rows`'.
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
    # Only on demand: families and files use modules of this room without the rest of it.
    if name in __all__:
        return getattr(import_module("flodl_hf.checkpoints.config.model_config"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Warnings for a configuration that is read as transformers reads it, but may be a mistake."""

from __future__ import annotations

import warnings

from flodl.errors import capped
from flodl_hf.checkpoints.config.model_config import ModelConfig


def warn_of(config: ModelConfig, stacklevel: int) -> None:
    """Warn of ignored settings, and of missing sizes; one warning for each."""
    if config.overruled:
        warnings.warn(
            f"{config.where}: settings contradict others of the file and are ignored, as by transformers:\n"
            f"{capped(config.overruled)}\nRemove the wrong ones; strict_config=True refuses such a file.",
            stacklevel=stacklevel + 1,
        )
    if config.left_out:
        sizes = [f"{key}: {value}" for key, value in config.left_out.items()]
        warnings.warn(
            f"{config.where}: sizes are not stated; transformers' defaults are used:\n{capped(sizes)}\n"
            "Add the correct sizes to the file; strict_config=True refuses such a file.",
            stacklevel=stacklevel + 1,
        )

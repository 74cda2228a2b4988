"""What loading warns of: a configuration that is read as transformers reads it, and may not be what was meant."""

from __future__ import annotations

import warnings

from flodl.errors import capped
from flodl_hf.checkpoints.config.model_config import ModelConfig

__all__ = ["warn_of"]


def warn_of(config: ModelConfig, stacklevel: int) -> None:
    """Warn of settings that are passed over, and of sizes that the file leaves out; one warning for each."""
    if config.overruled:
        warnings.warn(
            f"{config.where}: settings contradict others of the file and are passed over, as by transformers:\n"
            f"{capped(config.overruled)}\nRemove what does not hold; strict_config=True refuses such a file.",
            stacklevel=stacklevel + 1,
        )
    if config.left_out:
        sizes = [f"{key}: {value}" for key, value in config.left_out.items()]
        warnings.warn(
            f"{config.where}: sizes are not stated; those of transformers are taken:\n{capped(sizes)}\n"
            "Write into the file what holds; strict_config=True refuses such a file.",
            stacklevel=stacklevel + 1,
        )

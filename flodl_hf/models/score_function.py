"""The function that makes scores of a cross-encoder's logits, as its folder stores it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flodl.errors import ConfigError, printable
from flodl_hf.checkpoints.config.labels import ACTIVATIONS, activation_at
from flodl_hf.inference.decode.classes import activation_for

if TYPE_CHECKING:
    from flodl_hf.checkpoints.config.model_config import ModelConfig
    from flodl_hf.inference.decode.classes import Activation


def score_function(config: ModelConfig) -> Activation | None:
    """Return the function that makes scores of a cross-encoder's logits, as its folder stores it; None without one.

    Raises:
        ConfigError: the stored activation is not known, or does not give one score for each label.
    """
    path = config.score_activation
    if path is None:
        return None
    name = activation_at(path)
    if name in (None, "GLU"):
        raise ConfigError(
            f"{config.where}: found activation_fn={printable(path)}, expected a class of torch.nn without settings: "
            f"{', '.join(known for known in ACTIVATIONS if known != 'GLU')}. Correct it to the activation that the "
            "model was trained with.",
            where=config.where,
            problems=["activation_fn"],
            found=path,
        )
    return activation_for(None, config.num_labels, name)

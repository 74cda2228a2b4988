"""Activations of torch by name, as files of sentence-transformers and ``function_to_apply`` name them.

Only activations without settings and parameters are known: a file stores the name of a class and nothing else.

``config.json`` may store the activation that turns logits of a cross-encoder into scores: sentence-transformers 4.0 and
later writes it under ``sentence_transformers``, earlier releases under ``sbert_ce_default_activation_function``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ACTIVATIONS", "activate", "activation_at", "activation_changes", "stored_activation"]

ACTIVATIONS = (
    "Identity", "Sigmoid", "Softmax", "Tanh", "ReLU", "GELU", "SiLU", "CELU", "ELU", "GLU", "Hardshrink", "Hardsigmoid",
    "Hardswish", "Hardtanh", "LeakyReLU", "LogSigmoid", "LogSoftmax", "Mish", "RReLU", "ReLU6", "SELU", "Softmin",
    "Softplus", "Softshrink", "Softsign", "Tanhshrink",
)  # fmt: skip
"""Classes of ``torch.nn``; each is applied as in evaluation mode, along the last dimension where it has one."""

_SCORES_KEY, _OLD_KEY = "sentence_transformers", "sbert_ce_default_activation_function"
_OVER_ONE_DIMENSION = ("Softmax", "Softmin", "LogSoftmax")


def activation_at(path: Any) -> str | None:
    """Return the class name of the activation at a dotted path such as ``torch.nn.modules.activation.Tanh``.

    None if the path is not in torch, or names a class that is not in `ACTIVATIONS`.
    """
    module, _, name = str(path).rpartition(".")
    inside_torch = module == "torch.nn" or module.startswith("torch.nn.modules.")
    return name if inside_torch and name in ACTIVATIONS else None


@cache
def _module(name: str) -> Any:
    from torch import nn

    options = {"dim": -1} if name in _OVER_ONE_DIMENSION else {}
    return getattr(nn, name)(**options).eval()


def activate(name: str, values: Tensor) -> Tensor:
    """Return the values after the activation of this class name."""
    return _module(name)(values)


def stored_activation(source: Mapping[str, Any]) -> str | None:
    """Return the path of the activation's class that a configuration stores; None if it stores none."""
    settings = source.get(_SCORES_KEY)
    stated = settings.get("activation_fn") if isinstance(settings, Mapping) else None
    found = stated or source.get(_OLD_KEY)
    return None if found is None else str(found)


def activation_changes(source: Mapping[str, Any], activation: str | None) -> tuple[dict[str, Any], list[str]]:
    """Return the keys to write and the keys to remove so that a configuration stores this activation."""
    if activation == stored_activation(source):
        return {}, []
    changed = {} if activation is None else {_SCORES_KEY: {"activation_fn": activation}}
    return changed, [key for key in (_SCORES_KEY, _OLD_KEY) if key in source and key not in changed]

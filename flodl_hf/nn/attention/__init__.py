"""Attention: the computation that mixes tokens.

dot_product   scaled dot products over a layout, and which kernel runs for which layout
rotary        queries and keys turned by their places
distances     what attention adds by the distance of two tokens
disentangled  DeBERTa's, which keeps content and position apart
prefixes      keys and values that adapters put before each row's own
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flodl_hf.nn.attention.dot_product import (
        IMPLEMENTATIONS,
        Bias,
        SelfAttention,
        attend,
        attend_first,
        check_implementation,
    )

__all__ = ["IMPLEMENTATIONS", "Bias", "SelfAttention", "attend", "attend_first", "check_implementation"]


def __getattr__(name: str) -> Any:
    # Only on demand: families and files use modules of this package without the rest of it.
    if name in __all__:
        return getattr(import_module("flodl_hf.nn.attention.dot_product"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Memory layouts of the tokens of a batch.

layouts  `Padded` and `Packed`, and the few operations that depend on which it is
buckets  packed batches brought to a few shapes, so that a pass can be recorded
segments maximum values of concatenated texts
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flodl_hf.nn.layout.layouts import Layout, Packed, Padded

__all__ = ["Layout", "Packed", "Padded"]


def __getattr__(name: str) -> Any:
    # Only on demand: families and files use modules of this package without the rest of it.
    if name in __all__:
        return getattr(import_module("flodl_hf.nn.layout.layouts"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""What predictions come back in.

lists  sequences of records that know their text, as JSON and tables
pages  HTML for notebooks
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flodl_hf.inference.results.lists import (
        Answers,
        Entities,
        Fill,
        Fills,
        Found,
        Labels,
        Ranking,
        Results,
    )

__all__ = ["Answers", "Entities", "Fill", "Fills", "Found", "Labels", "Ranking", "Results"]


def __getattr__(name: str) -> Any:
    # Only on demand: families and files use modules of this package without the rest of it.
    if name in __all__:
        return getattr(import_module("flodl_hf.inference.results.lists"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

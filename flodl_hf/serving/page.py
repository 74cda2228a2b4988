"""The page at the root: a text in, the model's answer out, coloured, for every model that is served.

One document without anything from elsewhere; what models answer is put into it as text, never as HTML.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

__all__ = ["page"]


@cache
def _document() -> str:
    return (files(__package__ or "flodl_hf.serving") / "page.html").read_text("utf-8")


def page(models: Mapping[str, dict[str, Any]]) -> str:
    """Return the document.

    Args:
        models: what is known of each model.
    """
    known = {name: {part: info[part] for part in ("head", "tasks", "mask")} for name, info in models.items()}
    # No "<" in a script element, whatever a model is called.
    return _document().replace("@MODELS@", json.dumps(known).replace("<", "\\u003c"))

"""Deprecated: the names of this module are in `flodl.monitor`."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    now = "RuleContext" if name == "Outlook" else name
    for module in ("collect", "conditions", "profiler", "trend"):
        found = getattr(import_module(f"flodl.monitor.{module}"), now, None)
        if found is not None and not now.startswith("_"):
            warnings.warn(f"flodl.observe.{name} is deprecated; use flodl.monitor", DeprecationWarning, stacklevel=2)
            return found
    raise AttributeError(f"module 'flodl.observe' has no attribute {name!r}")

"""Deprecated: the names of this module are in `flodl.monitor`."""

from __future__ import annotations

import warnings
from typing import Any

from flodl import monitor

_NAMES = (
    "above", "after_epochs", "after_steps", "below", "converged", "improving", "log", "look_at", "no_better",
    "stalled", "worsening", "RuleContext", "Reduce", "Trend",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    now = "RuleContext" if name == "Outlook" else name
    if now not in _NAMES:
        raise AttributeError(f"module 'flodl.observe' has no attribute {name!r}")
    warnings.warn(f"flodl.observe.{name} is deprecated; use flodl.monitor.{now}", DeprecationWarning, stacklevel=2)
    return getattr(monitor, now)

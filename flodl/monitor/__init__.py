"""Values, timings and events of training runs: collected, stored, and shown on a console, a page and in files.

What a run reports is stored in one `RunRecord`, which the page, CSV files and the archive read. What a graph collects
is stored as one value for each epoch (`Trend`), which rules read.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flodl.monitor.collect import Reduce, log
    from flodl.monitor.conditions import (
        Condition,
        RuleContext,
        above,
        after_epochs,
        after_steps,
        below,
        converged,
        improving,
        no_better,
        stalled,
        worsening,
    )
    from flodl.monitor.console import EpochRecord
    from flodl.monitor.journal import read_record
    from flodl.monitor.module_costs import Look, look_at
    from flodl.monitor.monitor import Monitor
    from flodl.monitor.observer import Observer
    from flodl.monitor.profile import LevelTime, NodeTime, Profile
    from flodl.monitor.record import RunRecord
    from flodl.monitor.trend import Trend, TrendGroup

_MODULES = {
    "collect": ("Reduce", "log"),
    "conditions": (
        "Condition", "RuleContext", "above", "after_epochs", "after_steps", "below", "converged", "improving",
        "no_better", "stalled", "worsening",
    ),
    "console": ("EpochRecord",),
    "journal": ("read_record",),
    "module_costs": ("Look", "look_at"),
    "monitor": ("Monitor",),
    "observer": ("Observer",),
    "profile": ("LevelTime", "NodeTime", "Profile"),
    "record": ("RunRecord",),
    "trend": ("Trend", "TrendGroup"),
}  # fmt: skip

__all__ = [
    "Condition",
    "EpochRecord",
    "LevelTime",
    "Look",
    "Monitor",
    "NodeTime",
    "Observer",
    "Profile",
    "Reduce",
    "RuleContext",
    "RunRecord",
    "Trend",
    "TrendGroup",
    "above",
    "after_epochs",
    "after_steps",
    "below",
    "converged",
    "improving",
    "log",
    "look_at",
    "no_better",
    "read_record",
    "stalled",
    "worsening",
]


def __getattr__(name: str) -> Any:
    # Modules that a training step imports must not load the page and its server.
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"flodl.monitor.{module}"), name)
    raise AttributeError(f"module 'flodl.monitor' has no attribute {name!r}")

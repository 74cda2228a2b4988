"""Values, times and events of training runs: collected, stored, and shown on a console, a page and in files.

Events of a run are stored in a `RunRecord`, which the page, CSV files and the archive read. Values of a graph are
stored as one value for each epoch (`Trend`), which rules read.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flodl.monitor.collect import log
from flodl.monitor.conditions import (
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

if TYPE_CHECKING:
    from flodl.monitor.folder import RunFolder
    from flodl.monitor.journal import read_record
    from flodl.monitor.monitor import Monitor
    from flodl.monitor.profiler import look_at
    from flodl.monitor.timeline import Timeline

__all__ = [
    "Monitor",
    "RunFolder",
    "Timeline",
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

# A training step must not load the page and its server.
_LAZY = {"look_at": "profiler", "read_record": "journal", "RunFolder": "folder"}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f"flodl.monitor.{_LAZY.get(name, name.lower())}"), name)
    raise AttributeError(f"module 'flodl.monitor' has no attribute {name!r}")

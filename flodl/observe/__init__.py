"""What a graph did: values collected step by step and epoch by epoch, trends over them, and timings."""

from flodl.observe.conditions import (
    Condition,
    Outlook,
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
from flodl.observe.live import Reduce, log
from flodl.observe.module_costs import Look, look_at
from flodl.observe.profile import LevelTime, NodeTime, Profile
from flodl.observe.record import Observer
from flodl.observe.trend import Trend, TrendGroup

__all__ = [
    "Condition",
    "LevelTime",
    "Look",
    "NodeTime",
    "Observer",
    "Outlook",
    "Profile",
    "Reduce",
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
    "stalled",
    "worsening",
]

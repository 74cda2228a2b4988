"""What a graph did: values collected step by step and epoch by epoch, trends over them, and timings."""

from flodl.observe.live import Reduce, log
from flodl.observe.profile import LevelTime, NodeTime, Profile
from flodl.observe.record import Observer
from flodl.observe.trend import Trend, TrendGroup

__all__ = ["LevelTime", "NodeTime", "Observer", "Profile", "Reduce", "Trend", "TrendGroup", "log"]

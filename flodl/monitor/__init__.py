"""Watching a training run: a page that is alive, a record on disk, a console line an epoch, and files made from it."""

from __future__ import annotations

from flodl.monitor.console import EpochRecord
from flodl.monitor.journal import read_record
from flodl.monitor.monitor import Monitor
from flodl.monitor.record import RunRecord

__all__ = ["EpochRecord", "Monitor", "RunRecord", "read_record"]

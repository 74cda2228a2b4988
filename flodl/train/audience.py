"""Subscribers of a run: progress, trackers and monitor as the settings request, and the subscribers of the user."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from flodl.train.callback import Callback
from flodl.train.console import ShowProgress
from flodl.train.events import Events
from flodl.train.settings import Settings
from flodl.train.trackers import Tracker

if TYPE_CHECKING:
    from flodl.monitor import Monitor
    from flodl.train.plan import Subscription


class Audience:
    """The subscribers of one run in this process; a context manager that closes them.

    Args:
        settings: of the run.
        subscribers: the subscribers of the user.
        first: whether this is the first rank or starts the ranks; only there progress, trackers and monitor exist.
        total: optimiser steps of the whole run, if known.

    Raises:
        TrainError: the package of a tracker is not installed, or the port of the monitor is in use.
    """

    def __init__(
        self, settings: Settings, subscribers: Sequence[Subscription] = (), *, first: bool, total: int | None = None
    ) -> None:
        self.settings, self.subscribers = settings, list(subscribers)
        self._stack = ExitStack()
        self.needs_all_events = bool(subscribers)
        if first and settings.progress is not False:
            self._add(shown := ShowProgress(settings.progress, total=total))
            self._stack.callback(shown.close)
        for tracker in settings.made_trackers() if first else ():
            self._add(tracker)
            self.needs_all_events = True
            if isinstance(tracker, Tracker):
                self._stack.callback(tracker.end)
        self.monitor: Monitor | None = _monitor_of(settings) if first else None
        if self.monitor is not None:
            self._add(self.monitor)
            self.needs_all_events = True

    def _add(self, call: Callable[[Any], Any]) -> None:
        self.subscribers.append((call, ()))

    def listen(self, events: Events, ask: Callable[[str], Any], *, evaluates: bool) -> None:
        """Subscribe all of them; the monitor may send requests by ``ask``."""
        for call, kinds in self.subscribers:
            events.subscribe(call, *kinds)
        if self.monitor is not None:
            evaluate, save = ["evaluate"] * evaluates, ["save"] * (self.settings.folder is not None)
            self.monitor.enable_control([*evaluate, *save, "stop"], ask)

    def __enter__(self) -> Audience:
        """Return self."""
        return self

    def __exit__(self, *error: Any) -> None:
        """Close progress and trackers; the monitor shows an error of the run."""
        if self.monitor is not None and isinstance(error[1], Exception):
            self.monitor.failed(f"{type(error[1]).__name__}: {error[1]}")
        self._stack.close()


def _monitor_of(settings: Settings) -> Monitor | None:
    """Return the monitor of a run with its page served; None if none is requested.

    Raises:
        TrainError: the port is taken.
    """
    wanted = settings.monitor
    if wanted is None or wanted is False:
        return None
    from flodl.monitor import Monitor

    if isinstance(wanted, Monitor):
        return wanted
    monitor = Monitor(folder=settings.folder, quiet=True)
    url = monitor.serve(None if wanted is True else wanted)
    print(f"watch this run at {url}", file=sys.stderr, flush=True)
    return monitor


def callbacks_of(settings: Settings) -> tuple[Callback, ...]:
    """Return the callbacks of a run, with those that the timeline and the monitor need."""
    is_monitored = settings.monitor is not None and settings.monitor is not False
    if not is_monitored and not settings.timeline:
        return tuple(settings.callbacks)
    from flodl.train.layer_probe import LayerProbe
    from flodl.train.rank_activity import RankActivity

    activity = RankActivity(settings.timeline or None, is_monitored)
    return (*settings.callbacks, activity, *([LayerProbe()] if is_monitored else []))

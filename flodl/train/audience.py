"""Subscribers of a run: the console, trackers and monitor as the settings request, and subscribers of the user."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from flodl.progress import AFTER_S, Progress, figures_of, in_words
from flodl.train import events
from flodl.train.callback import Callback
from flodl.train.settings import Settings
from flodl.train.trackers import Tracker
from flodl.verbosity import Verbosity, verbosity


class Audience(ExitStack):
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
        self, settings: Settings, subscribers: Sequence[Any] = (), *, first: bool, total: int | None = None
    ) -> None:
        super().__init__()
        self.settings = settings
        added: list[Any] = settings.made_trackers() if first else []
        for tracker in added:
            if isinstance(tracker, Tracker):
                self.callback(tracker.end)
        self.monitor: Any = _monitor_of(settings) if first else None
        if self.monitor is not None:
            added.append(self.monitor)
        self.needs_all_events = bool(subscribers or added)
        if first and settings.progress is not False:
            added.append(shown := ShowProgress(settings.progress, total=total))
            self.callback(shown.close)
        self.subscribers = [*subscribers, *((call, ()) for call in added)]

    def listen(self, bus: events.Events, ask: Callable[[str], Any], *, evaluates: bool) -> None:
        """Subscribe all of them; the monitor may send requests by ``ask``."""
        for call, kinds in self.subscribers:
            bus.subscribe(call, *kinds)
        if self.monitor is not None:
            evaluate, save = ["evaluate"] * evaluates, ["save"] * (self.settings.folder is not None)
            self.monitor.enable_control([*evaluate, *save, "stop"], ask)

    def __exit__(self, *error: Any) -> None:
        """Close progress and trackers; the monitor shows an error of the run."""
        if self.monitor is not None and isinstance(error[1], Exception):
            self.monitor.failed(f"{type(error[1]).__name__}: {error[1]}")
        super().__exit__(*error)


def _monitor_of(settings: Settings) -> Any:
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
    print("watch this run at", monitor.serve(None if wanted is True else wanted), file=sys.stderr, flush=True)
    return monitor


def callbacks_of(settings: Settings) -> tuple[Callback, ...]:
    """Return the callbacks of a run, with those that the timeline and the monitor need."""
    is_monitored = settings.monitor is not None and settings.monitor is not False
    if not is_monitored and not settings.timeline:
        return tuple(settings.callbacks)
    from flodl.train.rank_activity import LayerProbe, RankActivity

    activity = RankActivity(settings.timeline or None, is_monitored)
    return (*settings.callbacks, activity, *([LayerProbe()] if is_monitored else []))


class ShowProgress:
    """A subscriber that shows the progress of a run, see `flodl.progress`.

    Args:
        show: True also for short runs, False never, None for runs longer than a second.
        total: steps of the whole run if known better than from epochs.
    """

    def __init__(self, show: bool | None = None, *, total: int | None = None) -> None:
        self.show, self.total = show, total
        self._progress: Progress | None = None

    def __call__(self, event: Any) -> None:
        """Receive an event."""
        level = verbosity()
        if level == Verbosity.QUIET and isinstance(event, (events.Warned, events.SaveFailed)):
            print(f"warning: {_text_of(event)}", file=sys.stderr, flush=True)
        if level >= Verbosity.TRACE:
            print(json.dumps(event.to_dict(), default=str), file=sys.stderr, flush=True)
        if isinstance(event, events.RunStarted):
            self._begin(event)
        elif self._progress is not None:
            if isinstance(event, events.StepDone):
                loss: dict[str, Any] = {} if math.isnan(event.loss) else {"loss": event.loss}
                self._progress.update(event.step, epoch=event.epoch + 1, **loss, lr=f"{event.lr:.2e}")
            elif isinstance(event, events.RunDone):
                self._progress.update(event.step)
                self.close()
            elif isinstance(event, (events.Warned, events.SaveFailed)):
                self._print(f"warning: {_text_of(event)}", always=True)
            else:
                for line in _lines_of(event, level):
                    self._print(line)

    def _begin(self, event: events.RunStarted) -> None:
        self.close()
        total = event.total_steps if self.total is None else self.total
        self._progress = Progress("training", total or None, unit="steps", done=event.step, show=self.show)
        parts = [_plural(event.epochs, "epoch"), _plural(total, "step")] if total else []
        parts += [f"{event.world} devices"] if event.world > 1 else []
        parts += [f"resumed from step {event.step:,}"] if event.resumed_from else []
        if parts:
            self._print(f"training: {', '.join(parts)}")
        if event.world > 1:
            self._print(f"policy: {event.policy}, because {event.policy_reason}")

    def _print(self, text: str, *, always: bool = False) -> None:
        """Print a line; without ``always`` only in runs that last."""
        progress = self._progress
        if progress is not None and (self.show or always or progress.elapsed >= AFTER_S):
            progress.say(text)

    def close(self) -> None:
        """Remove the display."""
        if self._progress is not None:
            self._progress.close()
        self._progress = None


def _text_of(event: events.Warned | events.SaveFailed) -> str:
    if isinstance(event, events.Warned):
        return in_words(event.message)
    return in_words(f"the checkpoint of step {event.step:,} was not written: {event.reason}")


def _lines_of(event: Any, level: Verbosity) -> list[str]:
    """Return the lines of an event at a verbosity level."""
    if isinstance(event, events.EvalDone):
        # Without metrics of labels, such as ``f1/PER`` or ``dev/f1/PER``, if there are others.
        plain = {name: value for name, value in event.metrics.items() if "/" not in name}
        plain = plain or {name: value for name, value in event.metrics.items() if name.count("/") == 1}
        return [f"step {event.step:,}: {', '.join(figures_of(plain))}"]
    if isinstance(event, events.EpochMetrics):
        rows = event.samples / event.epoch_ms * 1e3 if event.epoch_ms else 0.0
        loss = "" if math.isnan(event.loss) else f"loss {event.loss:.4f}, "
        lines = [f"epoch {event.epoch + 1}: {loss}{rows:,.{int(rows < 10)}f} rows/s"]
        ranks = enumerate(event.by_rank if level >= Verbosity.DEBUG else ())
        return [*lines, *(f"epoch {event.epoch + 1}, rank {rank}: {', '.join(figures_of(own))}" for rank, own in ranks)]
    if isinstance(event, events.Decided):
        return [f"step {event.step:,}: {event.rule} ({event.reason})"]
    if isinstance(event, events.Saved) and level >= Verbosity.VERBOSE:
        size = f"{event.bytes / (1 << 20):.1f} MiB in {event.wall_ms / 1e3:.1f} s"
        return [f"step {event.step:,}: checkpoint {event.path}, {size}"]
    if isinstance(event, events.Synced) and level >= Verbosity.VERBOSE:
        batches = " + ".join(map(str, event.batches))
        return [f"step {event.step:,}: ranks synchronised after {batches} batches, {event.sync_ms:.0f} ms"]
    if isinstance(event, events.Observed) and event.scope == "epoch" and level >= Verbosity.DEBUG:
        return [f"epoch {event.epoch + 1}: {', '.join(figures_of(event.values))}"]
    return []


def _plural(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"

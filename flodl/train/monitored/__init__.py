"""The settings ``monitor`` and ``timeline``: a page for the run, and callbacks that record its contents.

The monitor is in `flodl.monitor` and does not know the Trainer.

layer_probe  time, memory and gradients by layer
rank_work    activity of each rank
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from flodl.errors import TrainError
from flodl.train.callback import Callback
from flodl.train.settings import Settings

if TYPE_CHECKING:
    from flodl.monitor import Monitor


def monitor_of(settings: Settings, is_first: bool = True) -> Monitor | None:
    """Return the monitor of a run with its page served; None if none is wanted, or on other ranks.

    Raises:
        TrainError: the setting is not a bool, a port or a monitor, or the port is taken.
    """
    wanted = settings.monitor
    if wanted is None or wanted is False or not is_first:
        return None
    from flodl.monitor import Monitor

    if isinstance(wanted, Monitor):
        return wanted
    if wanted is not True and not (isinstance(wanted, int) and 0 <= wanted < 65536):
        raise TrainError(
            f"monitor: found {wanted!r}, expected True, a port, or a flodl.monitor.Monitor.", found=repr(wanted)
        )
    monitor = Monitor(folder=settings.folder, quiet=True)
    url = monitor.serve(None if wanted is True else wanted)
    print(f"watch this run at {url}", file=sys.stderr, flush=True)
    return monitor


def callbacks_of(settings: Settings) -> tuple[Callback, ...]:
    """Return the callbacks of a run, and a recorder for the timeline or the monitor if requested."""
    is_monitored = settings.monitor is not None and settings.monitor is not False
    if not is_monitored and not settings.timeline:
        return tuple(settings.callbacks)
    from flodl.train.monitored.layer_probe import LayerProbe
    from flodl.train.monitored.rank_work import RankActivity

    activity = RankActivity(settings.timeline or None, is_monitored)
    return (*settings.callbacks, activity, *([LayerProbe()] if is_monitored else []))


def orders_of(settings: Settings, evaluates: bool) -> tuple[str, ...]:
    """Return the commands that a run accepts; ``evaluates`` is whether it has an evaluation."""
    return (*(("evaluate",) if evaluates else ()), *(("save",) if settings.folder else ()), "stop")

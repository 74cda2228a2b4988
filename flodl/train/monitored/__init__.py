"""The setting ``monitor`` made true: a page beside the run, told of its events and of what each rank does.

The monitor itself is in `flodl.monitor` and knows no trainer; here the two meet.

layer_probe  where the time of a pass goes and how large gradients are, layer by layer
rank_work    what each rank spends its time on
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from flodl.errors import TrainError
from flodl.train.callback import Callback
from flodl.train.settings import Settings

if TYPE_CHECKING:
    from flodl.monitor import Monitor

__all__ = ["callbacks_of", "monitor_of", "orders_of"]


def monitor_of(settings: Settings, is_first: bool = True) -> Monitor | None:
    """Return the monitor of a run, its page shown; None where none is wanted, or another rank has it.

    Raises:
        TrainError: the setting is neither a choice, a port nor a monitor, or the port is taken.
    """
    wanted = settings.monitor
    if wanted is None or wanted is False or not is_first:
        return None
    from flodl.monitor import Monitor

    if isinstance(wanted, Monitor):
        return wanted
    if wanted is not True and not (isinstance(wanted, int) and 0 <= wanted < 65536):
        raise TrainError(
            f"monitor: found {wanted!r}; expected True, a port, or a flodl.monitor.Monitor.", found=repr(wanted)
        )
    monitor = Monitor(folder=settings.folder, quiet=True)
    url = monitor.serve(None if wanted is True else wanted)
    print(f"watch this run at {url}", file=sys.stderr, flush=True)
    return monitor


def callbacks_of(settings: Settings) -> tuple[Callback, ...]:
    """Return the callbacks of a run, with those that tell of each rank's work where a monitor looks on."""
    if settings.monitor is None or settings.monitor is False:
        return tuple(settings.callbacks)
    from flodl.train.monitored.layer_probe import LayerProbe
    from flodl.train.monitored.rank_work import TellWork

    return (*settings.callbacks, TellWork(), LayerProbe())


def orders_of(settings: Settings, judged: bool) -> tuple[str, ...]:
    """Return what a run can be asked for; ``judged`` is whether there is anything to evaluate by."""
    return (*(("evaluate",) if judged else ()), *(("save",) if settings.folder else ()), "stop")

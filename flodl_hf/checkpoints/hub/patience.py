"""How long a call over the network may take, whatever library makes it: what comes drop by drop has an end too.

Time limits of HTTP libraries hold for one read; a server that sends a byte now and then, or asks for a pause of a year,
meets none of them. The call runs in a thread of its own, and who waits for it gives up when it is over its time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context
from pathlib import Path
from time import monotonic
from typing import TypeVar

__all__ = ["LEAST_RATE", "arrived", "time_for", "within"]

R = TypeVar("R")

LEAST_RATE = 16 << 10
"""Bytes a second below which a download is given up."""
CHUNK = 12 << 20
"""Bytes that may have come and stand in no file yet."""


def within(act: Callable[[], R], allowed_s: Callable[[], float]) -> R:
    """Return what a call returns, or raise what it raises.

    Args:
        act: the call; given up, it goes on by itself until it ends or the process does.
        allowed_s: seconds that it may take as far as is known by now; asked again while it runs.

    Raises:
        TimeoutError: it took longer.
    """
    ended = threading.Event()
    found: list[R] = []
    raised: list[BaseException] = []

    def call() -> None:
        try:
            found.append(act())
        except BaseException as fault:
            raised.append(fault)
        finally:
            ended.set()

    began = monotonic()
    threading.Thread(target=copy_context().run, args=(call,), name="flodl-hub", daemon=True).start()
    while not ended.wait(min(0.5, max(0.01, began + allowed_s() - monotonic()))):
        if monotonic() - began > allowed_s():
            raise TimeoutError(f"nothing whole within {monotonic() - began:.0f} s")
    if raised:
        raise raised[0]
    return found[0]


def time_for(size: int | None, folder: Path, pause_s: float) -> Callable[[], float]:
    """Return how long a file may take to arrive: longer while more of it is there.

    Args:
        size: of the file in bytes; None where it is not known.
        folder: where files stand while they arrive.
        pause_s: how long nothing at all may come.
    """
    before = arrived(folder)

    def allowed_s() -> float:
        # What others fetch into the folder counts too: this download may wait for theirs.
        due = arrived(folder) - before + CHUNK
        return pause_s + (due if size is None else min(due, size)) / LEAST_RATE

    return allowed_s


def arrived(folder: Path) -> int:
    """Return the bytes of files in a folder that are still arriving."""
    total = 0
    for path in folder.glob("*.incomplete"):
        try:
            total += path.stat().st_size
        except OSError:
            continue
    return total

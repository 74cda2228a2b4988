"""Time limits for network calls of any library, including responses that trickle in.

Time limits of HTTP libraries apply to one read; a server that sends single bytes slowly, or requests a pause of a year,
never reaches them. The call runs in a separate thread, and the waiting caller gives up when its time is over.
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
"""Bytes that may have arrived and are not in a file yet."""


def within(act: Callable[[], R], allowed_s: Callable[[], float]) -> R:
    """Return or raise the result of a call.

    Args:
        act: the call; after a timeout it continues in its thread until it ends or the process does.
        allowed_s: seconds that it may take by current knowledge; evaluated repeatedly while it runs.

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
    """Return a function of the seconds allowed for a file; longer as more bytes arrive.

    Args:
        size: of the file in bytes; None where it is not known.
        folder: folder of partial files.
        pause_s: maximum pause without any bytes.
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

"""Pauses of garbage collection, nested and from several threads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LOCK = threading.Lock()
_PAUSES: set[int] = set()
_WAS_ENABLED = False
# Whether objects are known to be frozen. `gc.get_freeze_count` counts them one by one: milliseconds with torch.
_FROZEN = False


@contextmanager
def gc_paused(*, settled: bool = False) -> Iterator[None]:
    """Pause garbage collection.

    Use it while many lasting objects are created, or while freeing a tensor would do harm. Threads may overlap;
    collection is enabled again when the last one leaves, if it was enabled before, even if Ctrl-C arrives on entry or
    exit.

    Args:
        settled: count the objects that exist on exit as old, so that no full collection is due soon.
    """
    token = object()
    try:
        _enter(id(token))
        yield
    finally:
        try:
            _leave(id(token), settled)
        except BaseException:
            _leave(id(token), settled)
            raise


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Exclude existing objects from garbage collection: a collection over all of torch takes a tenth of a second.

    Cycles among them are collected afterwards.
    """
    global _FROZEN
    if _FROZEN or gc.get_freeze_count():
        yield
        return
    try:
        gc.freeze()
        _FROZEN = True
        yield
    finally:
        _FROZEN = False
        gc.unfreeze()


def _enter(token: int) -> None:
    global _WAS_ENABLED
    with _LOCK:
        if not _PAUSES:
            _WAS_ENABLED = gc.isenabled()
        _PAUSES.add(token)
        gc.disable()


def _leave(token: int, settled: bool) -> None:
    """Leave a pause; a second call has no effect."""
    global _FROZEN
    with _LOCK:
        _PAUSES.discard(token)
        if _PAUSES or not _WAS_ENABLED or gc.isenabled():
            return
        if settled and not _FROZEN:
            _FROZEN = gc.get_freeze_count() > 0  # by the program, which must stay so
            if not _FROZEN:
                try:
                    gc.freeze()
                finally:
                    gc.unfreeze()
        gc.enable()

"""Garbage collection paused, by any number of threads at once, and kept from what is there already.

Decides nothing but that. A program that has switched collection off finds it off.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["gc_frozen", "gc_paused"]

_LOCK = threading.Lock()
_INSIDE: set[int] = set()
_WAS_ON = False


@contextmanager
def gc_paused(*, settled: bool = False) -> Iterator[None]:
    """Pause garbage collection: while much is made that stays, or while freeing a tensor would do harm.

    Threads may overlap; it is on again when the last one leaves. A Ctrl-C that arrives while one enters or leaves
    does not leave it off.

    Args:
        settled: what exists then counts as old without being scanned, so that no full collection is due next.
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
    """Seek garbage among what is made from now on alone: a collection through all of torch takes a tenth of a second.

    Cycles that were made before and become garbage meanwhile are found afterwards.
    """
    if gc.get_freeze_count():
        yield
        return
    try:
        gc.freeze()
        yield
    finally:
        gc.unfreeze()


def _enter(token: int) -> None:
    global _WAS_ON
    with _LOCK:
        if not _INSIDE:
            _WAS_ON = gc.isenabled()
        _INSIDE.add(token)
        gc.disable()


def _leave(token: int, settled: bool) -> None:
    """Leave, if not done yet; nothing here is done twice that may be done once only."""
    with _LOCK:
        _INSIDE.discard(token)
        if _INSIDE or not _WAS_ON or gc.isenabled():
            return
        if settled and not gc.get_freeze_count():
            try:
                gc.freeze()
            finally:
                gc.unfreeze()
        gc.enable()

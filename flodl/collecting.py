"""Garbage collection paused, by any number of threads at once.

Decides nothing but that. A program that has switched collection off finds it off.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["gc_paused"]

_LOCK = threading.Lock()
_INSIDE = 0
_WAS_ON = False


@contextmanager
def gc_paused(*, settled: bool = False) -> Iterator[None]:
    """Pause garbage collection: while much is made that stays, or while freeing a tensor would do harm.

    Threads may overlap; it is on again when the last one leaves.

    Args:
        settled: what exists then counts as old without being scanned, so that no full collection is due next.
    """
    global _INSIDE, _WAS_ON
    with _LOCK:
        if not _INSIDE:
            _WAS_ON = gc.isenabled()
            gc.disable()
        _INSIDE += 1
    try:
        yield
    finally:
        with _LOCK:
            _INSIDE -= 1
            if not _INSIDE and _WAS_ON:
                if settled and not gc.get_freeze_count():
                    gc.freeze()
                    gc.unfreeze()
                gc.enable()

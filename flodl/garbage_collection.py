"""Garbage collection paused, by any number of threads at once, and kept from what is there already.

Decides nothing but that, and that no garbage is sought while a program ends. A program that has switched collection
off finds it off.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["gc_frozen", "gc_paused", "gc_spared_at_exit"]

_WRITERS = frozenset((io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom))
_FILES = _WRITERS | {io.FileIO, io.BufferedReader}
_LOCK = threading.Lock()
_INSIDE: set[int] = set()
_WAS_ON = False
# Whether `gc_frozen` holds now: asking how much is frozen has it counted, twenty milliseconds with torch.
_FROZEN = False


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


def gc_spared_at_exit() -> None:
    """Have this program end without seeking garbage, where nothing that is alive has anything to do at its end.

    An interpreter that ends goes through all objects several times, which with those of torch takes a third of the time
    of importing it, and then the memory goes with the process anyway. Files that are being written are flushed. Where
    any other object has a ``__del__``, or the program is watched (``python -X dev``, ``gc.set_debug``), it ends as
    ever.
    """
    # Registered once, however often it is asked for.
    atexit.unregister(_spare)
    atexit.register(_spare)


def _spare() -> None:
    alive = gc.get_objects()
    ending = {kind for kind in set(map(type, alive)) if any("__del__" in vars(base) for base in kind.__mro__)}
    if not ending <= _FILES or sys.flags.dev_mode or gc.get_debug():
        return
    streams = (sys.stdin, sys.stdout, sys.stderr)  # which an interpreter that ends flushes itself
    flushed = {id(part) for one in streams for part in (one, getattr(one, "buffer", None))}
    for one in [found for found in alive if type(found) in _WRITERS and id(found) not in flushed]:
        with suppress(OSError, ValueError):  # closed, or without a descriptor
            if not stat.S_ISREG(os.fstat(one.fileno()).st_mode):
                return  # a pipe may hold its writer
            one.flush()
    gc.freeze()


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
        if settled and not _FROZEN and not gc.get_freeze_count():
            try:
                gc.freeze()
            finally:
                gc.unfreeze()
        gc.enable()

"""The end of a process without a last garbage collection."""

from __future__ import annotations

import atexit
import gc
import io
import os
import stat
import sys
from contextlib import suppress

__all__ = ["skip_gc_at_exit"]

_WRITERS = frozenset((io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom))
_FILES = _WRITERS | {io.FileIO, io.BufferedReader}


def skip_gc_at_exit() -> None:
    """Let this process exit without a last garbage collection.

    At exit the interpreter visits all objects several times, which takes a third of the import time of torch if torch
    is loaded. Files that are being written are flushed. If any other object has a ``__del__``, or with
    ``python -X dev`` or ``gc.set_debug``, the process exits as usual.
    """
    # One registration, however many calls.
    atexit.unregister(_freeze_all)
    atexit.register(_freeze_all)


def _freeze_all() -> None:
    alive = gc.get_objects()
    ending = {kind for kind in set(map(type, alive)) if any("__del__" in vars(base) for base in kind.__mro__)}
    if not ending <= _FILES or sys.flags.dev_mode or gc.get_debug():
        return
    streams = (sys.stdin, sys.stdout, sys.stderr)  # the interpreter flushes these
    flushed = {id(part) for one in streams for part in (one, getattr(one, "buffer", None))}
    for one in [found for found in alive if type(found) in _WRITERS and id(found) not in flushed]:
        with suppress(OSError, ValueError):  # closed, or without a descriptor
            if not stat.S_ISREG(os.fstat(one.fileno()).st_mode):
                return  # flushing a pipe may block
            one.flush()
    gc.freeze()

"""Memory of the C library that is kept instead of being given back and asked for again.

The tokenizers library makes and frees a million small strings for 20,000 texts, on a thread for each core. glibc grows
the arena of each thread by pages at a time and returns them when they are free, and each such call stops page faults of
every other thread: on a machine of many cores tokenising then takes several times as long beside other work as by
itself. With larger steps, and memory that is kept, nearly all of these calls are gone.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

__all__ = ["keep_memory"]

# Numbers of glibc's mallopt.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_MB = 1 << 20
# What an arena keeps, and by how much it grows; both are address space until it is written to.
_KEPT, _STEP = 512 * _MB, 16 * _MB
# The largest that glibc itself would come to: setting anything stops it from learning.
_MAPPED = 32 * _MB
# Whoever has set one of these has thought about it.
_ASKED = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES")


@cache
def keep_memory() -> bool:
    """Have glibc keep freed memory from now on, in this process; return whether it does.

    False without glibc, and where the environment says how memory is to be kept.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in _ASKED):
        return False
    try:
        library = ctypes.CDLL(None)
        if not hasattr(library, "gnu_get_libc_version"):
            return False
        settings = ((_TRIM_THRESHOLD, _KEPT), (_TOP_PAD, _STEP), (_MMAP_THRESHOLD, _MAPPED))
        found = [library.mallopt(name, value) for name, value in settings]
        return all(value == 1 for value in found)
    except (OSError, AttributeError):
        return False

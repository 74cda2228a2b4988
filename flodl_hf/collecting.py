"""Garbage collection put off while much is made that stays, and kept from looking at what stays anyway.

Decides nothing but that. A program that has switched collection off finds it off.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["passing_over_what_is_here", "without_collecting"]


@contextmanager
def without_collecting() -> Iterator[None]:
    """Put garbage collection off: thousands of new objects, none of them garbage, would set off full sweeps."""
    collecting = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if collecting:
            try:
                _settled()
            finally:
                gc.enable()


def _settled() -> None:
    """Count what is here now as old, without a look at it.

    The sweep that importing torch left due takes a tenth of a second, and would fall into the first answer.
    """
    if not gc.get_freeze_count():
        try:
            gc.freeze()
        finally:
            gc.unfreeze()


@contextmanager
def passing_over_what_is_here() -> Iterator[None]:
    """Have garbage sought among what is made from now on alone: a sweep through all of torch takes a tenth of a second.

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

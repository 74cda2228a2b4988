"""Standard streams as a command may find them: closed, of a small character set, or without room to write.

`opened` is called once, before any command, and `lost` where a write has failed; what is written is decided elsewhere.
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress

__all__ = ["NO_ROOM", "encodable", "lost", "opened"]

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
"""Faults of a write that Python reports without a file's name."""


def opened() -> None:
    """Have closed streams read nothing and write nowhere, and characters that a stream lacks written as escapes.

    A closed stream's number would be given to the next file that is opened, and what is printed would land in it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            taken = os.open(os.devnull, os.O_RDWR)
            if taken != number:
                os.dup2(taken, number)
                os.close(taken)
        if getattr(sys, name) is None:
            mode = "r" if number == 0 else "w"
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        # Others than Python's own, as notebooks and tests put there, know what they take.
        again = getattr(stream, "reconfigure", None)
        if again is not None and stream.errors == "strict":
            again(errors="backslashreplace")


def encodable(text: str) -> bool:
    """Return whether standard output has every character of ``text``."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def lost() -> None:
    """Drop what standard output still holds after a write has failed, so that nothing fails again as Python ends."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)

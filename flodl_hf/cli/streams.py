"""Repair standard streams: closed, with a small character set, or on a full disk.

`opened` is called once, before any command, and `lost` after a failed write; the output is decided elsewhere.
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
"""Faults of a write that Python reports without a file's name."""


def opened() -> None:
    """Replace closed streams with empty ones, and escape characters that a stream cannot encode.

    A closed stream's descriptor would be reused for the next opened file, and printed text would end up in it.
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
        # Streams from notebooks and tests handle their own encoding.
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
    """Discard unwritten standard output after a failed write, so that Python's exit does not fail again."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)

"""The level of messages, one for the process and its child processes.

``FLODL_VERBOSITY`` in the environment sets it (a number or a word), `set_verbosity` changes it, ``flodl-hf -q`` and
``-v`` to ``-vvv`` set it for one command. Errors and warnings are shown at every level.

=======  =================================================================
quiet    results, warnings and errors; no progress
normal   progress of long calls, and messages that users need
verbose  also events of a run: checkpoints, synchronisation of ranks
debug    also metrics of epochs and of each rank
trace    every event of a run, as a line of JSON
=======  =================================================================
"""

from __future__ import annotations

import os
from enum import IntEnum

from flodl.errors import ConfigError, nearest

__all__ = ["set_verbosity"]

VARIABLE = "FLODL_VERBOSITY"


class Verbosity(IntEnum):
    """The levels; each includes those before it."""

    QUIET = 0
    NORMAL = 1
    VERBOSE = 2
    DEBUG = 3
    TRACE = 4


def verbosity() -> Verbosity:
    """Return the current level; `Verbosity.NORMAL` if the environment names none or an invalid one."""
    try:
        return parsed(os.environ.get(VARIABLE, "normal"))
    except ConfigError:
        return Verbosity.NORMAL  # `flodl-hf doctor` reports invalid values


def set_verbosity(level: Verbosity | int | str) -> Verbosity:
    """Set the level, also for future child processes; return the previous one.

    Raises:
        ConfigError: an unknown level.
    """
    found, before = parsed(level), verbosity()
    os.environ[VARIABLE] = found.name.lower()
    return before


def parsed(level: Verbosity | int | str) -> Verbosity:
    """Return the level of a number or a word.

    Raises:
        ConfigError: an unknown level.
    """
    words = [one.name.lower() for one in Verbosity]
    text = str(int(level)) if isinstance(level, int) else level.strip().lower()
    if text in words:
        return Verbosity[text.upper()]
    if text.isdecimal() and int(text) < len(words):
        return Verbosity(int(text))
    raise ConfigError(
        f"verbosity: found {str(level)[:40]!r}{nearest(text, words)}, expected {', '.join(words)}, or 0 to 4",
        problems=[VARIABLE],
    )

"""How much is said beside results: one level for the process and those that it starts.

``FLODL_VERBOSITY`` in the environment sets it (a number or a word), `set_verbosity` changes it, ``flodl-hf -q`` and
``-v`` to ``-vvv`` set it for one command. Errors and warnings are said at every level.

=======  =========================================================================
quiet    nothing but results, warnings and errors; no progress
normal   how far long calls are, and what a user has to know
verbose  what a run does besides: checkpoints, meetings of ranks
debug    figures of epochs that were watched, and of each rank
trace    every event of a run, as a line of JSON
=======  =========================================================================
"""

from __future__ import annotations

import os
from enum import IntEnum

from flodl.errors import ConfigError, nearest

__all__ = ["Verbosity", "parsed", "set_verbosity", "verbosity"]

VARIABLE = "FLODL_VERBOSITY"


class Verbosity(IntEnum):
    """The levels, each of which says what those before it say."""

    QUIET = 0
    NORMAL = 1
    VERBOSE = 2
    DEBUG = 3
    TRACE = 4


def verbosity() -> Verbosity:
    """Return the level of now; `Verbosity.NORMAL` where the environment names none, or none that there is."""
    try:
        return parsed(os.environ.get(VARIABLE, "normal"))
    except ConfigError:
        return Verbosity.NORMAL  # a variable that cannot be read is no reason to fail; `doctor` tells of it


def set_verbosity(level: Verbosity | int | str) -> Verbosity:
    """Set the level, also for processes that are started from now on; return what it was.

    Raises:
        ConfigError: there is no such level.
    """
    found, before = parsed(level), verbosity()
    os.environ[VARIABLE] = found.name.lower()
    return before


def parsed(level: Verbosity | int | str) -> Verbosity:
    """Return the level that a number or a word means.

    Raises:
        ConfigError: there is no such level.
    """
    words = [one.name.lower() for one in Verbosity]
    text = str(int(level)) if isinstance(level, int) else level.strip().lower()
    if text in words:
        return Verbosity[text.upper()]
    if text.isdecimal() and int(text) < len(words):
        return Verbosity(int(text))
    raise ConfigError(
        f"verbosity: found {str(level)[:40]!r}{nearest(text, words)}; expected {', '.join(words)}, or 0 to 4",
        problems=[VARIABLE],
    )

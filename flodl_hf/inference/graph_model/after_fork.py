"""Make models run in a process that was forked after models ran in its parent.

The threads with which torch computes do not live on in a fork, and the first operation there that wants more than one
of them would hang. A fork of a process in which a model ran therefore computes with one thread.
"""

from __future__ import annotations

import os
import warnings

import torch

__all__ = ["entered"]

_ran = False
_slowed = False


def entered() -> None:
    """Note that a model runs in this process, and warn once where the process is a fork of such a one."""
    global _ran, _slowed
    if not _ran:
        _ran = True
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_slow_down)
    if _slowed:
        _slowed = False
        warnings.warn(
            "this process was forked after a model had run in its parent, and torch's threads do not live on in a "
            "fork: it computes with one thread. Start processes by spawn, or fork before the first prediction.",
            stacklevel=4,
        )


def _slow_down() -> None:
    global _slowed
    if torch.get_num_threads() > 1:
        torch.set_num_threads(1)
        _slowed = True

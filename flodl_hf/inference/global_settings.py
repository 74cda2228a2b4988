"""Predictions run as their own options say, whatever the caller's program has switched on around the call.

Autocast and a default device are for code that makes tensors of its own. A prediction inside of them gives what it
gives elsewhere: ``precision`` and ``device`` say how and where it runs, so neither reaches it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch

from flodl.devices import default_device
from flodl_hf.inference.stream import Job

__all__ = ["plainly", "undisturbed"]

T = TypeVar("T")
R = TypeVar("R")

_AUTOCASTS = ("cpu", "cuda", "mps")


def undisturbed(job: Job[T, R]) -> Job[T, R]:
    """Return the job with each of its steps out of the reach of autocast and of a default device."""
    return Job(plainly(job.encode), plainly(job.start), plainly(job.finish), job.join)


def plainly(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the step out of the reach of autocast and of a default device."""

    def run(*given: Any) -> Any:
        # Both belong to a thread, and steps run in several: each looks for itself.
        casts = [kind for kind in _AUTOCASTS if torch.is_autocast_enabled(kind)]
        if not casts and default_device() is None:
            return step(*given)
        with ExitStack() as around:
            for kind in casts:
                around.enter_context(torch.autocast(kind, enabled=False))
            around.enter_context(torch.device("cpu"))
            return step(*given)

    return run

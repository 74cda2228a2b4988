"""How long a device takes for a step, asked one step late, so that the device always has the next one to do.

A rank that waits for each step before it sends the next leaves its device idle in between: a few per cent of a step
of 20 ms. Ranks that step on their own need the time of steps all the same, to share out work by it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

__all__ = ["StepTimes"]


class StepTimes:
    """Times of steps, each known when the next one has been sent.

    Args:
        device: a CUDA device.
        event: makes an event that notes the time, as `torch.cuda.Event` does, which it stands in for.
    """

    def __init__(self, device: torch.device, event: Callable[[], Any] | None = None) -> None:
        self.device = device
        self._event = event or partial(torch.cuda.Event, enable_timing=True)
        self._start: Any = None
        self._before: tuple[Any, Any] | None = None

    def begin(self) -> None:
        """Note that a step is about to be sent."""
        self._start = self._event()
        self._start.record()

    def end(self) -> float:
        """Return the milliseconds of the step before the one that was just sent; the first waits for itself."""
        assert self._start is not None
        end = self._event()
        end.record()
        sent = (self._start, end)
        known, self._before = self._before or sent, sent
        known[1].synchronize()
        return known[0].elapsed_time(known[1])

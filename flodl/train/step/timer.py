"""Compute time of steps, measured by the host or, on CUDA, between events of the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch


class StepTimer:
    """Measure the compute time of steps, and slow a rank down for experiments.

    On CUDA the time between two events counts, because the host runs ahead of the device. A slowed rank waits for its
    device, so the clock of the host measures it.

    Args:
        device: the device that computes.
        slowdown: factor by which the measured time is stretched by sleeping.
        event: creates a timing event; `torch.cuda.Event` by default.

    Attributes:
        is_plain: True if the time of the host's clock counts, without a slowdown.
        ms: milliseconds measured by the host's clock since the last `take`.
    """

    def __init__(self, device: torch.device, *, slowdown: float = 1.0, event: Callable[[], Any] | None = None) -> None:
        self.device, self.slowdown = device, slowdown
        self._cuda = device.type == "cuda"
        self._events = self._cuda and slowdown <= 1
        self.is_plain = not self._cuda and slowdown <= 1
        self._event = event or partial(torch.cuda.Event, enable_timing=True)
        self._spans: list[tuple[Any, Any]] = []
        self._previous: list[tuple[Any, Any]] = []
        self.ms = self._start = 0.0
        self._mark: Any = None

    def __enter__(self) -> None:
        """Start to measure."""
        if self._events:
            self._mark = self._event()
            self._mark.record()
            return
        if self._cuda:
            torch.cuda.synchronize(self.device)
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        """Add the time since `__enter__`; with the slowdown unless an error or another object is given."""
        if self._events:
            end = self._event()
            end.record()
            self._spans.append((self._mark, end))
            return
        if self._cuda:
            torch.cuda.synchronize(self.device)
        spent = time.perf_counter() - self._start
        if self.slowdown > 1 and not any(error):
            time.sleep(spent * (self.slowdown - 1))
            spent *= self.slowdown
        self.ms += spent * 1e3

    def take(self) -> float:
        """Return the milliseconds measured since the last call; waits for the device."""
        ms, spans, self.ms, self._spans = self.ms, self._spans, 0.0, []
        return ms + _ms_of(spans) if spans else ms

    def take_previous(self) -> float:
        """Return the milliseconds of the step before, so that the device always has a next step; the first waits."""
        sent, self._spans = self._spans, []
        known, self._previous = self._previous or sent, sent
        return _ms_of(known)


def _ms_of(spans: list[tuple[Any, Any]]) -> float:
    spans[-1][1].synchronize()
    return sum(start.elapsed_time(end) for start, end in spans)

"""Sums over ranks that begin during the backward pass, if both are captured.

Each bucket of gradients has an event that the backward pass records when the bucket is full, and for which its sum
waits. These events are nodes of the captured graphs, so the end of a step can be launched while the backward pass runs,
on a second stream. A trial verifies that the driver orders captured graphs by events before a run relies on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import torch

from flodl.distributed.group import Ranks
from flodl.distributed.peer_memory import peer_access_error

__all__ = ["Overlap", "choose_overlap", "fault_of"]

T = TypeVar("T")
PATIENCE_S = 20.0


class Overlap:
    """Launch the end of a step while this rank's part of it runs.

    Args:
        device: a CUDA device.
        fault: why the ranks cannot use peer memory; None if they can.
    """

    def __init__(self, device: torch.device, fault: str | None) -> None:
        self.device, self.fault = device, fault
        self._side = torch.cuda.Stream(device)
        self._end = self.event()

    def event(self) -> Any:
        """Return an event that captured graphs can record and wait for."""
        return torch.cuda.Event(external=True)

    def mark_end(self) -> None:
        """Record that all of this rank's part was launched."""
        self._end.record()

    def wait_for_end(self) -> None:
        """Make later launches wait for all of this rank's part."""
        self._end.wait()

    def beside(self, replay: Callable[[], T]) -> T:
        """Launch ``replay`` on a second stream and return its result; later launches wait for it."""
        current = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._side):
            found = replay()
        current.wait_stream(self._side)
        return found


def choose_overlap(ranks: Ranks, fault: str | None) -> Overlap | str:
    """Return the overlap of sums with the backward pass, or why a rank does not support it; the same on all ranks.

    Args:
        fault: result of `fault_of` for this rank's device.
    """
    faults = "; ".join(f"rank {rank}: {told}" for rank, told in enumerate(ranks.gather(fault)) if told is not None)
    return faults or Overlap(ranks.device, peer_access_error(ranks))


@lru_cache(maxsize=8)
def fault_of(device: torch.device) -> str | None:
    """Return why events cannot order captured graphs on the device; None if a trial succeeded."""
    try:
        return _tried(device)
    except Exception as error:  # drivers and versions of torch fail in many ways
        return f"{type(error).__name__}: {error}"


def _tried(device: torch.device) -> str | None:
    """Let one captured graph wait for an event in the middle of another, slow one."""
    with torch.cuda.device(device):
        mark = torch.cuda.Event(external=True)
        source, target = (torch.zeros(1, device=device) for _ in range(2))
        streams = [torch.cuda.Stream(device) for _ in range(2)]

        def produce() -> None:
            torch.cuda._sleep(20_000_000)  # about 10 ms
            source.add_(1)
            mark.record()

        def consume() -> None:
            mark.wait()
            target.copy_(source)

        graphs = []
        for work, stream in zip((produce, consume), streams, strict=True):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                work()
            graphs.append(graph)
        for turn, make in enumerate((graphs[0].replay, produce, graphs[0].replay), start=1):
            with torch.cuda.stream(streams[0]):
                make()
            done = torch.cuda.Event()
            with torch.cuda.stream(streams[1]):
                graphs[1].replay()
                done.record()
            until = time.monotonic() + PATIENCE_S
            while not done.query():
                if time.monotonic() > until:
                    return "a captured graph waits for an event that never occurs"
                time.sleep(0.0005)
            if target.item() != turn:
                return "a captured graph does not wait for an event of another"
            torch.cuda.synchronize(device)
    return None

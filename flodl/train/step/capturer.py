"""Capture of functions as CUDA graphs, and the state of the host that a capture must not change."""

from __future__ import annotations

import contextlib
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch

from flodl.distributed.group import Ranks
from flodl.garbage_collection import gc_paused
from flodl.train.step.outcome import Outcome
from flodl.train.step.overlap import Overlap, choose_overlap, fault_of

__all__ = ["Capturer", "CudaCapturer", "HostRandom", "Refused", "Run", "translations"]

Run = Callable[[], Outcome]


class Refused(Exception):
    """A step cannot be captured; the text is the reason."""


class Capturer(Protocol):
    """Observes ordinary runs and captures steps."""

    def watch(self, run: Run) -> tuple[Outcome, str | None]:
        """Run an ordinary step; return its outcome, and the operation that a graph cannot contain, or None."""
        ...

    def capture(self, run: Run) -> Run:
        """Return a function that repeats on the device what ``run`` does.

        Raises:
            Exception: the run cannot be captured; nothing has changed.
        """
        ...

    def beside(self, ranks: Ranks) -> tuple[Capturer, Overlap | str]:
        """Return a capturer for the end of a shared step, and the overlap of that end with the rest or why not."""
        ...


class CudaCapturer:
    """Capture CUDA graphs that share one pool of memory, because they are replayed one after the other.

    Args:
        device: a CUDA device.
        tune: let cuDNN time its algorithms for each shape, which pays for repeated shapes.
    """

    def __init__(self, device: torch.device, *, tune: bool = True) -> None:
        self.device, self.tune = device, tune
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def watch(self, run: Callable[[], Outcome]) -> tuple[Outcome, str | None]:
        """Run a step on the stream of captures; return its outcome, and where it waited for the device or None."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as seen, self._tuned(), torch.cuda.stream(self._stream):
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                outcome = run()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        current.wait_stream(self._stream)
        outcome.row.record_stream(current)
        waits = [w for w in seen if "synchronizing CUDA operation" in str(w.message)]
        for other in seen:
            if other not in waits and "debug mode is a prototype" not in str(other.message):
                warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)
        if not waits:
            return outcome, None
        return outcome, f"it synchronises with the device at {waits[0].filename}:{waits[0].lineno}"

    def capture(self, run: Callable[[], Outcome]) -> Callable[[], Outcome]:
        """Return the replay of a new CUDA graph."""
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self.device)
        generator = torch.cuda.default_generators[self.device.index or 0]
        kept = generator.clone_state()
        try:
            # Other threads copy batches and allocate meanwhile; the rules of capture apply to this thread only.
            with (
                self._tuned(),
                gc_paused(),  # freeing an older graph would break the capture
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                outcome = run()
        except BaseException:
            torch.cuda.set_stream(current)
            with contextlib.suppress(Exception):
                # A failed capture may leave its allocations open, and memory would never be freed.
                torch._C._cuda_endAllocateToPool(self.device.index or 0, self._pool)  # pyright: ignore
            generator.graphsafe_set_state(kept)
            raise

        def replay() -> Outcome:
            graph.replay()
            return outcome

        return replay

    def beside(self, ranks: Ranks) -> tuple[CudaCapturer, Overlap | str]:
        """Return a capturer with a separate pool of memory, so that its graphs may run simultaneously with these."""
        overlap = choose_overlap(ranks, fault_of(self.device))
        return (self if isinstance(overlap, str) else CudaCapturer(self.device, tune=self.tune)), overlap

    @contextlib.contextmanager
    def _tuned(self) -> Iterator[None]:
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = before or self.tune
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before


class HostRandom:
    """Random states of the host, as they were when this object was created."""

    def __init__(self) -> None:
        self._torch, self._numpy, self._python = torch.get_rng_state(), np.random.get_state(), random.getstate()

    def changed(self) -> bool:
        """Return True if a random number was drawn since."""
        numpy = zip(self._numpy, np.random.get_state(), strict=True)
        same = torch.equal(self._torch, torch.get_rng_state()) and self._python == random.getstate()
        return not (same and all(np.array_equal(a, b) for a, b in numpy))

    def restore(self) -> None:
        """Restore the states."""
        torch.set_rng_state(self._torch)
        np.random.set_state(self._numpy)
        random.setstate(self._python)


def translations() -> tuple[int, int]:
    """Return the numbers of functions and graphs that ``torch.compile`` has translated."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0, 0
    return dynamo.counters["frames"]["total"], dynamo.counters["stats"]["unique_graphs"]

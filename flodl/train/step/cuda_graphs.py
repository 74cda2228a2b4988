"""CUDA graphs of steps: their capture, and sums over ranks that begin during the backward pass.

Each bucket of gradients has an event that the backward pass records when the bucket is full, and for which its sum
waits. These events are nodes of the captured graphs, so the end of a step can be launched while the backward pass runs,
on a second stream. A trial verifies that the driver orders captured graphs by events before a run relies on it.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch

from flodl.distributed.group import Ranks
from flodl.distributed.peer_memory import peer_access_error
from flodl.garbage_collection import gc_paused
from flodl.train.step.outcome import Outcome

Run = Callable[[], Outcome]
PATIENCE_S = 20.0


class CudaCapturer:
    """Observe ordinary runs, and capture CUDA graphs that share one pool of memory.

    The graphs are replayed one after the other.

    Args:
        device: a CUDA device.
        tune: let cuDNN time its algorithms for each shape, which pays for repeated shapes.
    """

    def __init__(self, device: torch.device, *, tune: bool = True) -> None:
        self.device, self.tune = device, tune
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def watch(self, run: Run) -> tuple[Outcome, str | None]:
        """Run an ordinary step; return its outcome, and the operation that a graph cannot contain, or None."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        mode = torch.cuda.get_sync_debug_mode()
        seen: list[tuple[int, Any]] = []

        def note(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
            seen.append((threading.get_ident(), warnings.WarningMessage(message, category, filename, lineno)))

        with warnings.catch_warnings(), self._tuned(), torch.cuda.stream(self._stream):
            warnings.simplefilter("always")
            warnings.showwarning = note
            torch.cuda.set_sync_debug_mode("warn")
            try:
                outcome = run()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        current.wait_stream(self._stream)
        outcome.row.record_stream(current)
        waits = []
        for thread, one in seen:
            if "synchronizing CUDA operation" in str(one.message):
                # Other threads, such as those that write checkpoints, may wait.
                waits += [one] if thread == threading.get_ident() else []
            elif "debug mode is a prototype" not in str(one.message):
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        fault = f"it synchronises with the device at {waits[0].filename}:{waits[0].lineno}" if waits else None
        return outcome, fault

    def capture(self, run: Run) -> Run:
        """Return a function that repeats on the device what ``run`` does; errors mean that it cannot be captured."""
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
        """Return a capturer for the end of a shared step, and the overlap of that end with the rest, or why not.

        Its pool of memory is a separate one if its graphs run simultaneously with these.
        """
        told = enumerate(ranks.gather(fault_of(self.device)))
        faults = "; ".join(f"rank {rank}: {fault}" for rank, fault in told if fault is not None)
        if faults:
            return self, faults
        return CudaCapturer(self.device, tune=self.tune), Overlap(self.device, peer_access_error(ranks))

    @contextlib.contextmanager
    def _tuned(self) -> Iterator[None]:
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = before or self.tune
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before


class Overlap:
    """Launch the end of a step while this rank's part of it runs.

    Args:
        device: a CUDA device.
        fault: why the ranks cannot use peer memory; None if they can.

    Attributes:
        end: event after all of this rank's part, for which the end of the step waits.
    """

    def __init__(self, device: torch.device, fault: str | None) -> None:
        self.device, self.fault = device, fault
        self._side = torch.cuda.Stream(device)
        self.end = self.event()

    def event(self) -> Any:
        """Return an event that captured graphs can record and wait for."""
        return torch.cuda.Event(external=True)

    def beside(self, replay: Run) -> Outcome:
        """Launch ``replay`` on a second stream and return its result; later launches wait for it."""
        current = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._side):
            found = replay()
        current.wait_stream(self._side)
        return found


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
            with torch.cuda.stream(streams[1]):
                graphs[1].replay()
            done = streams[1].record_event()
            until = time.monotonic() + PATIENCE_S
            while not done.query():
                if time.monotonic() > until:
                    return "a captured graph waits for an event that never occurs"
                time.sleep(0.0005)
            if target.item() != turn:
                return "a captured graph does not wait for an event of another"
            torch.cuda.synchronize(device)
    return None

"""Batches prefetched by one background thread, and their copies to a CUDA device."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from time import monotonic
from typing import Any

import torch

from flodl.data.batch import Batch, lay_out

CLOSE_S = 5.0
"""How long `Stream.close` and the end of the program wait for a batch that is being made."""


class Placement:
    """Moves batches to a device, on CUDA from page-locked memory on a separate stream.

    Args:
        device: target device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, batch: Batch) -> tuple[Batch, torch.cuda.Event | None]:
        """Start to copy a batch to the device. Return it with the event of the finished copy."""
        if self._copies is None:
            return (batch if self.device.type == "cpu" else batch.to(self.device)), None
        piece = lay_out(batch.items(), pinned=True)
        host = batch.pin_memory() if piece is None else batch
        with torch.cuda.device(self.device):
            # `with torch.cuda.stream` queries the driver for its devices each time, which takes as long as the copy.
            before = torch.cuda.current_stream(self.device)
            torch.cuda.set_stream(self._copies)
            try:
                # The host allocator reuses page-locked blocks only after the copies from them are complete.
                if piece is None:
                    sent = host.to(self.device, non_blocking=True)
                else:
                    sent = batch.over(piece.at(piece.memory.to(self.device, non_blocking=True)))
                event = torch.cuda.Event()
                event.record(self._copies)
                return sent, event
            except torch.OutOfMemoryError:
                # The consumer copies this batch later, after earlier batches have released their memory.
                return host, None
            finally:
                torch.cuda.set_stream(before)

    def receive(self, batch: Batch, event: torch.cuda.Event | None) -> Batch:
        """Return the batch ready for use on the caller's current stream."""
        if event is None:
            return batch if self.device.type == "cpu" else batch.to(self.device)
        current = torch.cuda.current_stream(self.device)
        current.wait_event(event)
        if batch.piece is not None:
            batch.piece.memory.record_stream(current)
            return batch
        for part in batch:
            if isinstance(part, torch.Tensor) and part.is_cuda:
                part.record_stream(current)
        return batch


class Stream:
    """Iterator over batches that a background thread prefetches.

    Dropping the last reference, or :meth:`close`, stops the worker after its current batch. An error in the worker is
    raised from ``next()`` after the batches that precede it.

    Args:
        make: returns batch ``k``; runs in the worker.
        numbers: the batches, in order.
        depth: batches that are ready or being made.
        placement: moves the batches to the device.
    """

    def __init__(self, make: Callable[[int], Batch], numbers: Iterable[int], depth: int, placement: Placement) -> None:
        self._placement = placement
        self._made: SimpleQueue[Any] = SimpleQueue()
        self._free, stopped = threading.Semaphore(depth), threading.Event()
        # The worker does not refer to this object, so that dropping this object ends the worker. It is a daemon,
        # because the data of the user may block it forever.
        args = (make, numbers, placement, self._made, self._free, stopped)
        self._worker = threading.Thread(target=_work, args=args, name="flodl-data", daemon=True)
        self._stop = _workers[self._worker] = weakref.finalize(self, _stop, self._free, stopped)
        self._worker.start()

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Batch:
        made, error = self._made.get()
        if error is not None:
            self.close()
            raise error
        self._free.release()
        return self._placement.receive(*made)

    def close(self) -> None:
        """Stop the worker and wait for its current batch, at most `CLOSE_S` seconds."""
        self._stop()
        self._worker.join(CLOSE_S)
        self._made = SimpleQueue()
        self._made.put((None, StopIteration()))


_workers: weakref.WeakKeyDictionary[threading.Thread, Callable[[], Any]] = weakref.WeakKeyDictionary()
"""Each worker and the function that stops it."""


@atexit.register
def _stop_all() -> None:
    # Python aborts if its end interrupts a thread inside of torch.
    end, found = monotonic() + CLOSE_S, list(_workers.items())
    for _, stop in found:
        stop()
    for worker, _ in found:
        worker.join(max(0.0, end - monotonic()))


def _stop(free: threading.Semaphore, stopped: threading.Event) -> None:
    stopped.set()
    free.release()


def _work(
    make: Callable[[int], Batch],
    numbers: Iterable[int],
    placement: Placement,
    made: SimpleQueue[Any],
    free: threading.Semaphore,
    stopped: threading.Event,
) -> None:
    try:
        for number in numbers:
            free.acquire()
            if stopped.is_set():
                return
            made.put((placement.send(make(number)), None))
        made.put((None, StopIteration()))
    except BaseException as error:  # the consumer raises every error
        made.put((None, error))

"""Batches prefetched by one background thread, and their copies to a CUDA device."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

import torch

from flodl.data.batch import Batch
from flodl.data.piece import lay_out


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
        # The worker does not refer to this object, so that dropping this object ends the worker.
        self._make = lambda number: placement.send(make(number))
        self._numbers = iter(numbers)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="flodl-data")
        weakref.finalize(self, self._worker.shutdown, wait=False, cancel_futures=True)
        self._batches: deque[Future[Any]] = deque()
        self._request(depth)

    def _request(self, count: int) -> None:
        for number in islice(self._numbers, count):
            self._batches.append(self._worker.submit(self._make, number))

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Batch:
        if not self._batches:
            raise StopIteration
        try:
            made = self._batches.popleft().result()
        except BaseException:
            self.close()
            raise
        self._request(1)
        return self._placement.receive(*made)

    def close(self) -> None:
        """Stop the worker and wait for it."""
        self._batches.clear()
        self._numbers = iter(())
        self._worker.shutdown(wait=True, cancel_futures=True)

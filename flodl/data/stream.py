"""Batches prefetched by one background thread through one bounded queue, and their copies to a CUDA device."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from flodl.data.batch import Batch
from flodl.data.piece import lay_out


class Channel:
    """Bounded queue that either side can close. Closing wakes every waiting thread."""

    def __init__(self, depth: int) -> None:
        self.depth = max(1, depth)
        self._items: deque[Any] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, item: Any) -> bool:
        """Wait for space and add ``item``. Return False if the channel was closed instead."""
        with self._changed:
            if self._wait_for_space():
                self._items.append(item)
                self._changed.notify_all()
            return not self._closed

    def take(self) -> Any:
        """Return the next item, or None if the channel is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._items))
            item = self._items.popleft() if self._items else None
            self._changed.notify_all()
            return item

    def wait_for_space(self) -> bool:
        """Wait for space. Return False if the channel was closed instead."""
        with self._changed:
            return self._wait_for_space()

    def _wait_for_space(self) -> bool:
        self._changed.wait_for(lambda: self._closed or len(self._items) < self.depth)
        return not self._closed

    def finish(self) -> None:
        """Close the channel for writing. Queued items remain readable."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Close the channel and discard queued items."""
        with self._changed:
            self._items.clear()
            self.finish()


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


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error


class Stream:
    """Iterator over batches that a background thread prefetches.

    Dropping the last reference, or :meth:`close`, stops the worker after its current batch. An error in the worker is
    raised from ``next()`` after the batches that precede it.

    Args:
        make: returns batch ``k``; runs in the worker.
        numbers: the batches, in order.
        depth: batches in the queue.
        placement: moves the batches to the device.
    """

    def __init__(self, make: Callable[[int], Batch], numbers: Iterable[int], depth: int, placement: Placement) -> None:
        self._channel = Channel(depth)
        self._placement = placement
        self._worker = threading.Thread(
            target=_work, args=(make, numbers, self._channel, placement), name="flodl-data", daemon=True
        )
        # The worker refers to the channel and not to this object, so that dropping this object ends the worker.
        self._dropped = weakref.finalize(self, self._channel.close)
        self._worker.start()

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Batch:
        item = self._channel.take()
        if item is None:
            raise StopIteration
        if isinstance(item, _Failure):
            self.close()
            raise item.error
        return self._placement.receive(*item)

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop the worker and wait for it, at most ``timeout_s`` seconds."""
        self._dropped()
        if threading.current_thread() is not self._worker:
            self._worker.join(timeout_s)


def _work(make: Callable[[int], Batch], numbers: Iterable[int], channel: Channel, placement: Placement) -> None:
    try:
        for number in numbers:
            # Waiting before the batch is made limits the number of batches to `depth` and the one in use.
            if not channel.wait_for_space() or not channel.put(placement.send(make(number))):
                return
    except BaseException as error:  # The consumer handles every error, also KeyboardInterrupt.
        channel.put(_Failure(error))
    channel.finish()

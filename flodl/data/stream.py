"""Batches made ahead of their use: one background thread, one bounded queue, one way out.

This file decides when the worker runs, waits and stops, how its errors reach the consumer, and how a batch
crosses to a CUDA device beside the computation. It does not know what a batch holds or where an epoch stands.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from flodl.data.batch import Batch
from flodl.data.piece import lay_out

__all__ = ["Channel", "Placement", "Stream"]


class Channel:
    """A bounded queue that either side may close; whoever waits then wakes."""

    def __init__(self, depth: int) -> None:
        self.depth = max(1, depth)
        self._items: deque[Any] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, item: Any) -> bool:
        """Add ``item`` when there is room; return False if the channel was closed instead."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self.depth)
            if not self._closed:
                self._items.append(item)
                self._changed.notify_all()
            return not self._closed

    def take(self) -> Any:
        """Return the next item; None once the channel is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._items))
            item = self._items.popleft() if self._items else None
            self._changed.notify_all()
            return item

    def wait_for_room(self) -> bool:
        """Return True when there is room, False if the channel was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self.depth)
            return not self._closed

    def finish(self) -> None:
        """Close for writing; what is there may still be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Close and throw away what is there."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()


class Placement:
    """Carries batches to a device; on CUDA through page-locked memory and a copy stream of its own.

    Args:
        device: where batches are wanted.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, batch: Batch) -> tuple[Batch, torch.cuda.Event | None]:
        """Return the batch on its way to the device, and the event that says when it is there."""
        if self._copies is None:
            return (batch if self.device.type == "cpu" else batch.to(self.device)), None
        piece = lay_out(batch.items(), pinned=True)
        host = batch.pin_memory() if piece is None else batch
        with torch.cuda.device(self.device):
            # Not a `with torch.cuda.stream`, which asks the driver for its devices each time, as slow as the copy.
            before = torch.cuda.current_stream(self.device)
            torch.cuda.set_stream(self._copies)
            try:
                # the host allocator keeps page-locked blocks until copies from them are done
                if piece is None:
                    sent = host.to(self.device, non_blocking=True)
                else:
                    sent = batch.over(piece.at(piece.memory.to(self.device, non_blocking=True)))
                event = torch.cuda.Event()
                event.record(self._copies)
                return sent, event
            except torch.OutOfMemoryError:
                # too far ahead for this moment; the consumer copies when it gets there, with earlier batches gone
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
    """An iterator over batches that a background thread makes ahead.

    Dropping the last reference, or :meth:`close`, stops the worker after the batch it is at. An error in
    the worker is raised from ``next()`` in its turn, after the batches made before it.

    Args:
        make: gives batch ``k``; runs in the worker.
        numbers: which batches, in order.
        depth: batches held ready.
        placement: carries them to the device.
    """

    def __init__(self, make: Callable[[int], Batch], numbers: Iterable[int], depth: int, placement: Placement) -> None:
        self._channel = Channel(depth)
        self._placement = placement
        self._worker = threading.Thread(
            target=_work, args=(make, numbers, self._channel, placement), name="flodl-data", daemon=True
        )
        # the worker holds the channel, not this object, so that dropping this object ends the worker
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

    @property
    def is_alive(self) -> bool:
        """Return whether the worker still runs."""
        return self._worker.is_alive()

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop the worker and wait for it, at most ``timeout_s`` seconds."""
        self._dropped()
        if threading.current_thread() is not self._worker:
            self._worker.join(timeout_s)


def _work(make: Callable[[int], Batch], numbers: Iterable[int], channel: Channel, placement: Placement) -> None:
    try:
        for number in numbers:
            # room first, so that no more than `depth` batches exist beside the one in use
            if not channel.wait_for_room() or not channel.put(placement.send(make(number))):
                return
    except BaseException as error:  # the consumer decides what to do with it, KeyboardInterrupt included
        channel.put(_Failure(error))
    channel.finish()

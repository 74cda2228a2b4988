"""Counters of current requests by API key, in memory of one process or shared by several.

Each process writes only its own cells and reads all, without locks, so a stopped process blocks no other; the cells of
a killed process are cleared (`SharedCounters.clear`). A process sees its own writes only after the others can see them,
so of two processes that count themselves and then read, at least one sees the other. The token buckets of keys are
common to all processes and protected by a system lock (`SharedCounters.exclusive_lock`).
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import Lock

from flodl_hf.checkpoints.system import process_lock

_SIZE = 8


class SharedCounters:
    """Counters of all processes.

    Args:
        keys: identifiers of all API keys.
        processes: number of processes.
        number: index of this process.
        descriptor: file descriptor of shared memory (`shared_memory`); None uses memory of this process.
    """

    def __init__(
        self, keys: Sequence[str] = ("",), processes: int = 1, number: int = 0, descriptor: int | None = None
    ) -> None:
        self._places = {key: place for place, key in enumerate(keys)}
        self._number = number
        cells = cells_of(len(keys), processes)
        memory = bytearray(cells * _SIZE) if descriptor is None else mmap.mmap(descriptor, cells * _SIZE)
        whole, times = memoryview(memory).cast("q"), memoryview(memory).cast("d")
        rows = [whole[at : at + processes] for at in range(0, (3 + 2 * len(keys)) * processes, processes)]
        self._inside, self._tokens, self._closed = rows[:3]
        self._of_key, self._tokens_of_key = rows[3 : 3 + len(keys)], rows[3 + len(keys) :]
        self._rows = rows
        self._times = times[len(rows) * processes :]
        self._descriptor = descriptor
        self._fence = Lock()
        if descriptor is None:
            self.calm = time.monotonic()

    @property
    def inside(self) -> int:
        """Number of current requests."""
        return sum(self._inside)

    @property
    def tokens(self) -> int:
        """Estimated tokens of the current requests."""
        return sum(self._tokens)

    @property
    def calm(self) -> float:
        """When the queue was short for the last time, by ``time.monotonic``, which all processes of a host share."""
        return self._times[0]

    @calm.setter
    def calm(self, now: float) -> None:
        """Last time of a short queue, by ``time.monotonic``, which all processes of a host share."""
        self._times[0] = now

    def of_key(self, key: str) -> int:
        """Return the number of current requests of a key."""
        return sum(self._of_key[self._places[key]])

    def tokens_of_key(self, key: str) -> int:
        """Return the estimated tokens of the current requests of a key."""
        return sum(self._tokens_of_key[self._places[key]])

    def tokens_of_others(self, key: str) -> Iterator[int]:
        """Yield the tokens of each other key that has current requests."""
        mine = self._places[key]
        for place, row in enumerate(self._tokens_of_key):
            if place != mine and (tokens := sum(row)):
                yield tokens

    def count(self, key: str, requests: int, tokens: int) -> None:
        """Add to the counters of this process."""
        me, place = self._number, self._places[key]
        self._inside[me] += requests
        self._tokens[me] += tokens
        self._of_key[place][me] += requests
        self._tokens_of_key[place][me] += tokens
        if self._descriptor is not None:
            # Processors may reorder a read before an earlier write, but not across a lock instruction.
            with self._fence:
                pass

    def exclusive_lock(self) -> AbstractContextManager[None]:
        """Return a cross-process lock."""
        return nullcontext() if self._descriptor is None else process_lock(self._descriptor)

    def whole_at(self, key: str) -> float:
        """Return the time at which a key's token bucket is full, by ``time.monotonic``."""
        return self._times[1 + self._places[key]]

    def spend(self, key: str, whole_at: float) -> None:
        """Set the time at which a key's token bucket is full."""
        self._times[1 + self._places[key]] = whole_at

    def close(self) -> None:
        """Count a closed connection of this process."""
        self._closed[self._number] += 1

    def closed(self, number: int) -> int:
        """Return the number of closed connections of a process."""
        return self._closed[number]

    def clear(self, number: int) -> None:
        """Set the counters of an ended process to 0."""
        for row in self._rows:
            row[number] = 0


def cells_of(keys: int, processes: int) -> int:
    """Return the number of cells of the shared memory."""
    return (3 + 2 * keys) * processes + 1 + keys


def shared_memory(keys: int, processes: int) -> int:
    """Return the file descriptor of shared memory, which is freed with the last process that uses it.

    Args:
        keys: number of API keys.
        processes: number of processes.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("flodl-hf")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.truncate(descriptor, cells_of(keys, processes) * _SIZE)
    return descriptor

"""What is inside a server at the moment, by key, in memory that several processes share, or one has for itself.

Each process writes its own numbers and reads everybody's, without a lock: a process that stops in the middle of it
keeps nobody waiting, and what one had that was killed is struck out (`Ledger.clear`). What a process wrote is there for
the others before it reads theirs, so who counts itself and then looks is seen by whom it does not see. What a key had
of its tokens is one number for all, which is changed under a lock of the system's (`Ledger.alone`).
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

__all__ = ["Ledger", "shared_memory"]

_SIZE = 8


class Ledger:
    """Numbers of all processes.

    Args:
        keys: words of all keys that there are.
        processes: how many processes there are.
        number: which of them this is.
        descriptor: of the memory that they share (`shared_memory`); None is memory of this process.
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
        """Requests that are being answered."""
        return sum(self._inside)

    @property
    def tokens(self) -> int:
        """Tokens of those, about."""
        return sum(self._tokens)

    @property
    def calm(self) -> float:
        """When the queue was short for the last time, by ``time.monotonic``, which all processes of a host share."""
        return self._times[0]

    @calm.setter
    def calm(self, now: float) -> None:
        self._times[0] = now

    def of_key(self, key: str) -> int:
        """Return how many requests of a key are inside."""
        return sum(self._of_key[self._places[key]])

    def tokens_of_key(self, key: str) -> int:
        """Return how many tokens those have, about."""
        return sum(self._tokens_of_key[self._places[key]])

    def tokens_of_others(self, key: str) -> Iterator[int]:
        """Yield how many tokens each other key has that has any."""
        mine = self._places[key]
        for place, row in enumerate(self._tokens_of_key):
            if place != mine and (tokens := sum(row)):
                yield tokens

    def count(self, key: str, requests: int, tokens: int) -> None:
        """Note that requests came in to this process, or went."""
        me, place = self._number, self._places[key]
        self._inside[me] += requests
        self._tokens[me] += tokens
        self._of_key[place][me] += requests
        self._tokens_of_key[place][me] += tokens
        if self._descriptor is not None:
            # A processor may read before it has written, but not across the instruction that takes a lock.
            with self._fence:
                pass

    def alone(self) -> AbstractContextManager[None]:
        """Return a context in which no other process is that asks for this too."""
        return nullcontext() if self._descriptor is None else process_lock(self._descriptor)

    def whole_at(self, key: str) -> float:
        """Return when a key has all back that it may have in a minute, by ``time.monotonic``."""
        return self._times[1 + self._places[key]]

    def spend(self, key: str, whole_at: float) -> None:
        """Note when it has all back."""
        self._times[1 + self._places[key]] = whole_at

    def close(self) -> None:
        """Note that a connection of this process has ended."""
        self._closed[self._number] += 1

    def closed(self, number: int) -> int:
        """Return how many connections of a process have ended."""
        return self._closed[number]

    def clear(self, number: int) -> None:
        """Strike out what a process had that is no more."""
        for row in self._rows:
            row[number] = 0


def cells_of(keys: int, processes: int) -> int:
    """Return how many numbers a ledger has."""
    return (3 + 2 * keys) * processes + 1 + keys


def shared_memory(keys: int, processes: int) -> int:
    """Return the descriptor of memory for a ledger that several processes share; it goes with the last of them.

    Args:
        keys: how many there are.
        processes: likewise.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("flodl-hf")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.truncate(descriptor, cells_of(keys, processes) * _SIZE)
    return descriptor

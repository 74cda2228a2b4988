"""Admission of requests: limits and overload. Refusals are immediate and contain a time to retry.

Tokens are estimated from characters before tokenization. The waiting time is estimated from the speed of full batches,
for each API key from the queue before it: keys take turns, so a key waits for no more tokens of another key than it has
itself.

A short burst may fill the queue up to ``max_queue_s``; a lasting queue is limited to ``max_wait_s``, because it delays
all requests without raising the throughput (Nichols and Jacobson 2012).
"""

from __future__ import annotations

import hashlib
import hmac
import math
import mmap
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from threading import Lock
from typing import Any

from flodl_hf.checkpoints.system import process_lock
from flodl_hf.serving.responses import RefusedError
from flodl_hf.serving.settings import Settings

# Initial estimate for English word pieces; measurements replace it.
CHARACTERS_PER_TOKEN = 4.0
# The queue is overloaded if it has not fallen below this share of its limit for this time.
LOAD_THRESHOLD, OVERLOAD_GRACE_S = 0.25, 1.0
# Batches that keep a device busy; a queue of fewer requests than MIN_QUEUE is not overloaded.
BUSY_BATCHES, MIN_QUEUE = 4, 8


def key_id(keys: Sequence[str], token: str | None) -> str | None:
    """Return an identifier of the client's API key, or None if the key is not accepted.

    All keys are compared, each in constant time.
    """
    if not keys:
        return ""
    digest = hashlib.sha256((token or "").encode()).digest()
    found = None
    for key in keys:
        known = hashlib.sha256(key.encode()).digest()
        if hmac.compare_digest(known, digest):
            found = known.hex()[:12]
    return found


def key_ids(keys: Sequence[str]) -> list[str]:
    """Return the distinct identifiers of all accepted keys."""
    return list(dict.fromkeys(key_id(keys, key) or "" for key in keys)) or [""]


def count_characters(items: Any) -> int:
    """Return the number of characters of some texts; token ids count as CHARACTERS_PER_TOKEN characters."""
    if isinstance(items, str):
        return len(items)
    if isinstance(items, list):
        if set(map(type, items)) == {str}:
            return sum(map(len, items))
        if items and isinstance(items[0], int):
            return int(len(items) * CHARACTERS_PER_TOKEN)
        return sum(map(count_characters, items))
    return 0


class SharedCounters:
    """Counters of current requests by API key, in memory of one process or shared by several.

    Each process writes only its own cells and reads all, without locks, so a stopped process blocks no other; the cells
    of a killed process are cleared. A process sees its own writes only after the others can see them, so of two
    processes that count themselves and then read, at least one sees the other. The token buckets of keys are common to
    all processes and protected by a system lock.

    Args:
        keys: identifiers of all API keys.
        processes: number of processes.
        number: index of this process.
        descriptor: file descriptor of shared memory (`shared_memory`); None uses memory of this process.

    Attributes:
        places: index of each key.
        closed: number of closed connections of each process.
        calm: time at which the queue was short for the last time, by ``time.monotonic``, which all processes of a host
            share; one number.
        full_at: time at which the token bucket of each key is full, by ``time.monotonic``.
        lock: returns a cross-process lock.
    """

    def __init__(
        self, keys: Sequence[str] = ("",), processes: int = 1, number: int = 0, descriptor: int | None = None
    ) -> None:
        self.places = {key: place for place, key in enumerate(keys)}
        self._number, self._descriptor, self._fence = number, descriptor, Lock()
        size = _bytes_of(len(keys), processes)
        memory = memoryview(bytearray(size) if descriptor is None else mmap.mmap(descriptor, size))
        whole, ends = memory.cast("q"), range(0, (3 + 2 * len(keys)) * processes, processes)
        self._rows = [whole[at : at + processes] for at in ends]
        self._inside, self._tokens, self.closed = self._rows[:3]
        self._of_key, self._tokens_of_key = self._rows[3 : 3 + len(keys)], self._rows[3 + len(keys) :]
        times = memory.cast("d")[len(self._rows) * processes :]
        self.calm, self.full_at = times[:1], times[1:]
        self.lock = nullcontext if descriptor is None else partial(process_lock, descriptor)
        if descriptor is None:
            self.calm[0] = time.monotonic()

    @property
    def inside(self) -> int:
        """Number of current requests."""
        return sum(self._inside)

    @property
    def tokens(self) -> int:
        """Estimated tokens of the current requests."""
        return sum(self._tokens)

    def of_key(self, key: str) -> int:
        """Return the number of current requests of a key."""
        return sum(self._of_key[self.places[key]])

    def tokens_of_key(self, key: str) -> int:
        """Return the estimated tokens of the current requests of a key."""
        return sum(self._tokens_of_key[self.places[key]])

    def tokens_of_others(self, key: str) -> list[int]:
        """Return the tokens of each other key."""
        return [sum(row) for place, row in enumerate(self._tokens_of_key) if place != self.places[key]]

    def count(self, key: str, requests: int, tokens: int) -> None:
        """Add to the counters of this process."""
        me, place = self._number, self.places[key]
        self._inside[me] += requests
        self._tokens[me] += tokens
        self._of_key[place][me] += requests
        self._tokens_of_key[place][me] += tokens
        if self._descriptor is not None:
            # Processors may reorder a read before an earlier write, but not across a lock instruction.
            with self._fence:
                pass

    def close(self) -> None:
        """Count a closed connection of this process."""
        self.closed[self._number] += 1

    def clear(self, number: int) -> None:
        """Set the counters of an ended process to 0."""
        for row in self._rows:
            row[number] = 0


def _bytes_of(keys: int, processes: int) -> int:
    return ((3 + 2 * keys) * processes + 1 + keys) * 8


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
    os.truncate(descriptor, _bytes_of(keys, processes))
    return descriptor


class Admission:
    """Admits requests, or refuses them with 429 if the limits of the current requests are reached.

    Args:
        settings: the limits.
        counters: counters of current requests; None creates counters for this process only.
    """

    def __init__(self, settings: Settings, counters: SharedCounters | None = None) -> None:
        self.settings = settings
        self.counters = counters or SharedCounters(key_ids(settings.api_keys))
        self.rate = 0.0
        """Tokens per second of all devices at full load; 0 while unknown."""
        self.full = 0
        """Tokens of one full batch of every worker."""
        self.characters_per_token = CHARACTERS_PER_TOKEN

    @property
    def wait_s(self) -> float:
        """Estimated time in seconds to process all current requests."""
        return self.counters.tokens / self.rate if self.rate else 0.0

    def wait_of(self, key: str, tokens: int) -> float:
        """Return the estimated waiting time of a new request in seconds.

        Args:
            key: identifier of its API key.
            tokens: its estimated tokens.
        """
        if not self.rate:
            return 0.0
        mine = self.counters.tokens_of_key(key)
        others = [] if mine == self.counters.tokens else self.counters.tokens_of_others(key)
        return (mine + sum(min(other, mine + tokens) for other in others)) / self.rate

    def longest_wait(self, now: float) -> float:
        """Return the longest waiting time with which a request is admitted now.

        Args:
            now: time of ``time.monotonic``.
        """
        settings, counters = self.settings, self.counters
        short = max(settings.max_wait_s, BUSY_BATCHES * self.full / self.rate if self.rate else 0.0)
        if self.wait_s < LOAD_THRESHOLD * short:
            counters.calm[0] = now
        stays = now - counters.calm[0] > OVERLOAD_GRACE_S and counters.inside >= MIN_QUEUE
        return min(short, settings.max_queue_s) if stays else settings.max_queue_s

    def admit(self, key: str, tokens: int, left_s: float = math.inf) -> _Inside:
        """Admit a request until the returned context is left.

        Args:
            key: identifier of its API key.
            tokens: its estimated tokens.
            left_s: time to its deadline; a request that cannot finish by then is refused.

        Raises:
            RefusedError: a limit is reached; ``after_s`` is the time to retry.
        """
        settings, counters, wait, longest = self.settings, self.counters, 0.0, math.inf
        if counters.inside:
            wait, longest = self.wait_of(key, tokens), self.longest_wait(time.monotonic())
        else:
            counters.calm[0] = time.monotonic()
        # Counted before the check: of simultaneous requests in several processes, each is visible to the other or sees
        # it, so that together they never exceed a limit.
        self.count(key, 1, tokens)
        try:
            others, most = counters.inside - 1, settings.max_key_concurrent
            if others >= settings.max_concurrent:
                raise self._refused(f"{others} concurrent requests, the maximum")
            if most is not None and (mine := counters.of_key(key) - 1) >= most:
                raise self._refused(f"{mine} concurrent requests of this key, the maximum")
            if wait > longest or wait > left_s > 0:
                raise self._refused(f"the queue takes {wait:.1f} s")
            if settings.max_key_tokens is not None:
                with counters.lock():
                    self._take_from_token_bucket(key, tokens, settings.max_key_tokens)
        except RefusedError:
            self.count(key, -1, -tokens)
            raise
        return _Inside(self, key, tokens)

    def count(self, key: str, requests: int, tokens: int) -> None:
        """Update the counters when requests start or end."""
        self.counters.count(key, requests, tokens)
        if requests < 0 and not self.counters.inside:
            self.counters.calm[0] = time.monotonic()

    def _take_from_token_bucket(self, key: str, tokens: int, most: int) -> None:
        """Take tokens from the key's per-minute token bucket."""
        now, place = time.monotonic(), self.counters.places[key]
        left = most - max(0.0, self.counters.full_at[place] - now) * most / 60
        # A request larger than the limit per minute is admitted if the bucket is full.
        if left < min(tokens, most):
            after_s = (min(tokens, most) - left) * 60 / most
            raise self._refused(f"this key has used its {most} tokens per minute", after_s)
        self.counters.full_at[place] = now + (most - left + tokens) * 60 / most

    def _refused(self, why: str, after_s: float | None = None) -> RefusedError:
        after = math.ceil(max(1.0, min(60.0, self.wait_s / 2 if after_s is None else after_s)))
        return RefusedError(f"too many requests: {why}. Retry in {after} s.", "overloaded", after_s=float(after))


class _Inside:
    """Context of an admitted request; leaving it releases its share of the limits."""

    __slots__ = ("_admission", "_key", "_tokens")

    def __init__(self, admission: Admission, key: str, tokens: int) -> None:
        self._admission, self._key, self._tokens = admission, key, tokens

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._admission.count(self._key, -1, -self._tokens)

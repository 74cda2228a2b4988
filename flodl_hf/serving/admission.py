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
import time
from collections.abc import Sequence
from typing import Any

from flodl_hf.serving.http_errors import RefusedError
from flodl_hf.serving.settings import Settings
from flodl_hf.serving.shared_counters import SharedCounters

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
        self._characters = CHARACTERS_PER_TOKEN

    def tokens_of(self, characters: int) -> int:
        """Return the estimated number of tokens of some characters."""
        return int(characters / self._characters) + 1

    def update_estimate(self, characters: int, tokens: int) -> None:
        """Update the estimate of characters per token."""
        if tokens > 16:
            self._characters += 0.05 * (min(20.0, max(0.5, characters / tokens)) - self._characters)

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
        if mine == self.counters.tokens:
            return mine / self.rate
        return (mine + sum(min(others, mine + tokens) for others in self.counters.tokens_of_others(key))) / self.rate

    def longest_wait(self, now: float) -> float:
        """Return the longest waiting time with which a request is admitted now.

        Args:
            now: time of ``time.monotonic``.
        """
        settings = self.settings
        short = max(settings.max_wait_s, BUSY_BATCHES * self.full / self.rate if self.rate else 0.0)
        if self.wait_s < LOAD_THRESHOLD * short:
            self.counters.calm = now
        stays = now - self.counters.calm > OVERLOAD_GRACE_S and self.counters.inside >= MIN_QUEUE
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
        others, wait, longest = self.counters.inside, 0.0, math.inf
        if others:
            wait, longest = self.wait_of(key, tokens), self.longest_wait(time.monotonic())
        else:
            self.counters.calm = time.monotonic()
        # Counted before the check: of simultaneous requests in several processes, each is visible to the other or sees
        # it, so that together they never exceed a limit.
        self.count(key, 1, tokens)
        try:
            self._check(key)
            if wait > longest or wait > left_s > 0:
                raise self._refused(f"the queue takes {wait:.1f} s")
            if self.settings.max_key_tokens is not None:
                with self.counters.exclusive_lock():
                    self._take_from_token_bucket(key, tokens, self.settings.max_key_tokens)
        except RefusedError:
            self.count(key, -1, -tokens)
            raise
        return _Inside(self, key, tokens)

    def _check(self, key: str) -> None:
        """Raise if a request, which is already counted, exceeds a limit."""
        settings, others = self.settings, self.counters.inside - 1
        if others >= settings.max_concurrent:
            raise self._refused(f"{others} concurrent requests, the maximum")
        most = settings.max_key_concurrent
        if most is not None and (mine := self.counters.of_key(key) - 1) >= most:
            raise self._refused(f"{mine} concurrent requests of this key, the maximum")

    def count(self, key: str, requests: int, tokens: int) -> None:
        """Update the counters when requests start or end."""
        self.counters.count(key, requests, tokens)
        if requests < 0 and not self.counters.inside:
            self.counters.calm = time.monotonic()

    def _take_from_token_bucket(self, key: str, tokens: int, most: int) -> None:
        """Take tokens from the key's per-minute token bucket."""
        now = time.monotonic()
        left = most - max(0.0, self.counters.whole_at(key) - now) * most / 60
        # A request larger than the limit per minute is admitted if the bucket is full.
        if left < min(tokens, most):
            raise self._refused(
                f"this key has used its {most} tokens per minute", (min(tokens, most) - left) * 60 / most
            )
        self.counters.spend(key, now + (most - left + tokens) * 60 / most)

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

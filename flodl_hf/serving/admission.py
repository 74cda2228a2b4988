"""Which requests are let in: what is refused is refused at once, with a time after which to come again.

Tokens are counted before they are known, by the characters a token has had so far; how long the queue takes is
reckoned from how fast full batches have run, and for a key from what is before it: keys take turns, so that one waits
for no more of another than it has itself.

A queue that comes and goes is let grow, and one that stays is kept short: a wait that everybody has serves nobody
(Nichols and Jacobson 2012).
"""

from __future__ import annotations

import hashlib
import hmac
import math
import time
from collections.abc import Sequence
from typing import Any

from flodl.errors import FlodlError
from flodl_hf.serving.ledger import Ledger
from flodl_hf.serving.settings import Settings

__all__ = ["Admission", "OverloadedError", "known_key", "weigh", "words_of"]

# English in word pieces has four to five characters a token; what is measured soon takes its place.
CHARACTERS = 4.0
# A queue stays when it has not been below this part of what it may be for so long.
CALM, STAYS_S = 0.25, 1.0
# A device is kept busy by so many batches at a time, and a queue of fewer requests is none.
BATCHES, FEW = 4, 8


class OverloadedError(FlodlError):
    """A request that is not let in now; ``after_s`` says when to come again."""

    after_s: float


def known_key(keys: Sequence[str], given: str | None) -> str | None:
    """Return a word for the key that a client gave, or None where it is none of them.

    All keys are compared, each in a time that does not depend on what is given.
    """
    if not keys:
        return ""
    told = hashlib.sha256((given or "").encode()).digest()
    found = None
    for key in keys:
        held = hashlib.sha256(key.encode()).digest()
        if hmac.compare_digest(held, told):
            found = held.hex()[:12]
    return found


def words_of(keys: Sequence[str]) -> list[str]:
    """Return what `known_key` says of each key, once."""
    return list(dict.fromkeys(known_key(keys, key) or "" for key in keys)) or [""]


def weigh(items: Any) -> int:
    """Return how many characters, or ids, some items have."""
    if isinstance(items, str):
        return len(items)
    if isinstance(items, list):
        if set(map(type, items)) == {str}:
            return sum(map(len, items))
        if items and isinstance(items[0], int):
            return int(len(items) * CHARACTERS)
        return sum(map(weigh, items))
    return 0


class Admission:
    """What is let in.

    Args:
        settings: the limits.
        ledger: what is inside; None is nothing, and nobody shares it.
    """

    def __init__(self, settings: Settings, ledger: Ledger | None = None) -> None:
        self.settings = settings
        self.ledger = ledger or Ledger(words_of(settings.api_keys))
        self.rate = 0.0
        """Tokens a second that the devices run together when there is enough to run; 0 while nobody knows."""
        self.full = 0
        """Tokens of a full batch of each worker, together."""
        self._characters = CHARACTERS

    @property
    def inside(self) -> int:
        """Requests that are inside."""
        return self.ledger.inside

    @property
    def tokens(self) -> int:
        """Tokens of those, about."""
        return self.ledger.tokens

    def tokens_of(self, characters: int) -> int:
        """Return about how many tokens so many characters are."""
        return int(characters / self._characters) + 1

    def learn(self, characters: int, tokens: int) -> None:
        """Note how many tokens some characters were."""
        if tokens > 16:
            self._characters += 0.05 * (min(20.0, max(0.5, characters / tokens)) - self._characters)

    @property
    def wait_s(self) -> float:
        """How long what is inside takes, about."""
        return self.tokens / self.rate if self.rate else 0.0

    def wait_of(self, key: str, tokens: int) -> float:
        """Return about how long what is before another request of a key takes.

        Args:
            key: whose it is.
            tokens: about how many it has.
        """
        if not self.rate:
            return 0.0
        mine = self.ledger.tokens_of_key(key)
        if mine == self.tokens:
            return mine / self.rate
        return (mine + sum(min(held, mine + tokens) for held in self.ledger.tokens_of_others(key))) / self.rate

    def longest_wait(self, now: float) -> float:
        """Return the longest wait with which a request is let in now.

        Args:
            now: by ``time.monotonic``.
        """
        settings = self.settings
        short = max(settings.max_wait_s, BATCHES * self.full / self.rate if self.rate else 0.0)
        if self.wait_s < CALM * short:
            self.ledger.calm = now
        stays = now - self.ledger.calm > STAYS_S and self.inside >= FEW
        return min(short, settings.max_queue_s) if stays else settings.max_queue_s

    def entering(self, key: str, tokens: int, left_s: float = math.inf) -> _Inside:
        """Let a request in until what this returns has been left.

        Args:
            key: whose it is.
            tokens: about how many it has.
            left_s: when its time is over; what cannot be answered by then is not begun.

        Raises:
            OverloadedError: a limit is reached.
        """
        others, wait, longest = self.inside, 0.0, math.inf
        if others:
            wait, longest = self.wait_of(key, tokens), self.longest_wait(time.monotonic())
        else:
            self.ledger.calm = time.monotonic()
        # Counted before it is looked at: of processes whose requests come at the same instant, each sees that of the
        # other or is seen by it, so that together they never let in more than there may be.
        self.count(key, 1, tokens)
        try:
            self._check(key)
            if wait > longest or wait > left_s > 0:
                raise self._refused(f"what waits takes {wait:.1f} s")
            if self.settings.max_key_tokens is not None:
                with self.ledger.alone():
                    self._spend(key, tokens, self.settings.max_key_tokens)
        except OverloadedError:
            self.count(key, -1, -tokens)
            raise
        return _Inside(self, key, tokens)

    def _check(self, key: str) -> None:
        """Raise where a request that is counted already is one too many."""
        settings, others = self.settings, self.inside - 1
        if others >= settings.max_concurrent:
            raise self._refused(f"{others} requests are being answered, and no more are at a time")
        most = settings.max_key_concurrent
        if most is not None and (mine := self.ledger.of_key(key) - 1) >= most:
            raise self._refused(f"{mine} requests of this key are being answered, and no more are")

    def count(self, key: str, requests: int, tokens: int) -> None:
        """Note that requests came in, or went."""
        self.ledger.count(key, requests, tokens)
        if requests < 0 and not self.inside:
            self.ledger.calm = time.monotonic()

    def _spend(self, key: str, tokens: int, most: int) -> None:
        """Take tokens from what a key may have in a minute, which comes back all the time."""
        now = time.monotonic()
        left = most - max(0.0, self.ledger.whole_at(key) - now) * most / 60
        # One request may be larger than a minute's part: it is let in when nothing else was.
        if left < min(tokens, most):
            raise self._refused(
                f"this key has had its {most} tokens of this minute", (min(tokens, most) - left) * 60 / most
            )
        self.ledger.spend(key, now + (most - left + tokens) * 60 / most)

    def _refused(self, why: str, after_s: float | None = None) -> OverloadedError:
        after = math.ceil(max(1.0, min(60.0, self.wait_s / 2 if after_s is None else after_s)))
        return OverloadedError(f"too many requests: {why}; ask again in {after} s", after_s=float(after))


class _Inside:
    """A request that was let in; what it had is free again when this ends."""

    __slots__ = ("_admission", "_key", "_tokens")

    def __init__(self, admission: Admission, key: str, tokens: int) -> None:
        self._admission, self._key, self._tokens = admission, key, tokens

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._admission.count(self._key, -1, -self._tokens)

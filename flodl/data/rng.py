"""Random numbers by address: the same seed and the same address give the same draws everywhere.

This file decides how a seed and an address (an epoch, a row, a purpose) become a stream of 64-bit words, and
how words become numbers. It owes nothing to the state of torch, numpy or ``random``, nor to their versions,
so an order computed today is the order that a resumed run computes next year on another machine. Who draws
what, and for which purpose, is decided elsewhere.

The generator is SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA
2014), started from a BLAKE2b hash of the address. Its state is a counter, so any position can be reached at
once.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flodl.errors import DataError

__all__ = ["Rng", "permutation"]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def _key(seed: int, address: tuple[int | str, ...]) -> int:
    text = "/".join([str(int(seed)), *(f"{type(part).__name__}:{part}" for part in address)])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


class Rng:
    """A stream of random numbers that depends on ``seed`` and ``address`` alone.

    Whole numbers, uniform numbers, choices and permutations are equal to the bit on every platform. Normal
    numbers go through the platform's logarithm and cosine, and may differ in the last bit between machines.

    Args:
        seed: any integer.
        *address: integers or words that tell this stream from its siblings, for example ``("mask", epoch,
            row)``.
    """

    def __init__(self, seed: int, *address: int | str) -> None:
        # numpy integers print like int but would hash under another type name
        self._key = _key(seed, tuple(part if isinstance(part, str) else int(part) for part in address))
        self._drawn = 0

    def bits(self, count: int) -> NDArray[np.uint64]:
        """Return the next ``count`` words, each uniform over 64 bits, shape ``(count,)``."""
        start = (self._key + (self._drawn + 1) * _GOLDEN) & _MASK
        self._drawn += count
        word = np.arange(count, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(start)
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return word ^ (word >> np.uint64(31))

    def uniforms(self, count: int) -> NDArray[np.float64]:
        """Return ``count`` numbers in ``[0, 1)``, multiples of 2**-53, shape ``(count,)``."""
        return (self.bits(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def integers(self, high: int, count: int) -> NDArray[np.int64]:
        """Return ``count`` integers in ``[0, high)``, shape ``(count,)``; bias below ``high / 2**53``.

        Raises:
            DataError: ``high`` is not positive.
        """
        if high <= 0:
            raise DataError(f"Rng.integers: the bound is {high}; there is no integer in [0, {high})", high=high)
        return np.minimum((self.uniforms(count) * high).astype(np.int64), high - 1)

    def permutation(self, size: int) -> NDArray[np.int64]:
        """Return ``0 .. size-1`` in random order, shape ``(size,)``."""
        return np.argsort(self.bits(size), kind="stable").astype(np.int64)

    def uniform(self) -> float:
        """Return one number in ``[0, 1)``."""
        return float(self.uniforms(1)[0])

    def integer(self, high: int) -> int:
        """Return one integer in ``[0, high)``."""
        return int(self.integers(high, 1)[0])

    def between(self, low: int, high: int) -> int:
        """Return one integer in ``[low, high)``."""
        return low + self.integer(high - low)

    def bernoulli(self, probability: float) -> bool:
        """Return True with the given probability."""
        return self.uniform() < probability

    def normals(self, count: int, mean: float = 0.0, std: float = 1.0) -> NDArray[np.float64]:
        """Return ``count`` normal numbers, shape ``(count,)`` (Box and Muller, 1958, cosine branch)."""
        radius = np.sqrt(-2.0 * np.log(1.0 - self.uniforms(count)))
        return mean + std * radius * np.cos(2.0 * np.pi * self.uniforms(count))

    def normal(self, mean: float = 0.0, std: float = 1.0) -> float:
        """Return one normal number."""
        return float(self.normals(1, mean, std)[0])

    def shuffle(self, items: MutableSequence[Any]) -> None:
        """Put ``items`` in random order, in place."""
        items[:] = [items[i] for i in self.permutation(len(items))]

    def state_dict(self) -> dict[str, int]:
        """Return what :meth:`load_state_dict` needs to go on from here; JSON-able."""
        return {"key": self._key, "drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a saved position."""
        self._key, self._drawn = int(state["key"]), int(state["drawn"])


def permutation(size: int, seed: int, *address: int | str) -> NDArray[np.int64]:
    """Return ``0 .. size-1`` in the order that belongs to ``seed`` and ``address``, shape ``(size,)``."""
    return Rng(seed, *address).permutation(size)

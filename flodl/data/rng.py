"""Random numbers by address: equal seeds and equal addresses give equal numbers on every machine.

The numbers do not depend on the state or the version of torch, numpy or ``random``. A resumed run therefore
recomputes the order of the interrupted run.

The generator is SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014),
started from a BLAKE2b hash of the seed and the address.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from flodl.errors import DataError

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class Rng:
    """Stream of random numbers that depends only on ``seed`` and ``address``.

    Integers, uniform numbers and permutations are equal to the bit on every platform. Normal numbers use the
    platform's logarithm and cosine and may differ in the last bit.

    Args:
        seed: any integer.
        *address: integers or words that distinguish this stream from others, for example ``("mask", epoch, row)``.
    """

    def __init__(self, seed: int, *address: int | str) -> None:
        # numpy integers print like int, but their type name would change the hash.
        parts = [part if isinstance(part, str) else int(part) for part in address]
        text = "/".join([str(int(seed)), *(f"{type(part).__name__}:{part}" for part in parts)])
        self._key = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
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
        """Return ``count`` integers in ``[0, high)``, shape ``(count,)``, with a bias below ``high / 2**53``.

        Raises:
            DataError: ``high`` is not positive.
        """
        if high <= 0:
            raise DataError(f"Rng.integers: found the bound {high}, expected an integer above 0", high=high)
        return np.minimum((self.uniforms(count) * high).astype(np.int64), high - 1)

    def integer(self, high: int) -> int:
        """Return one integer in ``[0, high)``."""
        return int(self.integers(high, 1)[0])

    def permutation(self, size: int) -> NDArray[np.int64]:
        """Return ``0 .. size-1`` in random order, shape ``(size,)``."""
        return np.argsort(self.bits(size), kind="stable").astype(np.int64)

    def normals(self, count: int, mean: float = 0.0, std: float = 1.0) -> NDArray[np.float64]:
        """Return ``count`` normal numbers, shape ``(count,)`` (Box and Muller, 1958, cosine branch)."""
        radius = np.sqrt(-2.0 * np.log(1.0 - self.uniforms(count)))
        return mean + std * radius * np.cos(2.0 * np.pi * self.uniforms(count))

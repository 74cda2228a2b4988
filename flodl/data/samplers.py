"""The order in which an epoch visits the rows.

A sampler is a pure function of the epoch: ``indices(epoch)`` returns the same array in every process and on every
machine, so only the numbers that define the sampler are saved.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from flodl.data.rng import Rng
from flodl.errors import DataError


@runtime_checkable
class Sampler(Protocol):
    """Interface of an order of rows.

    The method ``identity()`` is optional. If a sampler has it, a run refuses to resume with another order.
    """

    def __len__(self) -> int:
        """Return the number of indices of an epoch."""
        ...

    def indices(self, epoch: int) -> NDArray[np.int64]:
        """Return the row numbers of ``epoch`` in the order of use, shape ``(len(self),)``."""
        ...


class SequentialSampler:
    """Every row once, in file order.

    Args:
        num_rows: rows in the data set.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = at_least_one("SequentialSampler: num_rows", num_rows)

    def __len__(self) -> int:
        return self.num_rows

    def indices(self, epoch: int) -> NDArray[np.int64]:
        """Return ``0 .. num_rows-1``, the same for every epoch, shape ``(num_rows,)``."""
        return np.arange(self.num_rows, dtype=np.int64)

    def identity(self) -> dict[str, Any]:
        """Return the JSON values that define the order."""
        return {"sampler": "sequential", "rows": self.num_rows}


class RandomSampler:
    """Every row once, in an order that depends only on the seed and the epoch.

    Args:
        num_rows: rows in the data set.
        seed: any integer. Samplers with equal seeds give equal orders.
    """

    def __init__(self, num_rows: int, seed: int = 42) -> None:
        self.num_rows = at_least_one("RandomSampler: num_rows", num_rows)
        self.seed = int(seed)

    def __len__(self) -> int:
        return self.num_rows

    def indices(self, epoch: int) -> NDArray[np.int64]:
        """Return the permutation of ``epoch``, shape ``(num_rows,)``."""
        return Rng(self.seed, "order", epoch).permutation(self.num_rows)

    def identity(self) -> dict[str, Any]:
        """Return the JSON values that define the order."""
        return {"sampler": "random", "rows": self.num_rows, "seed": self.seed}


def digest(array: NDArray[Any]) -> str:
    """Return a short hash of the shape and values of an array."""
    flat = np.ascontiguousarray(array)
    # A fixed byte order makes the hash equal on all machines.
    data = flat.astype(flat.dtype.newbyteorder("<"), copy=False).tobytes()
    return blake2b(f"{flat.dtype.kind}{flat.shape}".encode() + data, digest_size=8).hexdigest()


def at_least_one(what: str, value: int) -> int:
    """Return an integer above 0.

    Raises:
        DataError: another value; ``what`` names it.
    """
    if isinstance(value, bool) or int(value) != value or value < 1:
        raise DataError(f"{what}: found {value!r}, expected an integer above 0", argument=what, value=value)
    return int(value)

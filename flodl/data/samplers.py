"""In which order the rows of an epoch are visited.

A sampler is a pure function of the epoch: ``indices(epoch)`` gives the same array whenever and wherever it is
asked, so nothing has to be saved but the numbers that define it. How an order is cut into batches is
decided in ``batches``, how batches are dealt to ranks in ``distributed``, and where a run stands in
``loader``.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from flodl.data.rng import Rng
from flodl.errors import DataError

__all__ = ["RandomSampler", "Sampler", "SequentialSampler", "WeightedSampler", "digest"]


@runtime_checkable
class Sampler(Protocol):
    """Anything that gives the order of an epoch.

    ``identity()`` is optional: where a sampler has it, a resumed run refuses to go on with another order.
    """

    def __len__(self) -> int:
        """Return how many indices an epoch holds."""
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
        self.num_rows = _positive("SequentialSampler", "num_rows", num_rows)

    def __len__(self) -> int:
        return self.num_rows

    def indices(self, epoch: int) -> NDArray[np.int64]:
        """Return ``0 .. num_rows-1``, the same for every epoch, shape ``(num_rows,)``."""
        return np.arange(self.num_rows, dtype=np.int64)

    def identity(self) -> dict[str, Any]:
        """Return the numbers that define the order; JSON-able."""
        return {"sampler": "sequential", "rows": self.num_rows}


class RandomSampler:
    """Every row once, in an order that ``seed`` and the epoch determine on every platform.

    Args:
        num_rows: rows in the data set.
        seed: any integer; two samplers with one seed agree.
    """

    def __init__(self, num_rows: int, seed: int = 42) -> None:
        self.num_rows = _positive("RandomSampler", "num_rows", num_rows)
        self.seed = int(seed)

    def __len__(self) -> int:
        return self.num_rows

    def indices(self, epoch: int) -> NDArray[np.int64]:
        """Return the permutation of ``epoch``, shape ``(num_rows,)``."""
        return Rng(self.seed, "order", epoch).permutation(self.num_rows)

    def identity(self) -> dict[str, Any]:
        """Return the numbers that define the order; JSON-able."""
        return {"sampler": "random", "rows": self.num_rows, "seed": self.seed}


class WeightedSampler:
    """Rows drawn in proportion to their weights: for rare classes that should be seen more often.

    With replacement a row may come several times in an epoch and another not at all. Without, each row
    comes at most once and the heavy ones come early (Efraimidis and Spirakis, "Weighted random sampling
    with a reservoir", 2006).

    Args:
        weights: one number per row, finite and not negative.
        num_samples: draws in an epoch; default one per row.
        replacement: draw with replacement.
        seed: any integer.

    Raises:
        DataError: a weight is negative or not finite, all are zero, or more rows are asked without
            replacement than have a weight above zero.
    """

    def __init__(
        self,
        weights: Sequence[float] | NDArray[Any],
        num_samples: int | None = None,
        *,
        replacement: bool = True,
        seed: int = 42,
    ) -> None:
        self.weights = np.asarray(weights, dtype=np.float64).reshape(-1)
        faults = [int(i) for i in np.flatnonzero(~(np.isfinite(self.weights) & (self.weights >= 0)))]
        if faults:
            raise DataError(
                f"WeightedSampler: {len(faults)} of {self.weights.size} weights are negative or not finite, "
                f"first at row {faults[0]}: {self.weights[faults[0]]}; expected finite numbers from 0 up",
                rows=faults,
            )
        self.num_samples = _positive(
            "WeightedSampler", "num_samples", self.weights.size if num_samples is None else num_samples
        )
        self.replacement = bool(replacement)
        self.seed = int(seed)
        eligible = int(np.count_nonzero(self.weights))
        needed = 1 if replacement else self.num_samples
        if eligible < needed:
            raise DataError(
                f"WeightedSampler: {eligible} rows have a weight above zero, {needed} are needed; "
                "lower num_samples or draw with replacement",
                eligible=eligible,
                needed=needed,
            )

    def __len__(self) -> int:
        return self.num_samples

    def indices(self, epoch: int) -> NDArray[np.int64]:
        """Return the draws of ``epoch``, shape ``(num_samples,)``."""
        rng = Rng(self.seed, "weighted", epoch)
        if not self.replacement:
            positive = np.flatnonzero(self.weights)
            arrival = -np.log(1.0 - rng.uniforms(positive.size)) / self.weights[positive]
            return positive[np.argsort(arrival, kind="stable")[: self.num_samples]].astype(np.int64)
        total = np.cumsum(self.weights)
        # a draw on a boundary belongs to the row that starts there, so rows of weight zero are never hit
        found = np.searchsorted(total, rng.uniforms(self.num_samples) * total[-1], side="right")
        return np.minimum(found, np.flatnonzero(self.weights)[-1]).astype(np.int64)

    def identity(self) -> dict[str, Any]:
        """Return the numbers that define the order, the weights as a hash; JSON-able."""
        return {
            "sampler": "weighted",
            "rows": int(self.weights.size),
            "samples": self.num_samples,
            "replacement": self.replacement,
            "seed": self.seed,
            "weights": digest(self.weights),
        }


def digest(array: NDArray[Any]) -> str:
    """Return a short hash of an array's values and shape: equal arrays, equal text."""
    flat = np.ascontiguousarray(array)
    # byte order is fixed so that the hash can travel between machines
    data = flat.astype(flat.dtype.newbyteorder("<"), copy=False).tobytes()
    return blake2b(f"{flat.dtype.kind}{flat.shape}".encode() + data, digest_size=8).hexdigest()


def _positive(owner: str, name: str, value: int) -> int:
    if isinstance(value, bool) or int(value) != value or value <= 0:
        raise DataError(
            f"{owner}: {name} is {value!r}; expected an integer above 0",
            owner=owner,
            argument=name,
            value=value,
        )
    return int(value)

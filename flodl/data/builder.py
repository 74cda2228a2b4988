"""The loader's settings, one call each.

The builder only gathers; every check is the loader's own, made in ``build()``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, TypeVar

import torch

from flodl.data.batches import BatchSource, source_of_rows
from flodl.data.collate import Transform
from flodl.data.datasets import Collate, as_batches
from flodl.data.distributed import DistributedPlan
from flodl.data.samplers import Sampler

__all__ = ["LoaderBuilder"]

Loader = TypeVar("Loader")


class LoaderBuilder(Generic[Loader]):
    """Gathers the settings of a loader; each method returns the builder, ``build()`` the loader.

    Made by :meth:`flodl.data.DataLoader.from_dataset`. What is not said keeps the loader's default.

    Args:
        data: what the loader is to read.
        make: the loader's class; called with ``data`` and the settings.
    """

    def __init__(self, data: Any, make: Callable[..., Loader]) -> None:
        self._data = data
        self._make = make
        self._settings: dict[str, Any] = {}
        self._ranks: tuple[int, Sequence[float], Literal["batch", "epoch"]] | None = None

    def _with(self, **settings: Any) -> LoaderBuilder[Loader]:
        self._settings.update(settings)
        return self

    def batch_size(self, rows: int) -> LoaderBuilder[Loader]:
        """Take ``rows`` rows to a batch."""
        return self._with(batch_size=rows)

    def batches(self, source: BatchSource) -> LoaderBuilder[Loader]:
        """Take ready batches instead, for example by token budget."""
        return self._with(batches=source)

    def sampler(self, sampler: Sampler) -> LoaderBuilder[Loader]:
        """Visit rows in the order of ``sampler``."""
        return self._with(sampler=sampler)

    def shuffle(self, shuffle: bool = True) -> LoaderBuilder[Loader]:
        """Visit rows in random order, or in file order."""
        return self._with(shuffle=shuffle)

    def seed(self, seed: int) -> LoaderBuilder[Loader]:
        """Set the seed of the order and of transforms."""
        return self._with(seed=seed)

    def drop_last(self, drop_last: bool = True) -> LoaderBuilder[Loader]:
        """Leave out a ragged last batch."""
        return self._with(drop_last=drop_last)

    def device(self, device: torch.device | str) -> LoaderBuilder[Loader]:
        """Deliver batches on ``device``."""
        return self._with(device=device)

    def streaming(self) -> LoaderBuilder[Loader]:
        """Make batches ahead in a thread, even if the set would fit on the device."""
        return self._with(mode="streaming")

    def resident(self) -> LoaderBuilder[Loader]:
        """Hold the whole set on the device; rows are read once, so they must not change between epochs."""
        return self._with(mode="resident")

    def prefetch(self, depth: int | None) -> LoaderBuilder[Loader]:
        """Make ``depth`` batches ahead; 0 makes each when asked for; None sizes the queue from memory."""
        return self._with(prefetch=depth)

    def vram_max_usage(self, usage: float) -> LoaderBuilder[Loader]:
        """Fill a CUDA device to at most this share, within 0.50 and 0.99."""
        return self._with(vram_max_usage=usage)

    def names(self, names: Sequence[str]) -> LoaderBuilder[Loader]:
        """Name the parts of a batch."""
        return self._with(names=names)

    def collate(self, collate: Collate) -> LoaderBuilder[Loader]:
        """Make batches of rows with ``collate``."""
        return self._with(collate=collate)

    def transform(self, transform: Transform) -> LoaderBuilder[Loader]:
        """Change each batch with ``transform(batch, where)``."""
        return self._with(transform=transform)

    def distributed(
        self, rank: int, shares: Sequence[float], split: Literal["batch", "epoch"] = "batch"
    ) -> LoaderBuilder[Loader]:
        """Deliver only what ``rank`` takes, by ``shares``; see :class:`flodl.data.DistributedPlan`."""
        self._ranks = (rank, shares, split)
        return self

    def build(self) -> Loader:
        """Return the loader.

        Raises:
            DataError: as :class:`flodl.data.DataLoader` does.
        """
        if self._ranks is None:
            return self._make(self._data, **self._settings)
        rank, shares, split = self._ranks
        settings = dict(self._settings)
        source = source_of_rows(
            len(as_batches(self._data, settings.get("collate"))),
            settings.pop("batch_size", None),
            settings.pop("batches", None),
            settings.pop("sampler", None),
            settings.pop("shuffle", True),
            settings.get("seed", 42),
            settings.pop("drop_last", False),
        )
        return self._make(self._data, batches=DistributedPlan(source, shares, split).for_rank(rank), **settings)

"""The loader's settings, one call each.

The builder only gathers; every check is the loader's own, made in ``build()``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from flodl.data.batches import BatchSource, source_of_rows
from flodl.data.datasets import Collate, as_batches
from flodl.data.distributed import DistributedPlan
from flodl.data.loader import DataLoader, Transform
from flodl.data.samplers import Sampler

__all__ = ["LoaderBuilder"]


class LoaderBuilder:
    """Gathers the settings of a loader; each method returns the builder, ``build()`` the loader.

    Made by :meth:`flodl.data.DataLoader.from_dataset`. What is not said keeps the loader's default.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self._settings: dict[str, Any] = {}
        self._ranks: tuple[int, Sequence[float], Literal["batch", "epoch"]] | None = None

    def _with(self, **settings: Any) -> LoaderBuilder:
        self._settings.update(settings)
        return self

    def batch_size(self, rows: int) -> LoaderBuilder:
        """Take ``rows`` rows to a batch."""
        return self._with(batch_size=rows)

    def batches(self, source: BatchSource) -> LoaderBuilder:
        """Take ready batches instead, for example by token budget."""
        return self._with(batches=source)

    def sampler(self, sampler: Sampler) -> LoaderBuilder:
        """Visit rows in the order of ``sampler``."""
        return self._with(sampler=sampler)

    def shuffle(self, shuffle: bool = True) -> LoaderBuilder:
        """Visit rows in random order, or in file order."""
        return self._with(shuffle=shuffle)

    def seed(self, seed: int) -> LoaderBuilder:
        """Set the seed of the order and of transforms."""
        return self._with(seed=seed)

    def drop_last(self, drop_last: bool = True) -> LoaderBuilder:
        """Leave out a ragged last batch."""
        return self._with(drop_last=drop_last)

    def device(self, device: torch.device | str) -> LoaderBuilder:
        """Deliver batches on ``device``."""
        return self._with(device=device)

    def streaming(self) -> LoaderBuilder:
        """Make batches ahead in a thread, even if the set would fit on the device."""
        return self._with(mode="streaming")

    def resident(self) -> LoaderBuilder:
        """Hold the whole set on the device; rows are read once, so they must not change between epochs."""
        return self._with(mode="resident")

    def prefetch(self, depth: int | None) -> LoaderBuilder:
        """Make ``depth`` batches ahead; 0 makes each when asked for; None sizes the queue from memory."""
        return self._with(prefetch=depth)

    def vram_max_usage(self, usage: float) -> LoaderBuilder:
        """Fill a CUDA device to at most this share, within 0.50 and 0.99."""
        return self._with(vram_max_usage=usage)

    def names(self, names: Sequence[str]) -> LoaderBuilder:
        """Name the parts of a batch."""
        return self._with(names=names)

    def collate(self, collate: Collate) -> LoaderBuilder:
        """Make batches of rows with ``collate``."""
        return self._with(collate=collate)

    def transform(self, transform: Transform) -> LoaderBuilder:
        """Change each batch with ``transform(batch, where)``."""
        return self._with(transform=transform)

    def distributed(
        self, rank: int, shares: Sequence[float], split: Literal["batch", "epoch"] = "batch"
    ) -> LoaderBuilder:
        """Deliver only what ``rank`` takes, by ``shares``; see :class:`flodl.data.DistributedPlan`."""
        self._ranks = (rank, shares, split)
        return self

    def build(self) -> DataLoader:
        """Return the loader.

        Raises:
            DataError: as :class:`flodl.data.DataLoader` does.
        """
        if self._ranks is None:
            return DataLoader(self._data, **self._settings)
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
        return DataLoader(self._data, batches=DistributedPlan(source, shares, split).for_rank(rank), **settings)


DataLoader._builder = LoaderBuilder

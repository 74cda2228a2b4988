"""The order of loaders that shuffle by random numbers: equal for each reading of an epoch, and on all ranks.

`flodl.data.DataLoader` computes its order from seed and epoch. A torch loader draws it when iteration begins, from the
global generators or its generator, so a second reading (after a resume, or on another rank) would have another order.
Here these draws are determined by seed and epoch.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from flodl.data.rng import Rng
from flodl.train.saving.state import load_random, random_state

_SEEDS: WeakKeyDictionary[torch.Generator, tuple[int, int]] = WeakKeyDictionary()
"""The original seed, and the one set here, of each generator that was seeded here."""


@contextlib.contextmanager
def random_kept() -> Iterator[None]:
    """Put the random numbers of this host back to where they were."""
    host = torch.device("cpu")
    tensors, rest = random_state(host)
    try:
        yield
    finally:
        load_random(host, tensors, rest)


def decide_order(loader: Any, seed: int, epoch: int) -> None:
    """Seed the generators that a loader draws its order from.

    Args:
        loader: its generators, and the generators of its samplers, are seeded by their original seed and the epoch;
            in epoch 0 by their original seed.
        seed: determines the other random numbers of this host, which the caller restores.
        epoch: the epoch.
    """
    drawn = Rng(seed, "loader", epoch)
    torch.default_generator.manual_seed(drawn.integer(1 << 53))
    np.random.seed(drawn.integer(1 << 32))
    random.seed(drawn.integer(1 << 53))
    samplers = (getattr(loader, name, None) for name in ("sampler", "batch_sampler"))
    for generator in {getattr(part, "generator", None) for part in (loader, *samplers)}:
        if isinstance(generator, torch.Generator):
            given, last = _SEEDS.get(generator, (0, None))
            found = generator.initial_seed()
            given = given if found == last else found  # unless it was seeded again
            chosen = given if epoch == 0 else Rng(given, "loader", epoch).integer(1 << 53)
            generator.manual_seed(chosen)
            _SEEDS[generator] = given, chosen

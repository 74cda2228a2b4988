"""The order of loaders that shuffle by random numbers: the same whenever an epoch is read, and on all ranks.

A loader of ours computes its order from seed and epoch. One of torch draws it when iterating begins, from the process's
random numbers or from a generator of its own, so a second reading (to go on inside an epoch, or on another rank) would
have another order. Here these draws are made to follow from seed and epoch as well.
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

__all__ = ["decide_order", "random_kept"]

_SEEDS: WeakKeyDictionary[torch.Generator, tuple[int, int]] = WeakKeyDictionary()
"""Of generators that were seeded here: the seed that they were given by whoever made them, and the one from here."""


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
    """Have what a loader draws next follow from seed and epoch.

    Args:
        loader: generators of its own, or of its samplers, go by the seed that they have; in epoch 0 just by that.
        seed: decides all other random numbers of this host, which the caller puts back.
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
            given = given if found == last else found  # unless somebody gave it another since
            chosen = given if epoch == 0 else Rng(given, "loader", epoch).integer(1 << 53)
            generator.manual_seed(chosen)
            _SEEDS[generator] = given, chosen

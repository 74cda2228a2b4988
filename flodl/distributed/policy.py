"""When ranks meet: `Sync` at every step, `Cadence` when the slowest has done its share, `Async` when ready.

A policy hands this rank its turns, is told after each step, and decides whether to average. It owns
the place in the epoch. How averaging is done is `flodl.distributed.average`'s, how many batches a
round has is `flodl.distributed.cadence`'s, what a turn holds is the feed's. Here one is chosen:
`flodl.distributed.sync` for equal ranks, `flodl.distributed.local_steps` for others.
"""

from __future__ import annotations

import time

import torch
from torch import nn

from flodl.distributed.group import Ranks
from flodl.distributed.local_steps import LocalSteps
from flodl.distributed.rounds import Knobs
from flodl.distributed.sync import Sync
from flodl.errors import TrainError

__all__ = ["POLICIES", "choose_policy", "make_policy"]

POLICIES = ("sync", "cadence", "async")


def choose_policy(ranks: Ranks, wanted: str | None, slowdown: float = 1.0) -> str:
    """Return the policy that all ranks will follow.

    Without a wish: Sync for one rank or equal ranks, Cadence when device names differ or one rank
    needs more than 1.3 times as long as another for the same small piece of work.

    Raises:
        TrainError: the wish is no policy.
    """
    if wanted is not None and wanted not in POLICIES:
        raise TrainError(f"policy: found {wanted!r}, expected one of {', '.join(POLICIES)}.", found=wanted)
    if ranks.solo:
        return "sync"
    if wanted is not None:
        return wanted
    cuda = ranks.device.type == "cuda"
    name = torch.cuda.get_device_name(ranks.device) if cuda else "cpu"
    names = ranks.gather(name)
    # Ranks on CPUs of one kind differ only by what else runs there; a probe would measure noise.
    speed = [row[0] for row in ranks.table([(_probe_ms(ranks.device) if cuda else 1.0) * slowdown])]
    return "cadence" if len(set(names)) > 1 or max(speed) > 1.3 * min(speed) else "sync"


def _probe_ms(device: torch.device) -> float:
    """Return the milliseconds of a few matrix products, the least of five tries."""
    square = torch.randn(2048, 2048, device=device)
    tries = []
    for _ in range(6):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        for _ in range(4):
            torch.mm(square, square)
        torch.cuda.synchronize(device)
        tries.append((time.perf_counter() - begin) * 1e3)
    return min(tries[1:])


def make_policy(name: str, ranks: Ranks, model: nn.Module, knobs: Knobs) -> Sync | LocalSteps:
    """Return the policy of this name, as `choose_policy` gave it."""
    if name == "sync":
        return Sync(ranks, model, knobs)
    return LocalSteps(ranks, model, knobs, overlap=name == "async")

"""Choice of the policy by which ranks share the work of a run.

`Sync` (`flodl.distributed.sync`) shares every step: the result equals a run on one device. `Cadence` and `Async`
(`flodl.distributed.local_steps`) let each rank take steps by itself and average parameters, which gives other results.
They are chosen only on request, or where the names of the devices differ. A measured time never decides.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import nn

from flodl.distributed.group import Ranks
from flodl.distributed.local_steps import LocalSteps
from flodl.distributed.rounds import Knobs
from flodl.distributed.sync import Sync
from flodl.errors import TrainError

__all__ = ["POLICIES", "Choice", "choose_policy", "make_policy"]

POLICIES = ("sync", "cadence", "async")

UNEQUAL = 1.3
"""Ratio of the slowest to the fastest measured time from which a warning is logged."""


@dataclass(frozen=True)
class Choice:
    """The policy of a run.

    Attributes:
        name: one of `POLICIES`.
        reason: why it was chosen.
        warning: a message for the log; empty where there is none.
    """

    name: str
    reason: str
    warning: str = ""


def choose_policy(ranks: Ranks, wanted: str | None, *, slowdown: float = 1.0, together: str | None = None) -> Choice:
    """Return the policy that all ranks follow.

    Args:
        ranks: the ranks of the run; all of them call this function.
        wanted: the requested policy; None chooses Sync, or Cadence where the names of the devices differ.
        slowdown: factor of a simulated slow rank; it is part of the measured time.
        together: the setting that needs ranks to share every step; with it only Sync is chosen.

    Raises:
        TrainError: ``wanted`` is not a policy.
    """
    if wanted is not None and wanted not in POLICIES:
        raise TrainError(f"policy: found {wanted!r}, expected one of {', '.join(POLICIES)}.", found=wanted)
    if ranks.solo:
        return Choice("sync", "there is one rank")
    if wanted is not None:
        return Choice(wanted, "it was requested")
    names = sorted(set(ranks.gather(_device_name(ranks.device))))
    if len(names) > 1 and together is None:
        return Choice("cadence", f"the devices differ: {', '.join(names)}")
    if len(names) > 1:
        return Choice("sync", f"{together} needs ranks that share every step")
    ms = [row[0] for row in ranks.table([_probe_ms(ranks.device) * slowdown])]
    warning = ""
    if max(ms) > UNEQUAL * min(ms):
        slow = ms.index(max(ms))
        warning = (
            f"rank {slow} takes {max(ms) / min(ms):.1f} times as long as rank {ms.index(min(ms))} for the same work, "
            f"although both are {names[0]}. The ranks share every step (sync), so the result is that of one device and "
            'the slowest rank sets the speed. policy="cadence" lets each rank take steps by itself; the result then '
            "differs."
        )
    return Choice("sync", f"the devices are equal: {ranks.world} x {names[0]}", warning)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _probe_ms(device: torch.device) -> float:
    """Return the milliseconds of a few matrix products, the minimum of five runs; 1 on a CPU, where other load rules.

    No random number is drawn, since the generators of a run must not depend on a measurement.
    """
    if device.type != "cuda":
        return 1.0
    square = torch.ones(2048, 2048, device=device)
    times = []
    for _ in range(6):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        for _ in range(4):
            torch.mm(square, square)
        torch.cuda.synchronize(device)
        times.append((time.perf_counter() - begin) * 1e3)
    return min(times[1:])


def make_policy(name: str, ranks: Ranks, model: nn.Module, knobs: Knobs) -> Sync | LocalSteps:
    """Return the policy with this name, one of `POLICIES`."""
    if name == "sync":
        return Sync(ranks, model, knobs)
    return LocalSteps(ranks, model, knobs, overlap=name == "async")

"""Choice of the policy by which ranks share the work of a run.

`Sync` (`flodl.distributed.sync`) shares every step: the result equals a run on one device. `Cadence` and `Async`
(`flodl.distributed.local_steps`) let each rank take steps by itself and average parameters, which gives other results.
They are chosen only on request, or where the names of the devices differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from flodl.distributed.group import Ranks
from flodl.distributed.local_steps import LocalSteps
from flodl.distributed.rounds import Knobs
from flodl.distributed.sync import Sync
from flodl.errors import TrainError

POLICIES = ("sync", "cadence", "async")


@dataclass(frozen=True)
class Choice:
    """The policy of a run.

    Attributes:
        name: one of `POLICIES`.
        reason: why it was chosen.
    """

    name: str
    reason: str


def choose_policy(ranks: Ranks, wanted: str | None, *, together: str | None = None) -> Choice:
    """Return the policy that all ranks follow.

    Args:
        ranks: the ranks of the run; all of them call this function.
        wanted: the requested policy; None chooses Sync, or Cadence where the names of the devices differ.
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
    return Choice("sync", f"the devices are equal: {ranks.world} x {names[0]}")


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def make_policy(name: str, ranks: Ranks, model: nn.Module, knobs: Knobs) -> Sync | LocalSteps:
    """Return the policy with this name, one of `POLICIES`."""
    if name == "sync":
        return Sync(ranks, model, knobs)
    return LocalSteps(ranks, model, knobs, overlap=name == "async")

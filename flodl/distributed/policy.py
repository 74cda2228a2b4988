"""Choice of the policy by which ranks share the work of a run.

`Sync` shares every step: the result equals a run on one device. `Cadence` and `Async` (`flodl.distributed.local_steps`)
let each rank take steps by itself and average parameters, which gives other results. They are chosen only on request,
or where the names of the devices differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flodl.distributed.average import check_equal
from flodl.distributed.group import Ranks
from flodl.distributed.local_steps import LocalSteps
from flodl.distributed.rounds import Knobs, Round
from flodl.distributed.shares import ratios_from_ms
from flodl.errors import TrainError

POLICIES = ("sync", "cadence", "async")
CALIBRATION_STEPS = 10
REBALANCE_STEPS = 50


class Sync:
    """Every rank does a share of every turn, so parameters need no averaging.

    Args:
        ranks: the ranks of the run.
        knobs: its ``shares`` and ``check_every`` apply.
    """

    name = "sync"
    shares_gradients = True

    def __init__(self, ranks: Ranks, model: nn.Module, knobs: Knobs) -> None:
        self.ranks, self.model, self.knobs = ranks, model, knobs
        self.position = 0
        self.steps = 0
        given = knobs.shares
        self.ratios = given if isinstance(given, tuple) else (1.0,) * ranks.world
        self._ms = 0.0
        self._samples = 0

    def turns(self, total: int) -> Iterator[tuple[list[int], tuple[float, ...] | None]]:
        """Yield ``(turns to do next, shares)`` until the epoch's ``total`` turns are done."""
        while self.position < total:
            last = total
            if self.knobs.shares == "measured" and not self.ranks.solo:
                due = CALIBRATION_STEPS if self.steps < CALIBRATION_STEPS else REBALANCE_STEPS
                last = min(total, self.position + due)
            yield list(range(self.position, last)), None if self.ranks.solo else self.ratios

    def after_step(self, turn: int, samples: int, compute_ms: float, flags: Sequence[float]) -> Round | None:
        """Record that this rank did its part of ``turn``; Sync has no rounds."""
        self.position = turn + 1
        self.steps += 1
        self._ms += compute_ms
        self._samples += samples
        if self.knobs.check_every and self.steps % self.knobs.check_every == 0:
            check_equal(self.ranks, self.model, self.steps)
        if (
            self.knobs.shares == "measured"
            and not self.ranks.solo
            and (self.steps == CALIBRATION_STEPS or self.steps % REBALANCE_STEPS == 0)
        ):
            rows = self.ranks.table([self._ms / self._samples if self._samples else 0.0])
            self.ratios = tuple(ratios_from_ms([row[0] for row in rows]))
            self._ms, self._samples = 0.0, 0
        return None

    def close_epoch(self, flags: Sequence[float]) -> list[Round]:
        """Return to the first turn."""
        self.position = 0
        return []

    @property
    def lr_step(self) -> int:
        """Step number for schedules."""
        return self.steps

    @property
    def speeds(self) -> tuple[float, ...]:
        """Relative speeds of the ranks, as far as they are known; equal on all ranks."""
        return self.ratios

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch and the shares, as JSON values; equal on all ranks."""
        return {"position": self.position, "steps": self.steps, "ratios": list(self.ratios)}

    def own_state(self) -> dict[str, Any]:
        """Return the state that differs by rank."""
        return {"ms": self._ms, "samples": self._samples}

    def load_state_dict(self, state: dict[str, Any], own: Sequence[dict[str, Any]]) -> None:
        """Restore a saved position; ``own`` contains the `own_state` of each saved rank."""
        self.position, self.steps = state["position"], state["steps"]
        if len(state["ratios"]) == self.ranks.world:
            self.ratios = tuple(state["ratios"])
        if self.ranks.rank < len(own):
            self._ms, self._samples = own[self.ranks.rank]["ms"], own[self.ranks.rank]["samples"]


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

"""Settings of policies, and the result of one averaging."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flodl.checked_fields import Values, check_fields, choice, number, of_kind, pair, whole
from flodl.distributed.cadence import ElChe

_SHARES = of_kind(
    "a tuple with a part for each rank",
    lambda value: isinstance(value, tuple) and bool(value) and all(number(least=0).fits(part) for part in value),
)
_FACTORS = of_kind(
    "a map of ranks to factors, such as {1: 2.0}",
    lambda value: (
        isinstance(value, Mapping)
        and all(whole(0).fits(rank) and number(above=0).fits(factor) for rank, factor in value.items())
    ),
)
KNOB_VALUES: Mapping[str, Values] = {
    "backend": choice("nccl", "cpu") | None,
    "shares": choice("measured") | _SHARES | None,
    "anchor": whole(1),
    "max_anchor": whole(1) | None,
    "overhead_target": number(above=0),
    **dict.fromkeys(("max_batch_diff", "max_overshoot"), whole(0) | None),
    "speed_hint": pair("a slow rank and a ratio of 1 or more, such as (1, 2.5)", whole(0), number(least=1)) | None,
    "divergence_threshold": number(above=0) | None,
    **dict.fromkeys(("check_every", "max_restarts"), whole(0)),
    "slowdown": _FACTORS,
    "timeout_s": number(above=0),
}
"""Allowed values of each field of `Knobs`."""


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """Settings of several ranks and of policies; see `flodl.distributed.cadence` for ElChe.

    Attributes:
        backend: ``"nccl"`` averages on the devices, ``"cpu"`` through host memory; None uses the default of the device.
        shares: Sync only: fixed part of each batch per rank; ``"measured"`` follows speed; None gives equal shares.
        anchor: batches of the slowest rank in the first round.
        max_anchor: upper bound of the anchor.
        overhead_target: target of sync time over compute time.
        max_batch_diff: how many batches a rank may be ahead of the slowest in one round, and how much a
            count may change in one round; None for no bound, 0 for lockstep.
        max_overshoot: Async: batches that a rank may do beyond its count before it waits; None adapts.
        speed_hint: ``(slow rank, ratio)`` known before the first measurement.
        divergence_threshold: see `DivergenceGuard`; None disables the guard.
        check_every: Sync: compare the parameters of all ranks bit by bit every so many steps; 0 never.
        slowdown: ``{rank: factor}``, simulated slow ranks for experiments.
        timeout_s: time that a collective waits for a live rank.
        max_restarts: how many times the ranks of a run are restarted after a failure.

    Raises:
        TrainError: a value of the wrong kind or out of range; ``problems`` lists all of them.
    """

    backend: str | None = None
    shares: str | tuple[float, ...] | None = None
    anchor: int = 10
    max_anchor: int | None = None
    overhead_target: float = 0.10
    max_batch_diff: int | None = None
    max_overshoot: int | None = None
    speed_hint: tuple[int, float] | None = None
    divergence_threshold: float | None = 0.05
    check_every: int = 200
    slowdown: Mapping[int, float] = field(default_factory=dict)
    timeout_s: float = 600.0
    max_restarts: int = 0

    def __post_init__(self) -> None:
        """Refuse invalid values before ranks are started."""
        check_fields(self, KNOB_VALUES, "settings")


@dataclass(frozen=True)
class Round:
    """Result of one averaging, equal on all ranks except for their own times.

    Attributes:
        number: counted from 1.
        batches: turns of each rank since the last one.
        work_ms: compute time of each rank in them.
        sync_ms: this rank's time in the averaging, including the wait.
        wait_ms: the part of it until the last rank arrived.
        divergence: the largest known drift of the ranks.
        held: True if all ranks are equal now and none has work in progress.
        all_dry: True if no turn of the epoch is left on any rank.
        flags: sums over ranks of their flags.
        cadence: the controller after it.
    """

    number: int
    batches: tuple[int, ...]
    work_ms: tuple[float, ...]
    sync_ms: float
    wait_ms: float
    divergence: float
    held: bool
    all_dry: bool
    flags: tuple[float, ...]
    cadence: ElChe

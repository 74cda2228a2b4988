"""Learning rate schedules with the names of transformers.

The schedules are `flodl.train.warmed_up`, bit-equal to transformers; others are in
`flodl.train.schedule`. `flodl_hf.training.option_checks` lists the options of each schedule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flodl.errors import ConfigError
from flodl.train.schedule import OneCycle, Plateau
from flodl.train.warmed_up import (
    CosineFloor,
    CosineRestarts,
    InverseSqrt,
    Polynomial,
    WarmedUp,
    WarmupStableDecay,
)


def warmup_steps(warmup: float, total: int) -> int:
    """Return the steps of the rise: a share of all steps below 1, else a number of steps."""
    return math.ceil(total * warmup) if warmup < 1 else int(warmup)


def make_schedule(
    kind: Any,
    base: float,
    warmup: float,
    total: int,
    *,
    lower_is_better: bool,
    metric: str = "loss",
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Return the schedule of a run of ``total`` steps; an object with ``lr(step)`` is returned as it is.

    Args:
        kind: a name of `flodl_hf.training.option_checks.SCHEDULES`.
        base: the highest rate.
        warmup: see `warmup_steps`.
        lower_is_better: whether lower values of ``metric`` are better.
        metric: the figure that a plateau reads.
        options: further options of the schedule.

    Raises:
        ConfigError: values that the curve cannot have.
    """
    if not isinstance(kind, str):
        return kind
    given, rise = dict(options or {}), warmup_steps(warmup, total)
    if kind == "one_cycle":
        return OneCycle(base, total, warmup_fraction=rise / total if warmup else 0.3, **given)
    if kind == "plateau":
        return Plateau(base, **{"patience": 1, **given}, mode="min" if lower_is_better else "max", metric=metric)
    if kind == "cosine" and given:
        if "end" in given:
            given["floor"] = given.pop("end") / base
        return CosineFloor(base, total, rise, **given)
    if kind in ("cosine_with_restarts", "polynomial"):
        return (Polynomial if kind == "polynomial" else CosineRestarts)(base, total, rise, **given)
    if kind == "inverse_sqrt":
        return InverseSqrt(base, rise, **given)
    if kind == "warmup_stable_decay":
        return _three_stages(base, rise, total, given)
    # A constant rate does not depend on the length of a run, which may change when the run is resumed.
    return WarmedUp(kind, base, rise, rise if kind == "constant" else total)


def _three_stages(base: float, rise: int, total: int, options: dict[str, Any]) -> WarmupStableDecay:
    decay = warmup_steps(options.pop("decay", 0.1), total)
    stable = options.pop("stable", None)
    if stable is None and rise + decay > total:
        raise ConfigError(
            f"schedule: {rise} steps of warmup and {decay} of decay are more than the {total} steps of the run; "
            "expected fewer. Lower warmup, or decay in schedule_options",
            problems=["schedule_options"],
        )
    return WarmupStableDecay(base, rise, total - rise - decay if stable is None else stable, decay, **options)

"""Sync against one rank: is the curve the same, and how much faster is it?"""

from __future__ import annotations

from typing import Any

from benchmarks.ddp.cases import Case
from benchmarks.ddp.runs import Bench, speed, train

__all__ = ["equal_curves", "weak_scaling"]


def equal_curves(bench: Bench, case: Case, data: Any, *, steps: int, batch: int) -> dict[str, Any]:
    """Return the largest relative difference of step losses between Sync over all ranks and one rank.

    Both take the same global batch from the same order, in float32.
    """
    options: dict[str, Any] = {"batch": batch, "max_steps": steps, "num_epochs": 10_000, "judged": False}
    alone = train(bench, bench.alone, case, data, **options)["step_losses"]
    together = train(bench, bench.ranks, case, data, policy="sync", **options)["step_losses"]
    apart = [abs(a - b) / abs(a) for a, b in zip(alone, together, strict=True)]
    return {
        "model": case.name,
        "steps": len(apart),
        "batch": batch,
        "first_loss": alone[0],
        "last_loss": alone[-1],
        "last_loss_sync": together[-1],
        "largest_relative_difference": max(apart),
        "largest_in_the_first_10": max(apart[:10]),
    }


def weak_scaling(
    bench: Bench, case: Case, data: Any, *, steps: int, batch: int, precision: str = "fp32"
) -> list[dict[str, Any]]:
    """Return samples per second of one rank, and of all under Sync, with ``batch`` rows of a step for each rank."""
    rows = []
    for ranks in (bench.alone, bench.ranks):
        rate = speed(ranks, case, data, steps, batch, precision=precision)
        rates = [row[0] for row in bench.ranks.table([rate])]
        # alone, all measure at once: the first one's figure stands for one rank
        rows.append({"model": case.name, "precision": precision, "batch": batch, "ranks": ranks.world})
        rows[-1]["samples_per_s"] = rates[0]
        rows[-1]["scaling"] = rates[0] / rows[0]["samples_per_s"]
        rows[-1]["efficiency"] = rows[-1]["scaling"] / ranks.world
    return rows

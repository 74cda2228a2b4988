"""Sync against one rank: is the curve the same, and how much faster is it?"""

from __future__ import annotations

from typing import Any

from benchmarks.ddp.cases import Case
from benchmarks.ddp.runs import Bench, train, warm_up
from flodl.distributed import Ranks

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
    """Return samples per second of one rank, and of all under Sync with gradients sent late and early.

    Each rank has ``batch`` rows of a step. The first third of the steps is not counted.
    """
    warm_up(bench, case, data)
    rows = []
    for name, ranks, overlap in (
        ("one rank", bench.alone, True),
        ("sent after backward", bench.ranks, False),
        ("sent during backward", bench.ranks, True),
    ):
        if ranks.solo and name != "one rank":
            continue
        rate = _rate(bench, ranks, case, data, steps, batch, precision, overlap)
        rates = [row[0] for row in bench.ranks.table([rate])]
        # alone, all measure at once: the first one's figure stands for one rank
        rows.append({"model": case.name, "how": name, "precision": precision, "batch": batch, "ranks": ranks.world})
        rows[-1]["samples_per_s"] = rates[0]
        rows[-1]["scaling"] = rates[0] / rows[0]["samples_per_s"]
        rows[-1]["efficiency"] = rows[-1]["scaling"] / ranks.world
    return rows


def _rate(
    bench: Bench, ranks: Ranks, case: Case, data: Any, steps: int, batch: int, precision: str, overlap: bool
) -> float:
    from flodl.train import StepDone
    from flodl.train.builder import Plan
    from flodl.train.settings import make_settings

    settings = make_settings(
        {
            "num_epochs": 10_000, "max_steps": steps, "batch_size": batch * ranks.world, "precision": precision,
            "policy": "sync", "save_epochs": False,
        }
    )  # fmt: skip
    trainer = Plan(lambda _: case.make(data[0]), case.optimizer, case.step, settings, data=data[0]).trainer(ranks)
    trainer.step_._reduce.early = overlap
    times: list[float] = []
    trainer.events.subscribe(lambda event: times.append(event.at_s), StepDone)
    ranks.barrier()
    trainer.fit()
    first = steps // 3
    return batch * ranks.world * (steps - 1 - first) / (times[-1] - times[first])

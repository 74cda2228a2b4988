"""One training run and its figures, and the runs that make the two tables of modes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch

from benchmarks.ddp.cases import Case
from benchmarks.ddp.idle import add_to_file, summary
from flodl.distributed import Ranks
from flodl.monitor import Timeline
from flodl.train import EpochMetrics, EvalDone, StepDone, Synced, Trainer

__all__ = ["MODES", "Bench", "speed", "table_of_modes", "train", "warm_up"]

MODES = ("solo", "nccl-sync", "nccl-cadence", "nccl-async", "cpu-sync", "cpu-cadence", "cpu-async")


@dataclass(frozen=True)
class Bench:
    """What all runs share.

    Attributes:
        ranks: this process among all.
        batch: rows of a batch of one rank.
        nap_s: each step sleeps so long, which stands for compute where ranks share processors.
        out: folder for timelines.
        settings: further settings of the trainer.
    """

    ranks: Ranks
    batch: int = 64
    nap_s: float = 0.0
    out: Path | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def alone(self) -> Ranks:
        """This process as the only rank."""
        return Ranks(device=self.ranks.device)


def train(
    bench: Bench,
    ranks: Ranks,
    case: Case,
    data: tuple[Any, Any],
    *,
    seed: int = 0,
    batch: int | None = None,
    timeline: str | None = None,
    judged: bool = True,
    **settings: Any,
) -> dict[str, Any]:
    """Return the figures of one run, those of all ranks on each of them.

    Times are those of training: evaluation is left out. A rank is idle while it neither computes a step nor averages:
    waiting, the optimiser, fetching data and Python count as idle.
    """
    step = napping(case.step, bench.nap_s)
    if case.rates is not None and "schedule" not in settings:
        epochs = settings.get("num_epochs") or case.epochs
        settings["schedule"] = partial(_rates, case, len(data[0]) * epochs // bench.batch)
    chosen = {
        "num_epochs": case.epochs,
        "batch_size": batch or bench.batch,
        "seed": 1000 + seed,
        "save_epochs": False,
        "timeline": timeline,
        "progress": False,
        **bench.settings,
        **settings,
    }
    builder = Trainer.builder(lambda _: case.make(data[0]), case.optimizer, step).dataset(data[0]).set(**chosen)
    if judged and data[1] is not None:
        builder.evaluate(case.judge, data[1], batch_size=512, every=chosen.get("eval_every"))
    notes: list[Any] = []
    trainer = builder.subscribe(notes.append, StepDone, Synced, EpochMetrics, EvalDone).trainer(ranks)
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
    ranks.barrier()
    trainer.fit()
    steps = [n for n in notes if isinstance(n, StepDone)]
    rounds = [n for n in notes if isinstance(n, Synced)]
    epochs = [n for n in notes if isinstance(n, EpochMetrics)]
    own = {
        "busy_ms": sum(s.compute_ms for s in steps) + sum(r.sync_ms - r.wait_ms for r in rounds),
        "wait_ms": sum(r.wait_ms for r in rounds),
        "samples": sum(s.samples for s in steps),
        "steps": len(steps),
    }
    each = ranks.gather(own)
    parts = None if trainer.timeline is None else ranks.gather(trainer.timeline.to_dict())
    activity = {} if parts is None else summary(Timeline.merge(parts))
    if timeline is not None and ranks.rank == 0:
        add_to_file(f"{timeline}.json")
    wall_ms = sum(e.epoch_ms for e in epochs) or sum(s.wall_ms for s in steps)
    judgements = [n for n in notes if isinstance(n, EvalDone)]
    samples = sum(row["samples"] for row in each)
    return {
        "seed": seed,
        "loss": epochs[-1].loss if epochs else steps[-1].loss,
        "losses": [e.loss for e in epochs],
        "step_losses": [s.loss for s in steps],
        "held_out": dict(judgements[-1].metrics) if judgements else {},
        "seconds": wall_ms / 1e3,
        "epoch_seconds": [e.epoch_ms / 1e3 for e in epochs],
        "samples_per_s": samples / wall_ms * 1e3 if wall_ms else 0.0,
        "syncs": len(rounds) if rounds else (trainer.policy.steps if not ranks.solo else 0),
        "steps": [row["steps"] for row in each],
        "idle": [max(0.0, 1 - row["busy_ms"] / wall_ms) if wall_ms else 0.0 for row in each],
        "idle_shares": activity.get("idle_shares", {}),
        "device_use": {name: mean for name, mean in activity.get("means", {}).items() if name.endswith("/util")},
        "waiting": [row["wait_ms"] / wall_ms if wall_ms else 0.0 for row in each],
        "anchor": rounds[-1].anchor if rounds else None,
        "counts": list(rounds[-1].counts) if rounds else None,
        "share": [row["samples"] / samples if samples else 0.0 for row in each],
        "mean_sync_ms": fmean(r.sync_ms - r.wait_ms for r in rounds) if rounds else None,
    }


def _rates(case: Case, batches: int, world: int) -> Any:
    """Return the rates of a run of so many batches, which ``world`` ranks share."""
    assert case.rates is not None
    return case.rates(max(1, batches // world))


def napping(step: Callable[..., Any], nap_s: float) -> Callable[..., Any]:
    """Return a step that sleeps besides."""
    if not nap_s:
        return step

    def slower(model: Any, batch: Any) -> Any:
        time.sleep(nap_s)
        return step(model, batch)

    return slower


def warm_up(bench: Bench, case: Case, data: tuple[Any, Any]) -> None:
    """Take a few steps, so that no measured run pays for the first kernels."""
    quiet = Bench(bench.ranks, bench.batch)
    train(quiet, bench.alone, case, data, max_steps=3, judged=False)
    train(quiet, bench.ranks, case, data, max_steps=3, judged=False, policy="sync")


def speed(ranks: Ranks, case: Case, data: tuple[Any, Any], steps: int, batch: int, **settings: Any) -> float:
    """Return samples per second under Sync, of all ``ranks``; the first third of the steps is not counted."""
    builder = Trainer.builder(lambda _: case.make(data[0]), case.optimizer, case.step).dataset(data[0], drop_last=True)
    builder.set(
        num_epochs=10_000, max_steps=steps, batch_size=batch * ranks.world, policy="sync", save_epochs=False,
        progress=False, **settings,
    )  # fmt: skip
    wall_ms: list[float] = []
    builder.subscribe(lambda event: wall_ms.append(event.wall_ms), StepDone)
    ranks.barrier()
    builder.trainer(ranks).fit()
    counted = wall_ms[steps // 3 :]
    return batch * ranks.world * len(counted) / sum(counted) * 1e3


def table_of_modes(
    bench: Bench,
    cases: Sequence[Case],
    folder: Path | None,
    *,
    modes: Sequence[str],
    seeds: int,
    slow: dict[int, float] | None = None,
    name: str = "modes",
    **settings: Any,
) -> list[dict[str, Any]]:
    """Return a row for each case and mode.

    Args:
        slow: ``{rank: factor}``: ranks that are made slower. Rows then also say what was to be had at most: the sum of
            the speeds that ranks have alone, measured as they are.
    """
    ranks, slow = bench.ranks, slow or {}
    rows: list[dict[str, Any]] = []
    for case in cases:
        data = case.data(folder)
        warm_up(bench, case, data)
        alone: list[dict[str, Any]] = []
        for mode in modes:
            found = []
            backend, _, policy = mode.partition("-")
            for seed in range(seeds):
                place = f"{bench.out}/{name}/{case.name}/{mode}" if bench.out is not None and seed == 0 else None
                if mode == "solo":
                    # Seeds are shared out; each rank is alone with its own, and the first one's time counts.
                    if seed % ranks.world == ranks.rank:
                        found.append(train(bench, bench.alone, case, data, seed=seed, timeline=place, **settings))
                    continue
                size = bench.batch * (ranks.world if policy == "sync" else 1)
                more = {"policy": policy, "backend": backend, "slowdown": slow, **settings}
                found.append(train(bench, ranks, case, data, seed=seed, batch=size, timeline=place, **more))
            if mode == "solo":
                found = [run for part in ranks.gather(found) for run in part]
                alone = sorted(found, key=lambda run: run["seed"])
                found = alone
            about = {"model": case.name, "mode": mode, "rows": len(data[0]), "batch": bench.batch}
            about |= {
                "epochs": settings.get("num_epochs") or case.epochs,
                "reference": case.reference if len(data[0]) >= 8000 else None,
            }
            rows.append({**about, "runs": found, **_summary(found, alone, case.figure)})
            _say(ranks, rows[-1])
            gc.collect()
        if slow and alone:
            _add_ideal(bench, case, data, slow, rows, settings)
    return rows


def _summary(runs: list[dict[str, Any]], alone: list[dict[str, Any]], figure: str | None) -> dict[str, Any]:
    def spread(values: list[float]) -> tuple[float, float]:
        return fmean(values), stdev(values) if len(values) > 1 else 0.0

    last = runs[-1]
    seconds = median(run["seconds"] for run in runs)
    return {
        "loss": spread([run["loss"] for run in runs]),
        "eval_loss": spread([run["held_out"]["eval_loss"] for run in runs if run["held_out"]] or [float("nan")]),
        "figure": spread([run["held_out"][figure] for run in runs if run["held_out"]] or [0.0]) if figure else None,
        "seconds": seconds,
        "speed": median(run["seconds"] for run in alone) / seconds if alone else None,
        "later": _later(alone) / _later(runs) if alone and _later(runs) else None,
        # Only the first run of a mode has a timeline.
        **{key: next((run[key] for run in runs if run[key]), {}) for key in ("idle_shares", "device_use")},
        **{key: last[key] for key in ("syncs", "idle", "waiting", "anchor", "counts", "share", "mean_sync_ms")},
    }


def _later(runs: list[dict[str, Any]]) -> float:
    """Return the seconds after the first epoch, in which kernels are chosen and steps are recorded."""
    return median(sum(run["epoch_seconds"][1:]) for run in runs)


def _add_ideal(
    bench: Bench, case: Case, data: tuple[Any, Any], slow: dict[int, float], rows: list[dict[str, Any]], settings: Any
) -> None:
    """Measure each rank alone, as slow as it is made, and write the sum of speeds over that of the first."""
    step = napping(case.step, bench.nap_s)
    own = slow.get(bench.ranks.rank, 1.0)
    more = {k: v for k, v in settings.items() if k in ("precision", "capture")}
    rate = speed(bench.alone, replace(case, step=step), data, 45, bench.batch, slowdown={0: own}, **more)
    speeds = [row[0] for row in bench.ranks.table([rate])]
    for row in rows:
        if row["model"] == case.name:
            row["at_most"] = sum(speeds) / speeds[0]
    _say(bench.ranks, {"model": case.name, "alone": [round(s, 1) for s in speeds], "at most": sum(speeds) / speeds[0]})


def _say(ranks: Ranks, row: dict[str, Any]) -> None:
    if ranks.rank == 0:
        brief = {k: v for k, v in row.items() if k not in ("runs",)}
        print(" ".join(f"{k}={_brief(v)}" for k, v in brief.items()), flush=True)


def _brief(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return "/".join(_brief(v) for v in value)
    return str(value)

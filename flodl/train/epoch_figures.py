"""Figures of an epoch: sums and counts of one rank, and means over all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from flodl.train.events import EpochMetrics
from flodl.train.step.outcome import StepResult

__all__ = ["Tally", "epoch_metrics", "means"]


@dataclass
class Tally:
    """Running sums of one rank over the finished part of an epoch.

    Attributes:
        loss_sum: sum of losses; under Sync of all ranks.
        count: number of items of the losses; under Sync of all ranks.
        samples: samples of this rank.
        compute_ms: time in forward and backward.
        wall_ms: time in the epoch.
        sums: ``name: [sum, count]`` of metrics of this rank.
        observed: ``name: [sum, count]`` of values watched inside of the model.
    """

    loss_sum: float = 0.0
    count: float = 0.0
    samples: int = 0
    compute_ms: float = 0.0
    wall_ms: float = 0.0
    sums: dict[str, list[float]] = field(default_factory=dict)
    observed: dict[str, list[float]] = field(default_factory=dict)

    def add(self, result: StepResult, wall_ms: float) -> None:
        """Add one step; a skipped step adds no metrics, and an unknown or infinite loss is not added."""
        if result.applied and not math.isnan(result.loss):
            self.loss_sum += result.loss * result.count
            self.count += result.count
        self.samples += result.samples
        self.compute_ms += result.compute_ms
        self.wall_ms += wall_ms
        if result.count and not result.applied:
            return  # a NaN would be the result of the whole epoch
        for name, (total, count) in result.metrics.items():
            self.record(name, total, count)
        for name, (total, count) in result.observed.items():
            _add(self.observed, name, total, count)

    def record(self, name: str, total: float, count: float = 1.0) -> None:
        """Add to the figure ``name``."""
        _add(self.sums, name, total, count)

    def take_over(self, other: Tally, *, shared_loss: bool) -> None:
        """Add the sums of a rank that no longer exists; under Sync its loss already includes all ranks."""
        if not shared_loss:
            self.loss_sum += other.loss_sum
            self.count += other.count
        self.samples += other.samples
        for mine, theirs in ((self.sums, other.sums), (self.observed, other.observed)):
            for name, (total, count) in theirs.items():
                _add(mine, name, total, count)

    def to_dict(self) -> dict[str, Any]:
        """Return the sums as JSON values."""
        return asdict(self)


def _add(sums: dict[str, list[float]], name: str, total: float, count: float) -> None:
    kept = sums.get(name)
    if kept is None:
        sums[name] = [0.0 + total, 0.0 + count]
    else:
        kept[0] += total
        kept[1] += count


def means(parts: Sequence[Mapping[str, Any]], kind: str) -> dict[str, float]:
    """Return means over all ranks, weighted by count.

    Args:
        parts: tallies of all ranks; old checkpoints lack ``observed``.
        kind: ``"sums"`` or ``"observed"``.
    """
    tables = [part.get(kind, {}) for part in parts]
    found = {}
    for name in dict.fromkeys(name for table in tables for name in table):
        total = sum(table.get(name, (0.0, 0.0))[0] for table in tables)
        weight = sum(table.get(name, (0.0, 0.0))[1] for table in tables)
        found[name] = total / weight if weight else float("nan")
    return found


def epoch_metrics(
    parts: Sequence[dict[str, Any]], *, shared_loss: bool, epoch: int, step: int, evaluated: dict[str, float]
) -> EpochMetrics:
    """Return the figures of an epoch from the tallies of all ranks.

    Args:
        parts: tallies by rank.
        shared_loss: whether the loss of each rank already includes all ranks (Sync).
        epoch: the epoch.
        step: steps that are done.
        evaluated: figures of the last evaluation.
    """
    losses = parts[:1] if shared_loss else parts
    count = sum(part["count"] for part in losses)
    samples = sum(part["samples"] for part in parts)
    figures = means(parts, "sums")
    return EpochMetrics(
        epoch=epoch,
        step=step,
        loss=sum(part["loss_sum"] for part in losses) / count if count else float("nan"),
        metrics={name: figures[name] for name in sorted(figures)},
        samples=samples,
        epoch_ms=max(part["wall_ms"] for part in parts),
        share=tuple(part["samples"] / samples if samples else 0.0 for part in parts),
        throughput=tuple(part["samples"] / part["compute_ms"] if part["compute_ms"] else 0.0 for part in parts),
        eval=evaluated,
        by_rank=tuple(_of_rank(part, shared_loss) for part in parts),
    )


def _of_rank(part: Mapping[str, Any], shared_loss: bool) -> dict[str, float]:
    """Return the figures of one rank."""
    loss = {} if shared_loss or not part["count"] else {"loss": part["loss_sum"] / part["count"]}
    times = {name: float(part[name]) for name in ("samples", "compute_ms", "wall_ms")}
    return {**means([part], "sums"), **times, **loss}

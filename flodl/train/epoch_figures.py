"""Figures of an epoch: sums and counts of one rank, and means over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flodl.train.events import EpochMetrics


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

"""Totals of an epoch, and reports of steps: immediately, or in windows while their figures are copied from the device.

A step that was decided on the device leaves a row of numbers there. Rows are kept until a window is full and then
copied to the host together, without waiting. The steps of a window are reported in order when it has arrived. The end
of an epoch, an evaluation and a checkpoint need all figures and call `settle`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from flodl.train.events import EpochMetrics, Events, Observed, StepDone, Warned
from flodl.train.schedule import Rates
from flodl.train.step.outcome import Outcome, StepResult

FIGURES = ("loss", "count", "samples", "grad_norm", "compute_ms")


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
            _add(self.sums, name, total, count)
        for name, (total, count) in result.observed.items():
            _add(self.observed, name, total, count)

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


def means(tables: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Return means over all ranks by name, weighted by count; a table of each rank has sums and counts."""
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
    figures = means([part["sums"] for part in parts])
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
        by_rank=tuple(
            {
                **means([part["sums"]]),
                **{name: float(part[name]) for name in ("samples", "compute_ms", "wall_ms")},
                **({} if shared_loss or not part["count"] else {"loss": part["loss_sum"] / part["count"]}),
            }
            for part in parts
        ),
    )


def _add(sums: dict[str, list[float]], name: str, total: float, count: float) -> None:
    pair = sums.setdefault(name, [0.0, 0.0])
    pair[0] += total
    pair[1] += count


@dataclass
class _Entry:
    result: StepResult
    outcome: Outcome | None
    step: int
    epoch: int
    lr: float
    wall_ms: float
    at_s: float = field(default_factory=time.monotonic)


class StepLog:
    """Report steps to the totals of the epoch and to subscribers of events.

    Args:
        events: receives the reports.
        every: steps in a window.
        on_nan: ``"stop"`` raises when a step is reported that was not finite.

    Attributes:
        before: called before all steps are reported.
        losses: losses of all reported steps, and of those before a resume.
    """

    def __init__(self, events: Events, *, every: int, on_nan: str) -> None:
        self.events, self.every, self.on_nan = events, max(1, every), on_nan
        self._open: list[_Entry] = []
        self._sent: deque[_Window] = deque()
        self._start: torch.cuda.Event | None = None
        self.before: Callable[[], object] = lambda: None
        self.losses: list[float] = []

    def note(self, tally: Tally, result: StepResult, *, step: int, epoch: int, rates: Rates, wall_ms: float) -> None:
        """Add one step, and report all steps with known figures.

        Raises:
            TrainError: a step that is reported now was not finite.
        """
        outcome = result.outcome
        is_read = outcome is not None or self.events.wants[StepDone]
        entry = _Entry(result, outcome, step, epoch, rates.first if is_read else 0.0, wall_ms)
        if outcome is None:
            self._report(tally, entry)
            return
        self._open.append(entry)
        if len(self._open) >= self.every:
            self._send()
        while self._sent and (self._sent[0].arrived() if result.arrived is None else result.arrived):
            self._report_window(tally, self._sent.popleft())
            if result.arrived:
                break  # ranks agreed on one window

    def arrived(self) -> bool:
        """Return True if the oldest pending figures are on the host."""
        return bool(self._sent) and self._sent[0].arrived()

    def begin(self, device: torch.device) -> None:
        """Record the start of a step, to measure the time of the device."""
        if self._start is None and device.type == "cuda":
            self._start = torch.cuda.Event(enable_timing=True)
            self._start.record()

    def settle(self, tally: Tally) -> None:
        """Report all steps; waits for the device.

        Raises:
            TrainError: a step was not finite.
        """
        self.before()
        if self._open:
            self._send()
        while self._sent:
            self._report_window(tally, self._sent.popleft())
        self._start = None  # time between windows is no step's time

    def _send(self) -> None:
        window = _Window(self._open, self._start)
        self._open, self._start = [], window.end
        self._sent.append(window)

    def _report_window(self, tally: Tally, window: _Window) -> None:
        for entry, values, compute_ms in window.read():
            stop = (self.events.rank, entry.step) if self.on_nan == "stop" else None
            entry.result.settle(values, compute_ms, stop=stop)
            self._report(tally, entry)

    def _report(self, tally: Tally, entry: _Entry) -> None:
        result, events = entry.result, self.events
        tally.add(result, entry.wall_ms)
        self.losses.append(result.loss)
        if not result.applied:
            message = f"step {entry.step}: not applied, {result.reason}"
            events.emit(Warned(rank=events.rank, step=entry.step, message=message))
        about: Any = {"at_s": entry.at_s, "rank": events.rank, "step": entry.step, "epoch": entry.epoch}
        if events.wants[StepDone]:
            figures: Any = {name: getattr(result, name) for name in FIGURES}
            wall_ms = entry.wall_ms if entry.outcome is None else result.compute_ms
            metrics = {name: total / count for name, (total, count) in result.metrics.items() if count}
            more: Any = {"lr": entry.lr, "wall_ms": wall_ms, "skipped": not result.applied, "metrics": metrics}
            events.emit(StepDone(**about, **figures, **more))
        if result.observed and events.wants[Observed]:
            values = {name: total / weight for name, (total, weight) in result.observed.items() if weight}
            events.emit(Observed(**about, scope="step", values=values))


class _Window:
    """Steps with figures that are copied together."""

    def __init__(self, entries: list[_Entry], start: torch.cuda.Event | None) -> None:
        self.entries, self.start = entries, start
        rows = [entry.outcome.row for entry in entries if entry.outcome is not None]
        self.widths = [row.numel() for row in rows]
        if any(row.dtype != rows[0].dtype for row in rows):
            rows = [row.to(torch.float64) for row in rows]
        self.values = flat = torch.cat(rows)
        self.end: torch.cuda.Event | None = None
        if flat.is_cuda:
            self.values = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            self.values.copy_(flat, non_blocking=True)
            self.end = torch.cuda.Event(enable_timing=True)
            self.end.record()

    def arrived(self) -> bool:
        """Return True if the figures are on the host."""
        return self.end is None or self.end.query()

    def read(self) -> Iterator[tuple[_Entry, list[float], float]]:
        """Yield each step, its figures and the mean time of a step on the device; waits for them."""
        compute_ms = 0.0
        if self.end is None:
            compute_ms = sum(entry.wall_ms for entry in self.entries) / len(self.entries)
        else:
            self.end.synchronize()
            if self.start is not None:
                compute_ms = self.start.elapsed_time(self.end) / len(self.entries)
        values = iter(self.values.tolist())
        for entry, width in zip(self.entries, self.widths, strict=True):
            yield entry, [next(values) for _ in range(width)], compute_ms

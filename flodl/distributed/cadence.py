"""ElChe: how many batches each rank does between two averagings, as pure functions.

The name refers to a column of travellers that keeps the pace of its slowest member: the slowest rank does ``anchor``
batches, every other rank as many as fit into the same time, and the anchor grows until communication costs no more than
a set part of the compute. Processes, clocks and tensors are outside this module: `flodl.distributed.local_steps` passes
measurements to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

DEAD_ZONE = 0.10
"""A count changes only when the new target differs from it by more than this part of it."""


def rounded(value: float) -> int:
    """Return ``value`` rounded half away from zero (Python's own rule rounds half to even)."""
    return math.floor(value + 0.5)


@dataclass(frozen=True)
class ElChe:
    """The state of the controller; every method returns a new one.

    Attributes:
        counts: batches that each rank does in one round.
        ms: smoothed milliseconds of one batch on each rank, 0 while unknown.
        anchor: batches of the slowest rank in one round.
        calibrated: whether any timing has been reported.
        overhead_target: upper bound of sync time over compute time, in [0.01, 0.50].
        min_anchor: good timings never lower the anchor below this value, only nudges do.
        max_anchor: the anchor is never raised above this.
        max_batch_diff: largest change of one count in one update once calibrated; None for no bound.
    """

    counts: tuple[int, ...]
    ms: tuple[float, ...]
    anchor: int
    calibrated: bool = False
    overhead_target: float = 0.10
    min_anchor: int = 1
    max_anchor: int = 200
    max_batch_diff: int | None = None

    @classmethod
    def start(
        cls,
        world: int,
        anchor: int = 10,
        *,
        overhead_target: float = 0.10,
        max_anchor: int | None = None,
        max_batch_diff: int | None = None,
        speed_hint: tuple[int, float] | None = None,
    ) -> ElChe:
        """Return the controller before any measurement: every rank does ``anchor`` batches.

        Args:
            world: number of ranks.
            anchor: batches of the slowest rank in the first round.
            overhead_target: target of sync time over compute time, limited to [0.01, 0.50].
            max_anchor: upper bound of the anchor, at least 1; None for the larger of 200 and ``anchor``.
            max_batch_diff: largest change of a count in one update; None for no bound.
            speed_hint: ``(slow rank, ratio)``: every other rank is ``ratio`` times as fast.
        """
        most = max(200, anchor) if max_anchor is None else max(1, max_anchor)
        anchor = min(anchor, most)
        counts = [anchor] * world
        if speed_hint is not None:
            slow, ratio = speed_hint
            counts = [anchor if rank == slow else max(1, rounded(anchor * ratio)) for rank in range(world)]
        target = min(max(overhead_target, 0.01), 0.50)
        return cls(tuple(counts), (0.0,) * world, anchor, False, target, anchor, most, max_batch_diff)

    def report_timing(self, wall_ms: Sequence[float], batches: Sequence[int], sync_ms: float = 0.0) -> ElChe:
        """Return the controller after one round.

        Args:
            wall_ms: compute time of each rank in this round, without waiting and communication.
            batches: batches that each rank did in this round.
            sync_ms: time that the averaging took.
        """
        ms = list(self.ms)
        for rank, (wall, count) in enumerate(zip(wall_ms, batches, strict=True)):
            if count <= 0 or wall <= 0:
                continue
            new = wall / count
            if ms[rank] <= 0:
                ms[rank] = new
            else:
                alpha = min(max(abs(new - ms[rank]) / ms[rank], 0.1), 0.8)
                ms[rank] = alpha * new + (1 - alpha) * ms[rank]
        if max(ms) <= 0:
            return replace(self, ms=tuple(ms))

        anchor, compute = self.anchor, max(wall_ms)
        if compute > 0 and sync_ms > 0:
            overhead = sync_ms / compute
            if overhead > self.overhead_target:
                wanted = math.ceil(anchor * overhead / self.overhead_target)
                anchor = min(max(wanted, self.min_anchor), self.max_anchor)
            elif overhead < self.overhead_target / 2 and anchor > self.min_anchor:
                anchor -= 1
        return replace(self, ms=tuple(ms), anchor=anchor)._recounted()

    def nudge_anchor_down(self, factor: float) -> ElChe:
        """Return a controller that averages more often: anchor times ``factor``, limited to [0.1, 1].

        Only this method may go below ``min_anchor``: it reacts to diverging ranks, not to timings.
        """
        factor = min(max(factor, 0.1), 1.0)
        anchor = min(self.anchor, max(1, math.ceil(self.anchor * factor)))
        changed = replace(self, anchor=anchor)
        if max(self.ms) <= 0:
            scaled = tuple(max(1, rounded(n * anchor / self.anchor)) for n in self.counts)
            return replace(changed, counts=scaled)
        return changed._recounted()

    def _recounted(self) -> ElChe:
        slow = max(self.ms)
        counts = []
        for current, ms in zip(self.counts, self.ms, strict=True):
            same = ms <= 0 or abs(ms - slow) < 1e-6
            target = self.anchor if same else max(1, rounded(self.anchor * slow / ms))
            if self.calibrated and abs(target - current) <= DEAD_ZONE * current:
                target = current
            elif self.calibrated and self.max_batch_diff is not None:
                low, high = current - self.max_batch_diff, current + self.max_batch_diff
                target = max(1, min(max(target, low), high))
            counts.append(target)
        return replace(self, counts=tuple(counts), calibrated=True)

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> ElChe:
        """Return the controller that `to_dict` described."""
        return cls(**{**state, "counts": tuple(state["counts"]), "ms": tuple(state["ms"])})


@dataclass(frozen=True)
class DivergenceGuard:
    """Monitor how far ranks drift apart between averagings; `observe` returns the next state and a verdict.

    The figure of one averaging is the largest over ranks of ``norm(own - average) / norm(average)``.

    Attributes:
        threshold: smaller drift has no consequence.
        recent: the last figures, oldest first, at most five.
    """

    threshold: float = 0.05
    recent: tuple[float, ...] = ()

    def observe(self, divergence: float) -> tuple[DivergenceGuard, str]:
        """Return the guard after this figure, and ``"stable"``, ``"suppress"`` or ``"nudge"``.

        ``"suppress"``: the last three figures rise strictly and the newest is above the threshold;
        ranks may not run further ahead. ``"nudge"``: the same with the newest above twice the
        threshold; average more often.
        """
        recent = (*self.recent, divergence)[-5:]
        rising = len(recent) >= 3 and recent[-3] < recent[-2] < recent[-1]
        verdict = "stable"
        if rising and divergence > self.threshold:
            verdict = "nudge" if divergence > 2 * self.threshold else "suppress"
        return replace(self, recent=recent), verdict

"""Policies of unequal ranks: each rank takes steps by itself, and parameters are averaged from time to time.

A counter in the shared store deals whole turns, so each turn is done exactly once at any speeds. Averages are weighted
by samples. Cadence waits for the average; Async trains while it is computed, and adds the change when it arrives. Both
end every epoch with one average of all ranks.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

from torch import nn

from flodl.distributed.average import Flight, ParameterMean
from flodl.distributed.cadence import DivergenceGuard, ElChe
from flodl.distributed.group import Ranks
from flodl.distributed.rounds import Knobs, Round
from flodl.distributed.shares import chunk_size, ratios_from_ms, wants_chunk

OUTLIER_FACTOR = 5.0  # times the median of a round's steps


class LocalSteps:
    """Cadence and Async: ranks take steps by themselves and average their parameters.

    All ranks process the same rounds in the same order. Each decision about a round (to synchronise, to end the epoch)
    follows from the rows that all ranks exchanged in it, so all ranks decide the same.

    Args:
        overlap: Async: train while the average is computed.

    Attributes:
        due: set by the trainer; ``due(turns of all ranks, summed flags)`` returns True if all ranks must be equal soon,
            for a checkpoint or to stop.
    """

    shares_gradients = False

    def __init__(self, ranks: Ranks, model: nn.Module, knobs: Knobs, *, overlap: bool) -> None:
        self.ranks, self.knobs, self.overlap = ranks, knobs, overlap
        self.name = "async" if overlap else "cadence"
        self.due: Callable[[int, Sequence[float]], bool] = lambda steps, flags: any(flags)
        self.cadence = ElChe.start(
            ranks.world,
            knobs.anchor,
            overhead_target=knobs.overhead_target,
            max_anchor=knobs.max_anchor,
            max_batch_diff=knobs.max_batch_diff or None,
            speed_hint=knobs.speed_hint,
        )
        self.guard = DivergenceGuard(knobs.divergence_threshold or 0.0)
        on_cpu = knobs.backend == "cpu" or ranks.device.type == "cpu"
        self.mean = ParameterMean(ranks, model, on_cpu=on_cpu)
        self.round = 0
        self.steps = 0  # turns of all ranks up to the last averaging
        self.epoch = 0
        self.cursor = 0  # lower turns of the epoch are taken, as of the last averaging
        self.pending: list[int] = []  # taken by this rank and not yet done
        self.total = 0
        self.overshoot = 3 if knobs.max_overshoot is None else knobs.max_overshoot
        # the number of this run in its process group, because the store keeps the keys of all runs
        self._run = int(ranks.tell(ranks.store.add("runs", 1) if ranks.rank == 0 else 0))
        self._syncs: deque[float] = deque(maxlen=3)
        self._base = 0  # first turn that the epoch's counter in the store deals
        self._claimed = 0
        self._samples = 0  # this and the next: since the last averaging was sent or landed
        self._times: list[float] = []
        self._drift = self._sync_ms = 0.0
        self._ready = self._hold = self._dry = False
        self._flight: Flight | None = None
        self._sent = (0, 0, 0.0)

    @property
    def lr_step(self) -> int:
        """Step number for schedules: the known turns of all ranks."""
        return self.steps + self._done

    @property
    def speeds(self) -> tuple[float, ...]:
        """Relative speeds of the ranks, as far as they are known; equal on all ranks."""
        return tuple(ratios_from_ms(self.cadence.ms))

    @property
    def _done(self) -> int:
        return len(self._times)

    @property
    def _ms(self) -> float:
        """Time of the steps done; the time of an outlier (such as a capture) is limited."""
        most = OUTLIER_FACTOR * median(self._times) if self._times else 0.0
        return sum(min(ms, most) for ms in self._times)

    # ---- dealing turns -------------------------------------------------------------------------------

    def turns(self, total: int) -> Iterator[tuple[list[int], tuple[float, ...] | None]]:
        """Yield lists of turns that this rank does alone, until the epoch has no more turns."""
        self.total, self._dry = total, False
        while True:
            if not self.pending:
                self.pending = self._take()
            if not self.pending:
                self._dry = True
                return
            yield list(self.pending), None

    def _take(self) -> list[int]:
        pool = f"{self.ranks.attempt}/{self._run}/{self.epoch}/{self._base}"
        key, store, rank = f"turns/{pool}", self.ranks.store, self.ranks.rank
        left = self.total - self._base - store.add(key, 0)
        if left <= 0:
            return []
        if not wants_chunk(left, self.cadence.ms, rank):
            # Ranks may know different speeds. All ranks that leave turns to others use the speeds of the first such
            # rank; otherwise two ranks could each think that the other is faster, and leave a turn undone.
            first = store.compare_set(f"speeds/{pool}", "", json.dumps(self.cadence.ms))
            if not wants_chunk(left, json.loads(first), rank):
                return []
        size = chunk_size(left, self.cadence.counts, rank)
        last = self._base + store.add(key, size)
        self._claimed = min(last, self.total)
        return list(range(min(last - size, self.total), self._claimed))

    # ---- averaging ----------------------------------------------------------------------------------

    def after_step(self, turn: int, samples: int, compute_ms: float, flags: Sequence[float]) -> Round | None:
        """Record that this rank did ``turn``; average if it is due, and return the round then."""
        self.pending.remove(turn)
        self._times.append(compute_ms)
        self._samples += samples
        if self._flight is not None:
            ahead = self._done - self._sent[0]
            if self._flight.landed() or ahead >= self._lead or any(flags):
                return self._land(flags)
            return None
        if not self._ready and (self._has_done_its_share() or any(flags)):
            self._raise_hand()
        if not self._ready:
            return None
        together = self.ranks.store.add(self._key(), 0) >= self.ranks.world
        if together and self.overlap:
            self._send(flags)
        elif together or self._is_too_far_ahead():
            self._send(flags)
            return self._land(flags)
        return None

    def _has_done_its_share(self) -> bool:
        if self.overlap or not self.cadence.calibrated:
            return self._done >= self.cadence.counts[self.ranks.rank]
        return self._ms >= self.cadence.anchor * max(self.cadence.ms)

    def _is_too_far_ahead(self) -> bool:
        """Return True if this rank must wait for the others now."""
        count = self.cadence.counts[self.ranks.rank]
        if self.knobs.max_batch_diff is not None:
            return self._done >= count + self.knobs.max_batch_diff
        if not self.cadence.calibrated and len(set(self.cadence.counts)) == 1:
            return False  # the time of the slowest rank's batch is unknown
        # Cadence gives every rank about the same time for its count, so twice the count means a stalled peer
        return self._done >= (count + self._lead if self.overlap else 2 * count)

    @property
    def _lead(self) -> int:
        """Async: batches that this rank may do before the others arrive; `overshoot` counts those of the slowest."""
        ms = self.cadence.ms
        fast = 1.0 if self.knobs.max_overshoot is not None or min(ms) <= 0 else max(ms) / ms[self.ranks.rank]
        return max(1, math.ceil(self.overshoot * fast))

    def _raise_hand(self) -> None:
        self._ready = True
        self.ranks.store.add(self._key(), 1)

    def _key(self) -> str:
        return f"ready/{self.ranks.attempt}/{self._run}/{self.round}"

    def _send(self, flags: Sequence[float]) -> None:
        self.ranks.phase("averaging")
        self._sent = (self._done, self._samples, self._ms)
        figures = (self._drift, self._sync_ms, float(self._dry), self._claimed)
        # A rank without work has a tiny weight, so that no sum of weights is zero.
        self._flight = self.mean.begin(max(float(self._samples), 1e-6), [*self._sent, *figures, *flags])

    def _land(self, flags: Sequence[float]) -> Round:
        """Apply the average; if all ranks must be equal now, average once more and wait for it."""
        begin = time.perf_counter()
        flight, self._flight, self._ready = self._flight, None, False
        assert flight is not None
        self.ranks.phase("averaging")
        done, samples, _ = self._sent
        flight.wait()
        wait_ms = (time.perf_counter() - begin) * 1e3
        rows, self._drift = self.mean.finish(flight, keep_progress=self._done > done)
        self._sync_ms = (time.perf_counter() - begin) * 1e3
        self._times, self._samples = self._times[done:], self._samples - samples
        columns = list(zip(*rows, strict=True))
        batches = tuple(int(n) for n in columns[0])
        # The last rank to arrive did not wait, so its time is the cost of communication. A round that the end of the
        # epoch cut short is not representative, nor is a single slow one.
        if not any(columns[5]):
            self._syncs.append(min(columns[4]))
        sync_ms = 0.0 if any(columns[5]) else min(self._syncs)
        self.cadence = self.cadence.report_timing(columns[2], batches, sync_ms)
        self._steer(max(columns[3]))
        self.round += 1
        self.steps += sum(batches)
        self.cursor = max(self.cursor, int(max(columns[6])))
        summed = [float(sum(column)) for column in columns[7:]]
        all_dry = all(columns[5])
        held = not self.overlap or self._hold or all_dry
        self._hold = not held and self.due(self.steps, summed)
        if self._hold:
            self._send(flags)
            return self._land(flags)
        return Round(
            number=self.round,
            batches=batches,
            work_ms=tuple(columns[2]),
            sync_ms=self._sync_ms,
            wait_ms=wait_ms,
            divergence=max(columns[3]),
            held=held,
            all_dry=all_dry,
            flags=tuple(summed),
            cadence=self.cadence,
        )

    def _steer(self, divergence: float) -> None:
        if self.knobs.divergence_threshold is None:
            return
        self.guard, verdict = self.guard.observe(divergence)
        if verdict == "nudge":
            self.cadence = self.cadence.nudge_anchor_down(0.5)
        if self.overlap and self.knobs.max_overshoot is None and verdict == "stable":
            self.overshoot = min(self.overshoot + 1, min(15, max(3, self.total // 50)))

    def close_epoch(self, flags: Sequence[float]) -> Iterator[Round]:
        """Average and wait until every rank is out of turns; then move to the first turn of the next epoch.

        Yields:
            Each round; the last one has ``all_dry``. If the caller stops earlier, the position in the epoch stays that
            of the round.
        """
        while True:
            if self._flight is None:
                if not self._ready:
                    self._raise_hand()
                self._send(flags)
            last = self._land(flags)
            if last.all_dry:
                self.epoch += 1
                self.cursor = self._base = self._claimed = 0
                self.pending, self._dry = [], False
                yield last
                return
            yield last

    # ---- state ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state that all ranks share after a synchronised round, as JSON values."""
        return {
            "round": self.round,
            "steps": self.steps,
            "epoch": self.epoch,
            "cursor": self.cursor,
            "cadence": self.cadence.to_dict(),
            "divergence": list(self.guard.recent),
            "overshoot": self.overshoot,
        }

    def own_state(self) -> dict[str, Any]:
        """Return the state that differs by rank: the turns that it took and has not done."""
        return {"pending": list(self.pending), "drift": self._drift, "sync_ms": self._sync_ms}

    def load_state_dict(self, state: dict[str, Any], own: Sequence[dict[str, Any]]) -> None:
        """Restore a saved position; ``own`` contains the `own_state` of each saved rank, of any number."""
        self.round, self.steps, self.epoch = state["round"], state["steps"], state["epoch"]
        self.cursor = self._base = self._claimed = state["cursor"]
        self.overshoot = state["overshoot"]
        self.guard = DivergenceGuard(self.guard.threshold, tuple(state["divergence"]))
        if len(own) == self.ranks.world:
            mine = own[self.ranks.rank]
            self.cadence = ElChe.from_dict(state["cadence"])
            self.pending, self._drift, self._sync_ms = list(mine["pending"]), mine["drift"], mine["sync_ms"]
        else:
            left = [turn for part in own for turn in part["pending"]]
            self.pending = left[self.ranks.rank :: self.ranks.world]

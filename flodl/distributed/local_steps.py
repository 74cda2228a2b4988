"""The policies of unequal ranks: each steps on its own, and parameters are averaged when it is time.

Whole turns are dealt from a counter in the shared store, so each is taken exactly once whatever the speeds. Parameters
are averaged, weighted by samples. Cadence waits for the average; Async trains on while it is computed, and adds the
average's change when it arrives. Both end every epoch with one average for all.
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

__all__ = ["LocalSteps"]

STUMBLE = 5.0  # times the median of a round's steps


class LocalSteps:
    """Cadence and Async: ranks step on their own and meet to average.

    All ranks go through the same rounds in the same order. What is decided about a round (to hold, to
    end the epoch) follows from the rows that all ranks exchanged in it, so all decide alike.

    Args:
        overlap: Async: train on while the average travels.

    Attributes:
        due: told the turns done by all ranks and the summed flags, says whether all ranks must stand
            still and equal soon, for a checkpoint or to stop; set by the trainer.
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
        self.cursor = 0  # turns of the epoch before this one are taken, as of the last averaging
        self.pending: list[int] = []  # taken by this rank and not yet done
        self.total = 0
        self.overshoot = 3 if knobs.max_overshoot is None else knobs.max_overshoot
        # of this run among those of one process group, whose keys all stay in the store
        self._run = int(ranks.tell(ranks.store.add("runs", 1) if ranks.rank == 0 else 0))
        self._syncs: deque[float] = deque(maxlen=3)
        self._base = 0  # where the epoch's counter in the store starts
        self._claimed = 0
        self._samples = 0  # this and the next: since the last averaging was sent or landed
        self._times: list[float] = []
        self._drift = self._sync_ms = 0.0
        self._ready = self._hold = self._dry = False
        self._flight: Flight | None = None
        self._sent = (0, 0, 0.0)

    @property
    def lr_step(self) -> int:
        """The step number that schedules see: all ranks' turns as far as known."""
        return self.steps + self._done

    @property
    def speeds(self) -> tuple[float, ...]:
        """How fast ranks are in proportion, as far as is known; the same on all ranks."""
        return tuple(ratios_from_ms(self.cadence.ms))

    @property
    def _done(self) -> int:
        return len(self._times)

    @property
    def _ms(self) -> float:
        """The time of the steps done; one that took far longer than most (a capture, a stumble) counts for less."""
        most = STUMBLE * median(self._times) if self._times else 0.0
        return sum(min(ms, most) for ms in self._times)

    # ---- dealing turns -------------------------------------------------------------------------------

    def turns(self, total: int) -> Iterator[tuple[list[int], tuple[float, ...] | None]]:
        """Yield runs of turns that this rank alone does, until the pool of the epoch is empty."""
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
            # Ranks may know of different rounds. Whoever leaves turns to others goes by the speeds of the first to do
            # so, or two ranks could each think the other faster, and leave turns that nobody does.
            first = store.compare_set(f"speeds/{pool}", "", json.dumps(self.cadence.ms))
            if not wants_chunk(left, json.loads(first), rank):
                return []
        size = chunk_size(left, self.cadence.counts, rank)
        last = self._base + store.add(key, size)
        self._claimed = min(last, self.total)
        return list(range(min(last - size, self.total), self._claimed))

    # ---- meeting -------------------------------------------------------------------------------------

    def after_step(self, turn: int, samples: int, compute_ms: float, flags: Sequence[float]) -> Round | None:
        """Note that this rank did ``turn``; average if it is time, and return the round then."""
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
        return self._ms >= self.cadence.anchor_wall_ms

    def _is_too_far_ahead(self) -> bool:
        """Return whether this rank must wait for the others now."""
        count = self.cadence.counts[self.ranks.rank]
        if self.knobs.max_batch_diff is not None:
            return self._done >= count + self.knobs.max_batch_diff
        if not self.cadence.calibrated and not self.cadence.has_speed_hint:
            return False  # nobody knows yet how long a batch of the slowest takes
        # Cadence gives every rank about the same time for its count, so twice the count means a stalled peer
        return self._done >= (count + self._lead if self.overlap else 2 * count)

    @property
    def _lead(self) -> int:
        """Async: batches of this rank that may pass while the others come; the slowest's own batches count."""
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
        # A rank without work still takes part, with next to no weight, so that no sum of weights is zero.
        self._flight = self.mean.begin(max(float(self._samples), 1e-6), [*self._sent, *figures, *flags])

    def _land(self, flags: Sequence[float]) -> Round:
        """Take the average in; where it showed that all must stand still, go through one more, waiting."""
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
        # Waiting for the slowest rank is no cost of communication, and the last to come did not wait. A round
        # cut short by the end of the epoch says nothing of a whole one, and one stumble nothing of the rest.
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
        """Average, waiting, until every rank is out of turns; then go to the next epoch's first turn.

        Yields:
            Each round; the last one has ``all_dry``. A caller that stops in between leaves the place in
            the epoch as it was at that round.
        """
        while True:
            if self._flight is None:
                if not self._ready:
                    self._raise_hand()
                self._send(flags)
            last = self._land(flags)
            if last.all_dry:
                self._next_epoch()
                yield last
                return
            yield last

    def _next_epoch(self) -> None:
        self.epoch += 1
        self.cursor = self._base = self._claimed = 0
        self.pending, self._dry = [], False

    # ---- state ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what all ranks know after a held round, as JSON values."""
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
        """Return what only this rank knows: the turns that it took and has not done."""
        return {"pending": list(self.pending), "drift": self._drift, "sync_ms": self._sync_ms}

    def load_state_dict(self, state: dict[str, Any], own: Sequence[dict[str, Any]]) -> None:
        """Take up a saved place; ``own`` has what each saved rank knew, of any number of ranks."""
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

"""How fast a run is, what share of the devices' peak that is, and how long it will go on at that speed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

__all__ = ["Pace"]

SPAN_S = 2.0
"""Seconds over which a speed is measured, where steps are shorter."""
LOOK_BACK = 0.2
"""Share of the time so far that an estimate looks back on, but no less than `LEAST_S`."""
LEAST_S = 30.0


class Pace:
    """Told of steps, says speeds and what is left.

    Args:
        tokens: ``tokens(step)`` of an optimiser step; None where nobody knows.
        flops: ``flops(tokens)`` of a step of so many tokens.
        peak: operations per second that the devices can do at most.

    Attributes:
        step: the last one done.
        total: steps of the whole run, None where unknown.
    """

    def __init__(
        self,
        tokens: Callable[[int], float | None] | None = None,
        flops: Callable[[float], float] | None = None,
        peak: float | None = None,
    ) -> None:
        self.tokens, self.flops, self.peak = tokens, flops, peak
        self.step, self.total = 0, None
        self._steps: deque[tuple[float, int, float]] = deque(maxlen=4096)  # time, step, rows of it
        self._marks: deque[tuple[float, int]] = deque(maxlen=1024)  # pauses included
        self._began_s = 0.0
        self._over = False

    def begin(self, step: int, total: int | None, now: float) -> None:
        """Be told that a run begins after ``step``."""
        self.step, self.total, self._over = step, total, False
        self._steps.clear()
        self._marks.clear()
        self._marks.append((now, step))
        self._began_s = now

    def step_done(self, t: float, step: int, rows: float) -> None:
        """Be told of a step."""
        self.step = max(self.step, step)
        self._steps.append((t, step, rows))

    def paused(self) -> None:
        """Be told that something came between: no speed is measured across it."""
        self._steps.clear()

    def end(self, step: int) -> None:
        """Be told that the run is over."""
        self.step, self._over = max(step, self.step), True

    def told(self, now: float) -> dict[str, float]:
        """Return speeds by curve, where enough was done since the last time to say any."""
        self._mark(now)
        if len(self._steps) < 2:
            return {}
        (begin, first, _), (end, last, _) = self._steps[0], self._steps[-1]
        if end - begin < SPAN_S or last <= first:
            return {}
        seconds, steps = end - begin, last - first
        rows = sum(rows for _, _, rows in list(self._steps)[1:]) * steps / max(1, len(self._steps) - 1)
        speeds = {"speed/steps_s": steps / seconds, "speed/rows_s": rows / seconds}
        if self.tokens is not None:
            counted = [self.tokens(step) for step in range(first + 1, last + 1)]
            known = [count for count in counted if count is not None]
            if known and len(known) == len(counted):
                speeds["speed/tokens_s"] = sum(known) / seconds
                if self.flops is not None and self.peak:
                    speeds["speed/peak_share"] = sum(map(self.flops, known)) / seconds / self.peak
        newest = self._steps[-1]
        self._steps.clear()
        self._steps.append(newest)
        return speeds

    def _mark(self, now: float) -> None:
        # a mark a step at most, and about a thousand in all
        if self.step > self._marks[-1][1] if self._marks else self.step:
            if len(self._marks) == self._marks.maxlen:
                kept = list(self._marks)[::2]
                self._marks.clear()
                self._marks.extend(kept)
            self._marks.append((now, self.step))

    def seconds_left(self, now: float) -> float | None:
        """Return the seconds until the last step at the speed of late, pauses included; None where that is unknown."""
        if self._over or self.total is None or len(self._marks) < 2:
            return None
        end, last = self._marks[-1]
        since = end - max(LEAST_S, LOOK_BACK * (end - self._began_s))
        begin, first = self._marks[0]
        for t, step in self._marks:
            if t > since:
                break
            begin, first = t, step
        # a step that takes long is not over: the time since the last one counts where it is longer than usual
        usual = (end - begin) / max(1, last - first)
        seconds = (end - begin) + max(0.0, now - end - 2 * usual)
        if last <= first or seconds <= 0:
            return None
        return round(max(0, self.total - self.step) * seconds / (last - first), 1)

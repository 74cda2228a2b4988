"""Speed of a run, its share of the devices' peak, and the time left."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

WINDOW_S = 2.0
"""Minimal time over which a speed is measured."""
LOOK_BACK, MIN_LOOK_BACK_S = 0.2, 30.0
"""Part of the elapsed time that the time left is estimated from, and its minimum."""
MAX_MARKS = 1000


class Throughput:
    """Measures steps.

    Args:
        tokens: ``tokens(step)`` returns the tokens of an optimiser step (the first is 1), None if unknown.
        flops: ``flops(tokens)`` returns the floating-point operations of a step with so many tokens.
        peak: operations per second of all devices together.

    Attributes:
        step: last finished step.
        total: steps of the whole run, None if unknown.
    """

    def __init__(
        self,
        tokens: Callable[[int], float | None] | None = None,
        flops: Callable[[float], float] | None = None,
        peak: float | None = None,
    ) -> None:
        self.tokens, self.flops, self.peak = tokens, flops, peak
        self.step, self.total = 0, None
        self._steps: deque[tuple[float, int, float]] = deque(maxlen=4096)  # time, step, rows
        self._marks: list[tuple[float, int]] = []  # time, step; pauses included
        self._is_over = False

    def begin(self, step: int, total: int | None, now: float) -> None:
        """Start after ``step``."""
        self.step, self.total, self._is_over = step, total, False
        self._steps.clear()
        self._marks = [(now, step)]

    def step_done(self, t: float, step: int, rows: float) -> None:
        """Add a finished step."""
        self.step = max(self.step, step)
        self._steps.append((t, step, rows))

    def pause(self) -> None:
        """Exclude the time since the last step from the speed, for example of an evaluation."""
        self._steps.clear()

    def end(self, step: int) -> None:
        """End the run."""
        self.step, self._is_over = max(self.step, step), True

    def rates(self, now: float) -> dict[str, float]:
        """Return speeds by curve since the last call; nothing if too little time has passed."""
        if not self._marks or self.step > self._marks[-1][1]:
            self._marks = [*(self._marks[::2] if len(self._marks) >= MAX_MARKS else self._marks), (now, self.step)]
        if len(self._steps) < 2:
            return {}
        (begin, first, _), (end, last, _) = self._steps[0], self._steps[-1]
        if end - begin < WINDOW_S or last <= first:
            return {}
        seconds, steps = end - begin, last - first
        rows = sum(rows for _, _, rows in list(self._steps)[1:]) * steps / (len(self._steps) - 1)
        found = {"speed/steps_s": steps / seconds, "speed/rows_s": rows / seconds}
        counts = [self.tokens(step) for step in range(first + 1, last + 1)] if self.tokens is not None else [None]
        known = [count for count in counts if count is not None]
        if len(known) == len(counts):
            found["speed/tokens_s"] = sum(known) / seconds
            if self.flops is not None and self.peak:
                found["speed/peak_share"] = sum(map(self.flops, known)) / seconds / self.peak
        newest = self._steps[-1]
        self._steps.clear()
        self._steps.append(newest)
        return found

    def seconds_left(self, now: float) -> float | None:
        """Return the seconds until the last step at the recent speed, pauses included; None if unknown."""
        if self._is_over or self.total is None or len(self._marks) < 2:
            return None
        end, last = self._marks[-1]
        since = end - max(MIN_LOOK_BACK_S, LOOK_BACK * (end - self._marks[0][0]))
        begin, first = max((mark for mark in self._marks if mark[0] <= since), default=self._marks[0])
        usual = (end - begin) / max(1, last - first)
        # A step that takes longer than usual has not ended yet; its time counts.
        seconds = (end - begin) + max(0.0, now - end - 2 * usual)
        if last <= first or seconds <= 0:
            return None
        return round(max(0, self.total - self.step) * seconds / (last - first), 1)

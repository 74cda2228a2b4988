"""Speed of a run, its share of the devices' peak, and the time left."""

from __future__ import annotations

from collections.abc import Callable

WINDOW_S = 2.0
"""Minimal time over which a speed is measured."""
LOOK_BACK, MIN_LOOK_BACK_S = 0.15, 20.0
"""Part of the elapsed time that the time left is estimated from, and its minimum; at most twice as much is used."""


class Throughput:
    """Measures steps.

    Args:
        tokens: ``tokens(step)`` returns the tokens of an optimiser step (the first is 1), None if unknown.
        flops: ``flops(tokens)`` returns the floating-point operations of a step with so many tokens.
        peak: operations per second of all devices together.
        total_steps: steps of the whole run, if known better than by `begin`.

    Attributes:
        step: last finished step.
        total: steps of the whole run, None if unknown.
    """

    def __init__(
        self,
        tokens: Callable[[int], float | None] | None = None,
        flops: Callable[[float], float] | None = None,
        peak: float | None = None,
        total_steps: int | None = None,
    ) -> None:
        self.tokens, self.flops, self.peak, self.total_steps = tokens, flops, peak, total_steps
        self.step, self.total = 0, total_steps
        self._steps: list[tuple[float, int, float]] = []  # time, step, rows
        self._began, self._is_over = 0.0, False
        # Time and step; pauses are included.
        self._marks, self._last = [(0.0, 0)], (0.0, 0)

    def begin(self, step: int, total: int | None, now: float) -> None:
        """Start after ``step``."""
        self.step, self.total, self._is_over = step, self.total_steps or total, False
        self._began, self._last, self._marks = now, (now, step), [(now, step)]
        self.pause()

    def step_done(self, t: float, step: int, rows: float) -> None:
        """Add a finished step."""
        self.step = max(self.step, step)
        self._steps.append((t, step, rows))

    def pause(self) -> None:
        """Exclude the time since the last step from the speed, for example of an evaluation."""
        self._steps = []

    def end(self, step: int) -> None:
        """End the run."""
        self.step, self._is_over = max(self.step, step), True

    def rates(self, now: float) -> dict[str, float]:
        """Return speeds by curve since the last call; nothing if too little time has passed."""
        if self.step > self._last[1]:
            self._last = (now, self.step)
            if now - self._marks[-1][0] >= max(MIN_LOOK_BACK_S, LOOK_BACK * (now - self._began)):
                self._marks = [self._marks[-1], self._last]
        if len(self._steps) < 2:
            return {}
        (begin, first, _), *others = self._steps
        seconds, steps = others[-1][0] - begin, others[-1][1] - first
        if seconds < WINDOW_S or steps <= 0:
            return {}
        self._steps = self._steps[-1:]
        rows = sum(rows for _, _, rows in others) * steps / len(others)
        found = {"speed/steps_s": steps / seconds, "speed/rows_s": rows / seconds}
        counts = [self.tokens(step) for step in range(first + 1, first + steps + 1)] if self.tokens else [None]
        known = [count for count in counts if count is not None]
        if len(known) == len(counts):
            found["speed/tokens_s"] = sum(known) / seconds
            if self.flops is not None and self.peak:
                found["speed/peak_share"] = sum(map(self.flops, known)) / seconds / self.peak
        return found

    def seconds_left(self, now: float) -> float | None:
        """Return the seconds until the last step at the recent speed, pauses included; None if unknown."""
        (begin, first), (end, last) = self._marks[0], self._last
        if self._is_over or self.total is None or last <= first:
            return None
        usual = (end - begin) / (last - first)
        # A step that takes longer than usual has not ended yet; its time counts.
        seconds = (end - begin) + max(0.0, now - end - 2 * usual)
        return round(max(0, self.total - self.step) * seconds / (last - first), 1)

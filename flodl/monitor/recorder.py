"""Events of a run, converted to deltas of its record: values, speed, share of the devices' peak, and time left.

Events are objects with ``to_dict()``; this module knows the names of the events in `flodl.train.events`, not their
classes, so runs without a Trainer have records too. Of an unknown event, ``values`` become curves and the rest a line
of the log.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from flodl.monitor.series import Series

MAX_POINTS_A_DELTA = 8
"""Points of one curve in a delta; neighbours are merged where more steps were done."""
FIRST_POINTS = 256
"""The first points of a curve are all kept: a short run is recorded step by step."""
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


class Recorder:
    """Collects events and returns them as a delta.

    Args:
        began: Unix time at which the record begins.
        **throughput: arguments of `flodl.monitor.recorder.Throughput`.
    """

    def __init__(self, began: float, **throughput: Any) -> None:
        self.began, self.throughput = began, Throughput(**throughput)
        self._delta: dict[str, Any] = {}
        self._points: dict[str, Series] = {}
        self._num_points: Counter[str] = Counter()
        self._epoch, self._epoch_step, self._steps_per_epoch = 0, 0, 0
        self._observed_in_steps: set[str] = set()

    # ---- input ---------------------------------------------------------------------------------------

    def take(self, event: Any) -> None:
        """Add an event."""
        kind = type(event).__name__
        method = getattr(self, f"_on_{kind}", None)
        if method is not None:
            method(event, max(0.0, event.at_s + time.time() - time.monotonic() - self.began))
        elif getattr(event, "is_shown", True):
            self._on_unknown(kind, event.to_dict())

    def points(self, prefix: str, values: Mapping[str, Any], step: int, t: float | None = None, **at: float) -> None:
        """Add a value to each curve ``<prefix><name>``; values other than numbers are ignored."""
        t = self.now() if t is None else t
        for name, value in values.items():
            if value is None or isinstance(value, (int, float)):
                kept = float(value) if value is not None and math.isfinite(value) else None
                series = self._points.setdefault(prefix + name, Series(4096))
                series.add([step, at.get("epoch", self._fraction(step)), t, kept])

    def note(self, text: str, level: str = "info", *, step: int | None = None, at: float | None = None) -> None:
        """Add a line to the log; levels are info, warning, error and decision."""
        line = [round(self.now() if at is None else at, 2), self.step if step is None else step, level, text]
        self._delta.setdefault("log", []).append(line)

    def update(self, **parts: Any) -> None:
        """Add parts of a delta, such as ``facts`` or ``model``; mappings are merged."""
        _merge(self._delta, parts)

    def add_epoch(
        self, done: int, seconds: float, metrics: Mapping[str, float], total: int | None, left_s: float | None
    ) -> None:
        """Add the epoch with the number ``done``, counted from 1, of a loop without events."""
        self.points("train/", metrics, done, epoch=done)
        self._delta.setdefault("epochs", []).append({"epoch": done, "seconds": round(seconds, 3), **metrics})
        state = {"step": done, "epoch": done, "epochs": total, "total": total, "left_s": left_s}
        self.update(state={**state, **({"status": "running"} if total is None or done < total else {})})

    # ---- output --------------------------------------------------------------------------------------

    def now(self) -> float:
        """Return the seconds since the run began."""
        return max(0.0, time.time() - self.began)

    @property
    def step(self) -> int:
        """The last finished step."""
        return self.throughput.step

    def delta(self) -> dict[str, Any] | None:
        """Return everything since the last call as a delta; None if there is nothing."""
        now = self.now()
        self.points("", self.throughput.rates(now), self.step)
        if not self._points and not self._delta:
            return None
        delta, self._delta = self._delta, {}
        points, self._points = self._points, {}
        if points:
            delta["p"] = {}
            for name, series in points.items():
                most = max(MAX_POINTS_A_DELTA, FIRST_POINTS - self._num_points[name])
                delta["p"][name] = series.thinned(most).packed()
                self._num_points[name] += len(series)
        delta["t"] = round(now, 2)
        if self.step or "state" in delta:
            known = {"step": self.step, "epoch": round(self._fraction(self.step), 4), "total": self.throughput.total}
            delta["state"] = {**known, "left_s": self.throughput.seconds_left(now), **delta.get("state", {})}
        return delta

    def _fraction(self, step: int) -> float:
        """Return a step as a fraction of epochs."""
        if not self._steps_per_epoch:
            return float(self._epoch)
        return self._epoch + min(1.0, max(0.0, (step - self._epoch_step) / self._steps_per_epoch))

    # ---- one method for each kind of event, with its time in seconds of the run ------------------------

    def _on_RunStarted(self, event: Any, t: float) -> None:
        self._steps_per_epoch, self._epoch = event.steps_per_epoch, event.epoch
        self._epoch_step = event.step - max(0, event.step - event.epoch * event.steps_per_epoch)
        self.throughput.begin(event.step, event.total_steps or None, self.now())
        named = ("policy", "policy_reason", "epochs", "steps_per_epoch", "resumed_from")
        steps = self.throughput.total
        run = {"ranks": event.world, "steps": steps, **{name: getattr(event, name) for name in named}}
        self.update(
            session={"step": event.step},
            facts={"run": {name: value for name, value in run.items() if value}},
            state={"status": "running", "epochs": event.epochs or None, "reason": None},
        )
        if event.resumed_from:
            self.note(f"resumed from step {event.step:,} ({event.resumed_from})", step=event.step)

    def _on_StepDone(self, event: Any, t: float) -> None:
        if event.epoch != self._epoch:
            self._epoch, self._epoch_step = event.epoch, event.step - 1
        self.throughput.step_done(t, event.step, event.samples)
        values = {"loss": event.loss, "lr": event.lr, "grad_norm": event.grad_norm, **event.metrics}
        self.points("train/", values, event.step, t)
        self.points("speed/", {"step_ms": event.wall_ms}, event.step, t)

    def _on_EvalDone(self, event: Any, t: float) -> None:
        self.throughput.pause()
        self.points("", _eval_names(event.metrics), event.step, t)

    def _on_EpochMetrics(self, event: Any, t: float) -> None:
        row = {"epoch": event.epoch + 1, "step": event.step, "seconds": round(event.epoch_ms / 1e3, 3)}
        row |= {"samples": event.samples, "loss": event.loss, **event.metrics, **_eval_names(event.eval)}
        self._delta.setdefault("epochs", []).append(row)
        self._epoch, self._epoch_step = event.epoch + 1, event.step
        for rank, share in enumerate(event.share if len(event.share) > 1 else ()):
            self.update(lanes={str(rank): {"share": round(share, 4)}})

    def _on_Synced(self, event: Any, t: float) -> None:
        self.update(lanes={"all": {"meetings": [t]}})
        self.points("train/", {"divergence": event.divergence}, event.step, t)
        for rank, batches in enumerate(event.batches):
            self.update(lanes={str(rank): {"share": round(batches / (sum(event.batches) or 1), 4)}})

    def _on_RankWork(self, event: Any, t: float) -> None:
        spans = [[kind, *(max(0.0, round(t - self.began, 3)) for t in times)] for kind, *times in event.spans]
        self.update(lanes={str(event.of): {"spans": spans, **({"about": event.device} if event.device else {})}})

    def _on_Saved(self, event: Any, t: float) -> None:
        size = f"{event.bytes / 1e6:,.1f} MB, {event.wall_ms:,.0f} ms"
        self.note(f"saved {event.path} ({size})", step=event.step, at=t)

    def _on_SaveFailed(self, event: Any, t: float) -> None:
        self.note(f"checkpoint {event.path} was not written: {event.reason}", "error", step=event.step, at=t)

    def _on_Warned(self, event: Any, t: float) -> None:
        self.note(event.message, "warning", step=event.step, at=t)

    def _on_RunDone(self, event: Any, t: float) -> None:
        self.throughput.end(event.step)
        ended = "stopped by a signal" if event.reason == "signal" else event.reason
        self.note(f"{ended} after step {event.step:,}", step=event.step)
        summed = event.summed and f"gradients were summed by {event.summed}"
        for line in filter(None, (event.recorded, summed)):
            self.note(str(line), step=event.step)
        self.update(state={"status": event.reason, "reason": None})

    def _on_RunFailed(self, event: Any, t: float) -> None:
        self.note(event.reason, "error", step=event.step)
        if event.failed_rank is not None:
            self.update(lanes={str(event.failed_rank): {"end": round(self.now(), 2)}})
        restarts = bool(event.restarts)
        reason = None if restarts else event.reason[:500]
        self.update(state={"status": "restarting" if restarts else "failed", "reason": reason})

    def _on_ModelDescribed(self, event: Any, t: float) -> None:
        self.update(model=event.tree, facts={"model": dict(event.facts)}, picture=getattr(event, "picture", ""))

    def _on_LayersTimed(self, event: Any, t: float) -> None:
        kinds = {"time": event.seconds, "gradient": event.gradients, "memory": event.memory}
        for kind, values in kinds.items():
            if values:
                self.update(heat={kind: {"step": event.step, "of": dict(values)}})

    def _on_Observed(self, event: Any, t: float) -> None:
        values, rows = event.values, self._delta.get("epochs", [])
        if event.scope == "step":
            self._observed_in_steps.update(values)
        elif rows and rows[-1]["epoch"] == event.epoch + 1:
            rows[-1].update(values)
        if event.scope == "epoch":
            values = {name: value for name, value in values.items() if name not in self._observed_in_steps}
        self.points("observed/", values, event.step, t)

    def _on_Decided(self, event: Any, t: float) -> None:
        self.note(f"{event.reason} (rule: {event.rule})", "decision", step=event.step, at=t)

    def _on_unknown(self, kind: str, fields: dict[str, Any]) -> None:
        step = fields.get("step") or self.step
        if isinstance(fields.get("values"), Mapping):
            self.points("observed/", fields["values"], step)
        else:
            reported = {name: value for name, value in fields.items() if name not in ("event", "at_s", "rank", "step")}
            self.note(f"{kind} {json.dumps(reported, default=str)[:500]}", step=step)


def _eval_names(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {"eval/" + name.removeprefix("eval_"): value for name, value in metrics.items()}


def _merge(under: dict[str, Any], over: Mapping[str, Any]) -> None:
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(under.get(key), dict):
            _merge(under[key], value)
        elif isinstance(value, list) and isinstance(under.get(key), list) and key in ("spans", "meetings"):
            under[key] += value
        else:
            under[key] = value

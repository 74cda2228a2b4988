"""Events of a run, converted to deltas of its record.

Events are objects with ``to_dict()``; this module knows the names of the events in `flodl.train.events`, not their
classes, so runs without a Trainer have records too. Of an unknown event, ``values`` become curves and the rest a line
of the log.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from flodl.monitor.series import Series
from flodl.monitor.throughput import Throughput

MAX_POINTS_A_DELTA = 8
"""Points of one curve in a delta; neighbours are merged where more steps were done."""
FIRST_POINTS = 256
"""The first points of a curve are all kept: a short run is recorded step by step."""


class Recorder:
    """Collects events and returns them as a delta.

    Args:
        began: Unix time at which the record begins.
        **throughput: arguments of `flodl.monitor.throughput.Throughput`.
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
        else:
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

"""Events of a run, turned into the deltas of its record.

Events come as they are from `flodl.train.events`; this file knows their names and none of their classes, so that
runs without a trainer have records too. A kind that it does not know is kept as well: its ``values`` become curves,
its ``message`` or ``reason`` a line of the log.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from flodl.monitor.pace import Pace
from flodl.monitor.series import MOST_POINTS, Series

__all__ = ["Recorder"]

MOST_A_DELTA = 8
"""Points of one curve in a delta; where more steps went by, neighbours are merged."""
FIRST_POINTS = 256
"""Points with which a curve begins are all kept, however quickly they came: a short run is recorded step by step."""
MOST_UNKNOWN = 20
"""Lines of the log that kinds without a rule may make, each kind."""
ENDS = {"finished": "finished", "stopped": "stopped", "signal": "stopped by a signal"}
TOLD_OTHERWISE = ("event", "at_s", "rank", "step", "epoch", "scope", "values", "message", "reason")


class Recorder:
    """Collects what happened and gives it as a delta.

    Args:
        began: Unix time at which the record began.
        tokens: ``tokens(step)`` gives the tokens of an optimiser step (the first is 1), None where unknown.
        flops: ``flops(tokens)`` gives the floating-point operations of a step of so many tokens.
        peak: operations per second that all devices together can do at most.
        total_steps: of the whole run, where it is known better than from epochs.
    """

    def __init__(
        self,
        began: float,
        *,
        tokens: Callable[[int], float | None] | None = None,
        flops: Callable[[float], float] | None = None,
        peak: float | None = None,
        total_steps: int | None = None,
    ) -> None:
        self.began = began
        self.reckon(tokens=tokens, flops=flops, peak=peak, total_steps=total_steps)
        self.is_new = True
        self._steps_per_epoch = 0
        self._epoch_begin = (0, 0)  # of the epoch that runs: its number, and the step before its first
        self._points: dict[str, Series] = {}
        self._most = MOST_A_DELTA
        self._told: dict[str, int] = {}  # points of each curve so far, up to `FIRST_POINTS`
        self._delta: dict[str, Any] = {}
        self._unknown: dict[str, int] = {}
        self._told_by_ranks = False
        self._watched: set[str] = set()  # what comes at each step need not come at each epoch

    def reckon(
        self,
        *,
        tokens: Callable[[int], float | None] | None = None,
        flops: Callable[[float], float] | None = None,
        peak: float | None = None,
        total_steps: int | None = None,
    ) -> None:
        """Reckon speeds by these from now on; arguments as of the class."""
        self.total_steps = total_steps
        self.pace = Pace(tokens, flops, peak)

    # ---- taking in -----------------------------------------------------------------------------------

    def take(self, event: Any) -> None:
        """Take in an event: an object with ``to_dict()``, as those of training."""
        kind = type(event).__name__
        rule = getattr(self, f"_on_{kind}", None)
        if rule is not None:
            rule(event)
        else:
            self._on_other(kind, event.to_dict())

    def point(self, name: str, step: int, value: float | None, *, at: float | None = None, epoch: float = 0.0) -> None:
        """Add a value to a curve."""
        kept = value if value is not None and math.isfinite(value) else None
        t = self.now() if at is None else at
        series = self._points.setdefault(name, Series(most=4096))
        series.add([step, epoch, t, None if kept is None else float(kept)])

    def figures(self, values: Mapping[str, float], step: int) -> None:
        """Add values of now, such as those of the machine."""
        for name, value in values.items():
            self.point(name, step, value, epoch=self._fraction(step))

    def note(self, text: str, level: str = "info", *, step: int = 0, at: float | None = None) -> None:
        """Add a line to the log; levels are info, warning, error and decision."""
        self._delta.setdefault("log", []).append([round(self.now() if at is None else at, 2), step, level, text])

    def say(self, **parts: Any) -> None:
        """Add parts of a delta, such as ``facts`` or ``model``; maps are laid over those said before."""
        for key, value in parts.items():
            if isinstance(value, dict):
                _lay_over(self._delta.setdefault(key, {}), value)
            else:
                self._delta[key] = value

    def epoch(
        self, epoch: int, seconds: float, metrics: Mapping[str, float], total: int | None, left_s: float | None
    ) -> None:
        """Take in an epoch of a loop that tells no events; ``epoch`` counts from 0."""
        done = epoch + 1
        for name, value in metrics.items():
            self.point(f"train/{name}", done, value, epoch=done)
        self._delta.setdefault("epochs", []).append({"epoch": done, "seconds": round(seconds, 3), **metrics})
        going = total is None or done < total
        self.say(
            state={
                "step": done, "epoch": done, "epochs": total, "total": total, "left_s": left_s,
                **({"status": "running"} if going else {}),
            }
        )  # fmt: skip

    def now(self) -> float:
        """Return the seconds since the run began."""
        return max(0.0, time.time() - self.began)

    @property
    def step(self) -> int:
        """The last step that was told."""
        return self.pace.step

    def delta(self) -> dict[str, Any] | None:
        """Return what came since the last call; None where nothing did."""
        pace = self.pace.told(self.now())
        for name, value in pace.items():
            self.point(name, self.step, value, epoch=self._fraction(self.step))
        if not self._points and not self._delta:
            return None
        delta, self._delta = self._delta, {}
        points, self._points = self._points, {}
        if points:
            most, self._most = self._most, MOST_A_DELTA
            delta["p"] = {name: _few(series, max(most, self._left(name, series))) for name, series in points.items()}
        delta["t"] = round(self.now(), 2)
        if self.step or "state" in delta:
            left = self.pace.seconds_left(self.now())
            delta["state"] = {"step": self.step, **self._where(), "left_s": left, **delta.get("state", {})}
        return delta

    def _left(self, name: str, series: Series) -> int:
        """Return how many more points a curve may begin with."""
        told = self._told.get(name, 0)
        self._told[name] = min(FIRST_POINTS, told + len(series))
        return FIRST_POINTS - told

    def _where(self) -> dict[str, Any]:
        return {"epoch": round(self._fraction(self.step), 4), "total": self.pace.total}

    def _fraction(self, step: int) -> float:
        epoch, before = self._epoch_begin
        if not self._steps_per_epoch:
            return float(epoch)
        return epoch + min(1.0, max(0.0, (step - before) / self._steps_per_epoch))

    def _t(self, event: Any) -> float:
        # the monotonic clock of this host, on the clock of the wall
        return max(0.0, event.at_s + (time.time() - time.monotonic()) - self.began)

    # ---- a rule for each kind ------------------------------------------------------------------------

    def _on_RunStarted(self, event: Any) -> None:
        self._steps_per_epoch = event.steps_per_epoch
        behind = event.step - event.epoch * event.steps_per_epoch  # steps of the epoch that were done before
        self._epoch_begin = (event.epoch, event.step - max(0, behind))
        total = self.total_steps or event.total_steps or None
        self.pace.begin(event.step, total, self.now())
        run = {
            "ranks": event.world,
            "policy": event.policy,
            "policy_reason": event.policy_reason or None,
            "epochs": event.epochs or None,
            "steps": total,
            "steps_per_epoch": event.steps_per_epoch or None,
            "resumed_from": event.resumed_from,
        }
        self.say(
            session={"step": event.step},
            facts={"run": {name: value for name, value in run.items() if value is not None}},
            state={"status": "running", "epochs": event.epochs or None, "reason": None},
        )
        if event.resumed_from:
            self.note(f"goes on from step {event.step:,} ({event.resumed_from})", step=event.step)
        if self.is_new:
            self._past(event)
        self.is_new = False

    def _past(self, event: Any) -> None:
        """Take in what a run did before, of which nobody kept a record."""
        self._most = MOST_POINTS
        for place, loss in enumerate(event.past.losses, 1):
            epoch = place / event.steps_per_epoch if event.steps_per_epoch else 0.0
            self.point("train/loss", place, loss, at=0.0, epoch=epoch)
        for row in event.past.evaluations:
            for name, value in row.items():
                if name not in ("step", "epoch", "details"):
                    self.point(_eval_name(name), row["step"], value, at=0.0, epoch=row["epoch"])

    def _on_StepDone(self, event: Any) -> None:
        t = self._t(event)
        if event.epoch != self._epoch_begin[0]:
            self._epoch_begin = (event.epoch, event.step - 1)
        epoch = self._fraction(event.step)
        self.pace.step_done(t, event.step, event.samples)
        figures = {"loss": event.loss, "lr": event.lr, "grad_norm": event.grad_norm, **event.metrics}
        for name, value in figures.items():
            self.point(f"train/{name}", event.step, value, at=t, epoch=epoch)
        self.point("speed/step_ms", event.step, event.wall_ms, at=t, epoch=epoch)

    def _on_EvalDone(self, event: Any) -> None:
        t = self._t(event)
        self.pace.paused()
        for name, value in event.metrics.items():
            self.point(_eval_name(name), event.step, value, at=t, epoch=self._fraction(event.step))
        if not self._told_by_ranks:
            self._span(event.rank, "evaluation", t - event.wall_ms / 1e3, t)

    def _on_EpochMetrics(self, event: Any) -> None:
        row = {
            "epoch": event.epoch + 1, "step": event.step, "seconds": round(event.epoch_ms / 1e3, 3),
            "samples": event.samples, "loss": event.loss, **event.metrics,
            **{_eval_name(name): value for name, value in event.eval.items()},
        }  # fmt: skip
        self._delta.setdefault("epochs", []).append(row)
        self._epoch_begin = (event.epoch + 1, event.step)
        if len(event.share) > 1:
            for rank, share in enumerate(event.share):
                self._lane(rank)["share"] = round(share, 4)

    _on_EpochDone = _on_EpochMetrics

    def _on_Synced(self, event: Any) -> None:
        t = self._t(event)
        self.say(lanes={"all": {"meetings": [*self._lane("all").get("meetings", []), t]}})
        self.point("train/divergence", event.step, event.divergence, at=t, epoch=self._fraction(event.step))
        turns = sum(event.batches) or 1
        for rank, batches in enumerate(event.batches):
            self._lane(rank)["share"] = round(batches / turns, 4)
        if self._told_by_ranks:
            return
        begin = t - event.sync_ms / 1e3
        for rank, work_ms in enumerate(event.work_ms):
            self._span(rank, "compute", begin - work_ms / 1e3, begin)
            self._span(rank, "sync", t - (event.sync_ms - event.wait_ms) / 1e3, t)

    def _on_RankWork(self, event: Any) -> None:
        self._told_by_ranks = True
        lane = self._lane(event.of)
        for kind, begin, end in event.spans:
            self._span(event.of, kind, begin - self.began, end - self.began)
        if event.device:
            lane["about"] = event.device

    def _on_Saved(self, event: Any) -> None:
        t = self._t(event)
        self.note(f"saved {event.path} ({event.bytes / 1e6:,.1f} MB, {event.wall_ms:,.0f} ms)", step=event.step, at=t)

    def _on_SaveFailed(self, event: Any) -> None:
        text = f"the checkpoint {event.path} could not be written: {event.reason}"
        self.note(text, "error", step=event.step, at=self._t(event))

    def _on_Warned(self, event: Any) -> None:
        self.note(event.message, "warning", step=event.step, at=self._t(event))

    def _on_RunDone(self, event: Any) -> None:
        self.pace.end(event.step)
        self.note(f"{ENDS.get(event.reason, event.reason)} after step {event.step:,}", step=event.step)
        if event.recorded is not None:
            self.note(str(event.recorded), step=event.step)
        if event.summed is not None:
            self.note(f"gradients were summed by {event.summed}", step=event.step)
        self.say(state={"status": event.reason, "reason": None})

    def _on_RunFailed(self, event: Any) -> None:
        self.note(event.reason, "error", step=event.step)
        if event.failed_rank is not None:
            self._lane(event.failed_rank)["end"] = round(self.now(), 2)
        going = bool(event.restarts)
        self.say(state={"status": "restarting" if going else "failed", "reason": None if going else event.reason[:500]})

    def _on_ModelDescribed(self, event: Any) -> None:
        self.say(model=event.tree, facts={"model": dict(event.facts)})

    def _on_LayersTimed(self, event: Any) -> None:
        kinds = {"time": event.seconds, "gradient": event.gradients, "memory": event.memory}
        self.say(heat={kind: {"step": event.step, "of": found} for kind, found in kinds.items() if found})

    def _on_Observed(self, event: Any) -> None:
        step, rows = int(event.step), self._delta.get("epochs", [])
        if event.scope == "epoch" and rows and rows[-1]["epoch"] == event.epoch + 1:
            rows[-1].update(event.values)
        for name, value in event.values.items():
            if isinstance(value, (int, float)) and (event.scope == "step" or name not in self._watched):
                self._watched.add(name) if event.scope == "step" else None
                self.point(f"observed/{name}", step, value, at=self._t(event), epoch=self._fraction(step))

    def _on_Decided(self, event: Any) -> None:
        self._line_of("Decided", event.to_dict(), "decision")

    def _on_other(self, kind: str, said: Mapping[str, Any]) -> None:
        step = said.get("step", self.step)
        values = said.get("values")
        if isinstance(values, Mapping):
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self.point(f"observed/{name}", int(step or 0), float(value), epoch=self._fraction(self.step))
            return
        self._unknown[kind] = self._unknown.get(kind, 0) + 1
        if self._unknown[kind] <= MOST_UNKNOWN:
            self._line_of(kind, said, "info")

    def _line_of(self, kind: str, said: Mapping[str, Any], level: str) -> None:
        words = [str(said[key]) for key in ("message", "reason") if said.get(key)]
        rest = {key: value for key, value in said.items() if key not in TOLD_OTHERWISE and value not in (None, "", {})}
        text = "; ".join(words)
        if rest and level != "decision":
            text = f"{text} {json.dumps(rest, default=str)[:500]}".strip()
        elif rest:
            told = ", ".join(f"{key}: {value}" for key, value in rest.items() if isinstance(value, (str, int, float)))
            text = f"{text} ({told})" if text and told else text or told
        self.note(text if level == "decision" else f"{kind}: {text}", level, step=int(said.get("step") or 0))

    # ---- lanes ---------------------------------------------------------------------------------------

    def _lane(self, rank: int | str) -> dict[str, Any]:
        return self._delta.setdefault("lanes", {}).setdefault(str(rank), {})

    def _span(self, rank: int, kind: str, begin: float, end: float) -> None:
        begin, end = max(0.0, round(begin, 3)), max(0.0, round(end, 3))
        if end >= begin:
            self._lane(rank).setdefault("spans", []).append([kind, begin, end])


def _eval_name(name: str) -> str:
    return "eval/" + name.removeprefix("eval_")


def _few(series: Series, most: int) -> list[Any]:
    """Return the points of a curve as they are sent, few enough."""
    if len(series) > most:
        kept = Series(most=most)
        for point in series.points:
            kept.add(point)
        series = kept
    return series.packed()


def _lay_over(under: dict[str, Any], over: Mapping[str, Any]) -> None:
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(under.get(key), dict):
            _lay_over(under[key], value)
        else:
            under[key] = value

"""Callbacks for the timeline and a monitor: activity of each rank, and time, memory and gradients of layers.

Steps that the host waits for are timed by its clock; `StepDone` has the durations of other steps, measured on the
device. Ranks started by this process send their activity to it, twice a second; under another launcher they write it to
the shared store, from which the first rank reads it.

Layers are measured about every 20 seconds. A step that runs operation by operation is measured while it runs. A
captured step cannot be: its first micro-batch is computed once more, without changing gradients, buffers or random
numbers. This takes less than 0.5 % of the run.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from itertools import accumulate
from typing import Any

import torch

from flodl.graph.tree import modules_of
from flodl.monitor.architecture import facts_of, picture_of, tree_of
from flodl.monitor.profiler import Profiler
from flodl.monitor.resources import Resources
from flodl.monitor.timeline import Timeline, lane_spans
from flodl.train.callback import Callback
from flodl.train.evaluate import evaluating
from flodl.train.events import LayersTimed, ModelDescribed, RankWork, StepDone
from flodl.train.step.outcome import Part

# Seconds between two messages of a rank to the monitor.
SEND_EVERY_S = 0.5


class RankActivity(Callback):
    """Records the activity of a rank as ``trainer.timeline``.

    Args:
        path: the first rank writes the timeline of all ranks here, without suffix; None for none.
        is_monitored: whether spans are sent to a monitor.
    """

    def __init__(self, path: str | None, is_monitored: bool) -> None:
        self.path, self.is_monitored = path, is_monitored

    def on_train_begin(self, trainer: Any) -> None:
        """Start recording; the first rank of each host samples the machine."""
        ranks = trainer.ranks
        samples = self.path is not None and not ranks.local_rank
        self.timeline = trainer.timeline = Timeline(ranks.rank, read=Resources().read if samples else None)
        self._trainer, self._shares = trainer, trainer.policy.shares_gradients and not ranks.solo
        self._sums: dict[str, float] = {}
        self._first, self._end, self._sent = math.inf, -math.inf, time.monotonic()
        self._begun = 0.0
        self._steps: list[StepDone] = []
        self._num_written, self._num_read = 0, [0] * ranks.world
        self._undo = trainer.events.subscribe(self._note)
        if self.is_monitored:
            self.timeline.subscribe(self._add_to_lane)
        self.timeline.start()

    def on_step_begin(self, trainer: Any, batches: Any) -> None:
        """Note the time."""
        self._begun = time.monotonic()

    def on_step_end(self, trainer: Any, result: Any) -> None:
        """Record a step."""
        if result.outcome is None:  # the host has waited for the step
            now, about = time.monotonic(), {"step": trainer.policy.lr_step, "epoch": trainer.epoch_number}
            self._steps = [event for event in self._steps if event.step != about["step"]]
            computed = min(now, self._begun + result.compute_ms / 1e3)
            self.timeline.add("step", self._begun, computed, **about)
            if self._shares:
                self.timeline.add("sync", computed, now, wait_ms=0.0, **about)
        self._send()

    def on_epoch_end(self, trainer: Any, epoch: int) -> None:
        """Send the rest of the epoch."""
        self._send(at_once=True)

    def on_train_end(self, trainer: Any) -> None:
        """Write the timeline of all ranks."""
        if self.path is not None:
            self._add_steps()
            self.timeline.stop()
            parts = trainer.ranks.gather(self.timeline.to_dict())
            if trainer.ranks.rank == 0:
                Timeline.merge(parts).write(self.path)

    def close(self, trainer: Any) -> None:
        """Stop recording."""
        if hasattr(self, "_undo"):
            with contextlib.suppress(Exception):  # the store may have ended with another rank
                self._send(at_once=True)
            self._undo()
            self.timeline.stop()

    def _note(self, event: Any) -> None:
        if isinstance(event, StepDone):
            self._steps.append(event)
        else:
            self.timeline.note(event)

    def _add_steps(self) -> None:
        """Add steps that the device has timed."""
        for event in self._steps:
            self.timeline.note(event)
            if self._shares:  # the synchronisation is part of the step, without a duration of its own
                self.timeline.add("sync", event.at_s, step=event.step, epoch=event.epoch, wait_ms=0.0)
        self._steps = []

    def _add_to_lane(self, span: dict[str, Any]) -> None:
        """Add a span without what overlaps the one before."""
        for kind, begin, end in lane_spans(span, self._end):
            self._sums[kind] = self._sums.get(kind, 0.0) + end - begin
            self._first, self._end = min(self._first, begin), end

    def _send(self, *, at_once: bool = False) -> None:
        self._add_steps()
        now, ranks = time.monotonic(), self._trainer.ranks
        if not self.is_monitored or (now - self._sent < SEND_EVERY_S and not at_once):
            return
        self._sent = now
        if self._sums:
            # One span for each kind, one after the other: a monitor shows sums.
            ends = [*accumulate(self._sums.values(), initial=self._first + time.time() - now)]
            spans = tuple(zip(self._sums, ends, ends[1:], strict=False))
            device = ranks.device
            name = f"{device}, {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)
            self._sums, self._first = {}, math.inf
            if ranks.rank == 0:
                self._trainer.events.emit(RankWork(rank=0, of=0, spans=spans, device=name))
            elif ranks.pipe is not None:
                ranks.pipe.send(("event", RankWork(rank=ranks.rank, of=ranks.rank, spans=spans, device=name)))
            elif ranks.store is not None:
                self._num_written += 1
                ranks.store.set(self._key(ranks.rank, self._num_written), json.dumps([spans, name]))
        if ranks.rank == 0 and ranks.pipe is None and ranks.store is not None:
            for rank in range(1, ranks.world):
                while ranks.store.check([key := self._key(rank, self._num_read[rank] + 1)]):
                    spans, name = json.loads(ranks.store.get(key))
                    self._num_read[rank] += 1
                    ranks.store.delete_key(key)
                    work = RankWork(rank=0, of=rank, spans=tuple(map(tuple, spans)), device=name)
                    self._trainer.events.emit(work)

    def _key(self, rank: int, number: int) -> str:
        return f"work/{self._trainer.ranks.attempt}/{rank}/{number}"


# Seconds between two measured steps.
MEASURE_EVERY_S = 20.0
# Time between two additional passes, as a multiple of their duration.
IDLE_RATIO = 200.0
# Steps at the start that are slower than later ones.
FIRST_STEPS = 2


class LayerProbe(Callback):
    """Describes the model when a run begins, and measures its layers, on the first rank."""

    def on_train_begin(self, trainer: Any) -> None:
        """Describe the model."""
        self._next, self._num_steps = 0.0, 0
        self._has_memory = False
        self._profiler: Profiler | None = None
        self._is_off = trainer.ranks.rank != 0 or bool(trainer.settings.compile)
        if trainer.ranks.rank == 0:
            model = trainer.model
            facts = {**facts_of(model), "precision": trainer.settings.precision}
            trainer.events.emit(ModelDescribed(tree=tree_of(model), facts=facts, picture=picture_of(model)))

    def on_step_begin(self, trainer: Any, batches: Any) -> None:
        """Measure this step, if it is time to."""
        self._num_steps += 1
        if self._is_off or self._num_steps <= FIRST_STEPS or not batches or self._profiler is not None:
            return
        if time.monotonic() < self._next:
            return
        try:
            device = trainer.step_.device
            if device is not None and (device.captures or device.end) is not None:
                self._compute_again(trainer, batches[0])
            else:
                self._profiler = Profiler(trainer.model, modules_of(trainer.model), gradients=True)
                self._next = time.monotonic() + MEASURE_EVERY_S
        except Exception as fault:  # a measurement must not end a run
            if self._has_memory:
                self._stop(trainer, fault)
            self._has_memory = True  # some models do not support hooks on saved tensors: next time without

    def on_step_end(self, trainer: Any, result: Any) -> None:
        """Emit the measurement when the device has finished the step."""
        profiler = self._profiler
        if profiler is None:
            return
        profiler.end()
        if not profiler.is_ready():
            return
        self._profiler = None
        of_step = profiler.measures_gradients
        try:
            gradients = profiler.scaled_gradient(result.grad_norm if of_step and result.outcome is None else None)
            memory, seconds = profiler.memory.values, profiler.time.values
        except Exception as fault:
            self._stop(trainer, fault)
            return
        self._has_memory = self._has_memory or bool(memory)
        step = trainer.policy.lr_step
        trainer.events.emit(LayersTimed(step=step, seconds=seconds, gradients=gradients.values, memory=memory))

    def close(self, trainer: Any) -> None:
        """Remove hooks."""
        profiler = getattr(self, "_profiler", None)
        if profiler is not None:
            profiler.end()

    def _stop(self, trainer: Any, fault: Exception) -> None:
        self.close(trainer)
        self._profiler, self._is_off = None, True
        trainer.warn(f"layers cannot be measured: {type(fault).__name__}: {str(fault)[:300]}")

    def _compute_again(self, trainer: Any, batch: Any) -> None:
        model, device, began = trainer.model, trainer.ranks.device, time.monotonic()
        learned = [p for p in model.parameters() if p.requires_grad]
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices), evaluating(model), trainer.graphs.apart():
            profiler = Profiler(model, modules_of(model), memory=not self._has_memory)
            try:
                loss = trainer.step_.loss_of(batch, Part())
                found = torch.autograd.grad(loss.as_mean(), learned, allow_unused=True)
            finally:
                profiler.end()
        pairs = zip(learned, found, strict=True)
        norms = {id(p): torch.linalg.vector_norm(g.detach().float()) for p, g in pairs if g is not None}
        profiler.set_norms(norms)
        self._profiler = profiler
        self._next = time.monotonic() + IDLE_RATIO * (time.monotonic() - began)

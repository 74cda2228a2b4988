"""Time, memory and gradients of the layers of a run, measured about every 20 seconds.

A step that runs operation by operation is measured while it runs. A captured step cannot be: its first micro-batch is
computed once more, without changing gradients, buffers or random numbers. This takes less than 0.5 % of the run.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from flodl.graph.tree import modules_of
from flodl.monitor.architecture import facts_of, picture_of, tree_of
from flodl.monitor.profiler import Profiler
from flodl.train.callback import Callback
from flodl.train.evaluate import evaluating
from flodl.train.events import LayersTimed, ModelDescribed, Warned
from flodl.train.step.outcome import Part

EVERY_S = 20.0
"""Seconds between two measured steps."""
IDLE_RATIO = 200.0
"""Time between two additional passes, as a multiple of their duration."""
FIRST_STEPS = 2
"""Steps at the start that are slower than later ones."""


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
                self._next = time.monotonic() + EVERY_S
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
        text = f"layers cannot be measured: {type(fault).__name__}: {str(fault)[:300]}"
        trainer.events.emit(Warned(rank=0, step=trainer.policy.lr_step, message=text))

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

"""Where the time of a forward pass goes and how large gradients are, layer by layer, looked at now and then.

A step that runs operation by operation is looked at while it runs. A recorded step cannot be: its first micro-batch is
computed once more beside it, without touching gradients, memory of the model or random numbers. That costs a pass each
time, so it is done seldom: it takes less than a two-hundredth of the run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from flodl.monitor.architecture import facts_of, tree_of
from flodl.monitor.module_costs import Look
from flodl.train.callback import Callback
from flodl.train.events import LayersTimed, ModelDescribed, Warned
from flodl.train.loss import batch_len

__all__ = ["LayerProbe"]

EVERY_S = 20.0
"""Seconds between two looks at steps that run as they are."""
REST = 200.0
"""Times as long as a pass of our own took, until the next."""
SETTLED = 2
"""Steps after which a run computes as fast as it will."""


class LayerProbe(Callback):
    """Describes the model when a run begins, and tells of its layers now and then, on the first rank."""

    def on_train_begin(self, trainer: Any) -> None:
        """Describe the model."""
        self._next, self._seen = 0.0, 0
        self._counted, self._passes = False, 1
        self._look: Look | None = None
        self._gave_up = trainer.ranks.rank != 0 or bool(trainer.settings.compile)
        if trainer.ranks.rank == 0:
            facts = {**facts_of(trainer.model), "precision": trainer.settings.precision}
            trainer.events.emit(ModelDescribed(tree=tree_of(trainer.model), facts=facts))

    def on_step_begin(self, trainer: Any, batches: Any) -> None:
        """Look at this step, if it is time to."""
        self._seen += 1
        if self._gave_up or self._seen <= SETTLED or not batches or self._look is not None:
            return
        if time.monotonic() < self._next:
            return
        try:
            device = trainer.step_.device
            if device is not None and (device.captures or device.end) is not None:
                self._compute_again(trainer, batches[0])
            else:
                # Counting bytes takes time of the host: such a look is one of its own, and the next step is timed.
                counts = not self._counted and trainer.ranks.device.type == "cuda"
                self._look = Look(trainer.model, trainer.ranks.device)
                self._look.begin(gradients=True, memory=counts)
                self._passes = len(batches)
                self._next = time.monotonic() + (0.0 if counts else EVERY_S)
        except Exception as fault:  # whatever a model does there, its run goes on
            self._give_up(trainer, fault)

    def on_step_end(self, trainer: Any, result: Any) -> None:
        """Tell of what was looked at, as soon as it is known."""
        look = self._look
        if look is None:
            return
        look.end()
        if not look.is_known():
            return
        self._look = None
        whole = result.grad_norm if look.is_scaled and result.outcome is None else None
        try:
            seconds, gradients = look.read(whole)
            memory = look.bytes()
        except Exception as fault:
            self._give_up(trainer, fault)
            return
        if look.is_counting:
            self._counted = True
            memory = {path: count / self._passes for path, count in memory.items()}
            seconds = {} if look.is_scaled else seconds
        told = LayersTimed(step=trainer.policy.lr_step, seconds=seconds, gradients=gradients, memory=memory)
        trainer.events.emit(told)

    def close(self, trainer: Any) -> None:
        """Take hooks away."""
        if getattr(self, "_look", None) is not None:
            assert self._look is not None
            self._look.end()

    def _give_up(self, trainer: Any, fault: Exception) -> None:
        if self._look is not None:
            self._look.end()
        self._look, self._gave_up = None, True
        text = f"layers cannot be looked at one by one: {type(fault).__name__}: {str(fault)[:300]}"
        trainer.events.emit(Warned(rank=0, step=trainer.policy.lr_step, message=text))

    def _compute_again(self, trainer: Any, batch: Any) -> None:
        device = trainer.ranks.device
        began = time.monotonic()
        look = Look(trainer.model, device)
        learned = [p for p in trainer.model.parameters() if p.requires_grad]
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices), _judging(trainer.model), trainer.graphs.apart():
            counts = not self._counted
            look.begin(gradients=False, memory=counts)
            try:
                with trainer.observing.watching:
                    loss = trainer.step_.loss_of(batch, batch_len(batch))
                trainer.observing.watching.take()  # nobody asked for what was watched here
                found = torch.autograd.grad(loss.as_mean(), learned, allow_unused=True)
            finally:
                look.end()
        norms = {
            id(p): torch.linalg.vector_norm(g.detach().float())
            for p, g in zip(learned, found, strict=True)
            if g is not None
        }
        look.take(norms)
        self._look, self._passes = look, 1
        self._next = time.monotonic() + REST * (time.monotonic() - began)


@contextlib.contextmanager
def _judging(model: nn.Module) -> Iterator[None]:
    """Have the model as it is when judged: no dropout, no statistics that move."""
    learning = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in learning:
            module.training = True

"""Where the time of a forward pass goes and how large gradients are, layer by layer, looked at now and then.

A step that runs operation by operation is looked at while it runs. A recorded step cannot be: its first micro-batch is
computed once more beside it, without touching gradients, memory of the model or random numbers. That costs a pass each
time, so it is done seldom: it takes less than a two-hundredth of the run.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from flodl.monitor.architecture import facts_of, parts_of, tree_of
from flodl.train.callback import Callback
from flodl.train.events import LayersTimed, ModelDescribed, Warned

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
        self._look: _Look | None = None
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
            if trainer.step_.captures is not None or trainer.step_.common is not None:
                self._compute_again(trainer, batches[0])
            else:
                self._look = _Look(trainer.model, trainer.ranks.device)
                self._look.begin(gradients=True)
                self._next = time.monotonic() + EVERY_S
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
        except Exception as fault:
            self._give_up(trainer, fault)
            return
        trainer.events.emit(LayersTimed(step=trainer.policy.lr_step, seconds=seconds, gradients=gradients))

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
        look = _Look(trainer.model, device)
        accumulator, learned = trainer.step_.accumulator, [p for p in trainer.model.parameters() if p.requires_grad]
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices), _judging(trainer.model), trainer.graphs.apart():
            look.begin(gradients=False)
            try:
                with trainer.observing.watching:
                    loss = accumulator.loss_of(trainer.step_.train_step, batch)
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
        self._look = look
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


class _Look:
    """One look at a pass: times of the parts by hooks, norms of gradients by parameter.

    Attributes:
        is_scaled: whether norms are those of sums, to be brought to the norm of the step.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.is_scaled = False
        self._handles: list[Any] = []
        self._running: dict[int, list[Any]] = {}
        self._spans: list[tuple[int, Any, Any]] = []
        self._norms: dict[int, torch.Tensor] = {}
        self._done: Any = None

    def begin(self, *, gradients: bool) -> None:
        for module in {id(module): module for _, module in parts_of(self.model)}.values():
            self._handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave, with_kwargs=True))
        if gradients:
            self.is_scaled = True
            for parameter in self.model.parameters():
                if parameter.requires_grad and parameter.is_leaf:
                    self._handles.append(parameter.register_post_accumulate_grad_hook(self._grown))

    def end(self) -> None:
        """Take the hooks away."""
        while self._handles:
            self._handles.pop().remove()
        if self._done is None:
            self._done = self._mark()

    def take(self, norms: dict[int, torch.Tensor]) -> None:
        """Take norms by the identity of a parameter."""
        self._norms = norms
        self._done = self._mark()

    def is_known(self) -> bool:
        """Return whether the device is done with it."""
        return not isinstance(self._done, torch.cuda.Event) or self._done.query()

    def read(self, whole: float | None) -> tuple[dict[str, float], dict[str, float]]:
        """Return seconds and norms by path; norms such that all together come to ``whole`` where that is given."""
        spent: dict[int, float] = {}
        for key, begin, end in self._spans:
            spent[key] = spent.get(key, 0.0) + _between(begin, end)
        squares = _squares(self._norms)
        factor = 1.0
        total = math.sqrt(math.fsum(squares.values()))
        if whole is not None and math.isfinite(whole) and total > 0:
            factor = whole / total
        seconds: dict[str, float] = {}
        gradients: dict[str, float] = {}
        for path, module in parts_of(self.model):
            if id(module) in spent:
                seconds[path] = float(f"{spent[id(module)]:.4g}")
            own = [squares[id(p)] for p in module.parameters() if id(p) in squares]
            if own:
                gradients[path] = float(f"{factor * math.sqrt(math.fsum(own)):.4g}")
        return seconds, {path: norm for path, norm in gradients.items() if math.isfinite(norm)}

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._running.setdefault(id(module), []).append(self._mark())

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        if self._running.get(id(module)):
            self._spans.append((id(module), self._running[id(module)].pop(), self._mark()))

    def _grown(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None and not parameter.grad.is_sparse:
            self._norms[id(parameter)] = torch.linalg.vector_norm(parameter.grad.detach().float())

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


def _between(begin: Any, end: Any) -> float:
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3


def _squares(norms: dict[int, torch.Tensor]) -> dict[int, float]:
    if not norms:
        return {}
    values = torch.stack([norm.to(torch.float64) for norm in norms.values()]).square().tolist()
    return dict(zip(norms, values, strict=True))

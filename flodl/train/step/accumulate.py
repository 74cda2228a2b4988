"""The first part of a step: gradients, sums of losses and counts of micro-batches, added up.

Gradients of *sums* of losses are added up, so that the same samples give the same step however they are cut into
micro-batches and ranks; they are divided once, by the count of all. A step whose samples are one micro-batch of one
rank divides before the backward pass instead, which gives the bits of a plain ``mean().backward()`` loop. Nothing here
waits for the device, so all of it can be captured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from flodl.distributed.average import BufferMean
from flodl.distributed.gradients import GradientSum
from flodl.distributed.group import Ranks
from flodl.errors import TrainError
from flodl.train.callback import Hooks
from flodl.train.loss import Loss, as_loss, batch_len
from flodl.train.precision import Precision
from flodl.train.step.outcome import OBSERVED, Part
from flodl.train.watching import Watching

__all__ = ["Accumulator", "StepTimer", "TrainStep"]

TrainStep = Callable[[nn.Module, Any], Any]


class Accumulator:
    """Add up gradients, losses and counts of micro-batches.

    Args:
        model: the model, on its device.
        optimizer: an optimiser of its parameters.
        train_step: ``train_step(model, batch)``, see `flodl.train.loss.as_loss` for what it may return.
        ranks: the ranks of the run; None for this process alone.
        precision: autocast and loss scale; None for float32.
        share_gradients: sum gradients over ranks (Sync); otherwise each rank takes its own step.
        max_grad_norm: clip the gradient to this 2-norm.
        on_nan: ``"stop"`` raises if the loss or the gradient is not finite, ``"skip"`` leaves the step out. In both
            cases no rank applies it.
        sum_of_means: add the *means* of micro-batches and ranks without dividing: the gradient is larger by the factor
            accumulation times processes. For recipes that were tuned to it.
        slowdown: this rank sleeps so that its compute takes this many times as long; for experiments.
        reduce_on_cpu: sum gradients through host memory on every device.
        sharded: weights are sharded, so the backward pass sums gradients over ranks, and every rank takes as many
            passes as the others.

    Attributes:
        hooks: callbacks that act around the backward pass; None if there are none.
        watching: collects values inside the model; None if nothing is collected.
        arrived: returns True if the oldest pending figures are on this host.
        timer: measures the compute time of this rank.
        sends_early: gradients are sent during the backward pass; False only fills and marks their buckets.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        train_step: TrainStep | None,
        *,
        ranks: Ranks | None = None,
        precision: Precision | None = None,
        share_gradients: bool = True,
        max_grad_norm: float | None = None,
        on_nan: str = "stop",
        sum_of_means: bool = False,
        slowdown: float = 1.0,
        reduce_on_cpu: bool = False,
        sharded: bool = False,
    ) -> None:
        if on_nan not in ("stop", "skip"):
            raise TrainError(f"Step: found on_nan={on_nan!r}; expected 'stop' or 'skip'.", on_nan=on_nan)
        self.model, self.optimizer, self.train_step = model, optimizer, train_step
        self.ranks = ranks or Ranks(device=next(model.parameters()).device)
        self.precision = precision or Precision("fp32", self.ranks.device)
        self.share_gradients = share_gradients and not self.ranks.solo
        self.max_grad_norm, self.on_nan = max_grad_norm, on_nan
        self.sum_of_means, self.sharded = sum_of_means, sharded
        self.hooks: Hooks | None = None
        self.watching: Watching | None = None
        self.sums = GradientSum(self.ranks, model, on_cpu=reduce_on_cpu)
        self.buffers: BufferMean | None = None
        if self.share_gradients and any(True for _ in model.buffers()):
            self.buffers = BufferMean(self.ranks, model)
        self.timer = StepTimer(self.ranks.device, slowdown=slowdown)
        self.arrived: Callable[[], bool] = lambda: False
        self._part = Part()
        self._unit = 1.0  # float16 sums are kept small by this power of two, which rounds nothing
        self._unit_known = self.precision.scaler is None
        self.sends_early = True

    def accumulate(self, batches: Sequence[Any]) -> Part:
        """Add up gradients, losses and counts of micro-batches, without waiting for the device."""
        part = self._part = Part()
        if not (batches or self._unit_known):
            self._agree_on_unit(0.0)
        alone = len(batches) == 1 and not self.share_gradients
        # Gradients that callbacks change after the pass are sent after it.
        early = self.share_gradients and not self.sharded and not (self.hooks and self.hooks.acts("after_backward"))
        for left, batch in zip(range(len(batches) - 1, -1, -1), batches, strict=True):
            samples = batch_len(batch)
            if self.watching is None:
                loss = self.loss_of(batch, samples)
            else:
                with self.watching:
                    loss = self.loss_of(batch, samples)
                if observed := self.watching.take():
                    part.add_metrics(observed, OBSERVED)
            if not self._unit_known:
                self._agree_on_unit(loss.count)
            if early and not left:
                with self.sums.during_backward(send=self.sends_early):
                    self._add(part, loss, samples, alone)
            else:
                self._add(part, loss, samples, alone)
        return part

    def loss_of(self, batch: Any, samples: int) -> Loss:
        """Return the loss of a micro-batch with this many samples."""
        assert self.train_step is not None
        if self.precision.products is None:
            return as_loss(self.train_step(self.model, batch), samples)
        with self.precision.context():
            return as_loss(self.train_step(self.model, batch), samples)

    def _add(self, part: Part, loss: Loss, samples: int, alone: bool = False) -> None:
        """Add the gradient and the figures of one micro-batch; divide at once if it is ``alone`` in its step."""
        loss.check_depends()
        if self.hooks is not None:
            loss = self.hooks.before_backward(loss)
        if self.sum_of_means or alone:
            value, part.divided = loss.as_mean(), True
        else:
            value = loss.as_sum() * self._unit if self._unit != 1 else loss.as_sum()
        scaler = self.precision.scaler
        (value if scaler is None else scaler.scale(value)).backward()
        if self.hooks is not None:
            self.hooks.call("after_backward")
        if self.sum_of_means:
            total, count = value.detach().to(torch.float64), 1.0
        else:
            total, count = loss.summed(), loss.count
            count = count.detach() if isinstance(count, torch.Tensor) else float(count)
        part.total, part.count = (total, count) if part.total is None else (part.total + total, part.count + count)
        part.samples += samples
        if loss.metrics:
            part.add_metrics(loss.metrics)

    def _agree_on_unit(self, count: Any) -> None:
        """Choose, once, the power of two that keeps scaled float16 sums about as small as means."""
        rows = self.ranks.table([float(count)]) if self.share_gradients else [[float(count)]]
        self._unit = 2.0 ** -math.ceil(math.log2(max(1.0, *(row[0] for row in rows))))
        self._unit_known = True


class StepTimer:
    """Measure the compute time of steps, and slow a rank down for experiments.

    On CUDA the time between two events counts, because the host runs ahead of the device. A slowed rank waits for its
    device, so the clock of the host measures it.

    Args:
        device: the device that computes.
        slowdown: factor by which the measured time is stretched by sleeping.
        event: creates a timing event; `torch.cuda.Event` by default.
    """

    def __init__(self, device: torch.device, *, slowdown: float = 1.0, event: Callable[[], Any] | None = None) -> None:
        self.device, self.slowdown = device, slowdown
        self._cuda, self._events = device.type == "cuda", device.type == "cuda" and slowdown <= 1
        self._event = event or partial(torch.cuda.Event, enable_timing=True)
        self._spans: list[tuple[Any, Any]] = []
        self._previous: list[tuple[Any, Any]] = []
        self._ms = self._start = 0.0
        self._mark: Any = None

    def __enter__(self) -> None:
        """Start to measure."""
        if self._events:
            self._mark = self._event()
            self._mark.record()
            return
        if self._cuda:
            torch.cuda.synchronize(self.device)
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        """Add the time since `__enter__`; with the slowdown unless an error or another object is given."""
        if self._events:
            end = self._event()
            end.record()
            self._spans.append((self._mark, end))
            return
        if self._cuda:
            torch.cuda.synchronize(self.device)
        spent = time.perf_counter() - self._start
        if self.slowdown > 1 and not any(error):
            time.sleep(spent * (self.slowdown - 1))
            spent *= self.slowdown
        self._ms += spent * 1e3

    def take(self) -> float:
        """Return the milliseconds measured since the last call; waits for the device."""
        ms, spans, self._ms, self._spans = self._ms, self._spans, 0.0, []
        return ms + _ms_of(spans) if spans else ms

    def take_previous(self) -> float:
        """Return the milliseconds of the step before, so that the device always has a next step; the first waits."""
        sent, self._spans = self._spans, []
        known, self._previous = self._previous or sent, sent
        return _ms_of(known)


def _ms_of(spans: list[tuple[Any, Any]]) -> float:
    spans[-1][1].synchronize()
    return sum(start.elapsed_time(end) for start, end in spans)

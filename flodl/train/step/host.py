"""One optimiser step: accumulate, reduce, decide, apply.

Gradients of *sums* of losses are added up, so that the same samples give the same step however they are cut into
micro-batches and ranks; they are divided once, by the count of all. A step whose samples are one micro-batch of one
rank divides before the backward pass instead, which gives the bits of a plain ``mean().backward()`` loop.

`HostStep.accumulate` serves all steps. `HostStep.update` finishes a step with figures that the host reads; it serves
loss scales, all optimisers, shards and CPUs. On a device that should never wait, `flodl.train.step.device` reduces,
decides and applies without the host.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from flodl.distributed.average import BufferMean
from flodl.distributed.gradients import GradientSum
from flodl.distributed.group import Ranks
from flodl.distributed.sharded import whole
from flodl.errors import TrainError
from flodl.monitor.collect import COLLECTOR
from flodl.train.callback import Hooks
from flodl.train.loss import GRADIENT_FAULT, NOTHING_COUNTED, Loss, as_loss, batch_len, decide
from flodl.train.observing import Watching
from flodl.train.settings import Precision
from flodl.train.step.outcome import OBSERVED, Part, StepResult, not_finite, pack_metrics, read_metrics

TrainStep = Callable[[nn.Module, Any], Any]
MAX_OVERFLOWS = 50


class HostStep:
    """A step whose figures the host reads.

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
        runner: takes a step without the host, from batches, number and flags; None if the host decides.
        part: sums of this rank in the step under way.
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
        self.buffers = BufferMean(self.ranks, model) if self.share_gradients and [*model.buffers()] else None
        self.timer = StepTimer(self.ranks.device, slowdown=slowdown)
        self.arrived: Callable[[], bool] = lambda: False
        self.runner: Callable[[Sequence[Any], int, Sequence[float]], StepResult] | None = None
        self.part = Part()
        # Float16 sums are kept small by this power of two, which rounds nothing; None until the first step.
        self._unit: float | None = 1.0 if self.precision.scaler is None else None
        self._overflows = 0
        self._spare: Any = None

    def __call__(self, *batches: Any) -> StepResult:
        """Return the result of one optimiser step over these micro-batches; errors as for `run`."""
        return self.run(batches)

    def run(self, batches: Sequence[Any], *, step: int = 0, flags: Sequence[float] = ()) -> StepResult:
        """Return the result of one optimiser step over ``batches``, this rank's micro-batches; may be empty.

        Args:
            step: number of the step, for messages.
            flags: numbers that are summed over ranks.

        Raises:
            TrainError: loss or gradient is not finite and ``on_nan`` is ``"stop"``, or the loss depends on no
                parameter.
        """
        if not self.ranks.solo:
            self.ranks.phase("forward", step)
        if self.runner is not None:
            return self.runner(batches, step, flags)
        timer = self.timer
        if timer.is_plain:
            began = time.perf_counter()
            self.accumulate(batches)
            timer.ms = (time.perf_counter() - began) * 1e3
        else:
            with timer:
                self.accumulate(batches)
        return self.update(step=step, flags=flags)

    # ---- accumulate ----------------------------------------------------------------------------------

    def accumulate(self, batches: Sequence[Any]) -> Part:
        """Add up gradients, losses and counts of micro-batches, without waiting for the device."""
        part = self.part = Part()
        if self._unit is None and not batches:
            self._agree_on_unit(0.0)
        more = self._extra_passes(batches) if self.sharded else 0
        alone = len(batches) == 1 and not self.share_gradients
        # Gradients that callbacks change after the pass are sent after it.
        early = self.share_gradients and not self.sharded and not (self.hooks and self.hooks.acts("after_backward"))
        for left, batch in zip(range(len(batches) - 1, -1, -1), batches, strict=True):
            loss = self.loss_of(batch, part)
            if not self.ranks.solo:
                self.ranks.phase("backward")
            if self._unit is None:
                self._agree_on_unit(loss.count)
            with self.sums.during_backward(send=self.runner is None) if early and not left else nullcontext():
                self.add(part, loss, alone)
            if not self.ranks.solo and left:
                self.ranks.phase("forward")
        for _ in range(more):
            # For the other ranks, whose passes wait for this rank's part of the weights; it counts for nothing.
            (self.loss_of(self._spare, Part()).as_sum() * 0.0).backward()
        return part

    def loss_of(self, batch: Any, part: Part) -> Loss:
        """Return the loss of a micro-batch; add its samples, and values collected inside the model, to ``part``."""
        watching = self.watching
        if watching is None:
            value = self._forward(batch)
        elif watching.idle is None:
            with watching:
                value = self._forward(batch)
            part.add_metrics(watching.take(), OBSERVED)
        else:  # nothing is watched, but the model may call `flodl.monitor.log`
            before = COLLECTOR.set(watching.idle)
            try:
                value = self._forward(batch)
            finally:
                COLLECTOR.reset(before)
            if watching.idle.pairs:
                part.add_metrics(watching.take_idle(), OBSERVED)
        samples = batch_len(batch)
        part.samples += samples
        return as_loss(value, samples)

    def _forward(self, batch: Any) -> Any:
        assert self.train_step is not None
        if self.precision.products is None:
            return self.train_step(self.model, batch)
        with self.precision.context():
            return self.train_step(self.model, batch)

    def add(self, part: Part, loss: Loss, alone: bool = False) -> None:
        """Add the gradient and the figures of one micro-batch; divide first if it is ``alone`` in its step."""
        if not loss.sum.requires_grad:
            raise TrainError("backward: the loss does not depend on any trainable parameter (no_grad, detach, frozen).")
        if self.hooks is not None:
            loss = self.hooks.before_backward(loss)
        if self.sum_of_means or alone:
            value, part.divided = loss.as_mean(), True
        else:
            value, unit = loss.as_sum(), self._unit or 1.0
            value = value if unit == 1 else value * unit
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
        if loss.metrics:
            part.add_metrics(loss.metrics)

    def _agree_on_unit(self, count: Any) -> None:
        """Choose, once, the power of two that keeps scaled float16 sums about as small as means."""
        rows = self.ranks.table([float(count)]) if self.share_gradients else [[float(count)]]
        self._unit = 2.0 ** -math.ceil(math.log2(max(1.0, *(row[0] for row in rows))))

    def _extra_passes(self, batches: Sequence[Any]) -> int:
        """Return how many passes other ranks take more than this one.

        Raises:
            TrainError: a rank has no batch now and never had one; on all ranks alike.
        """
        self._spare = batches[-1] if batches else self._spare
        rows = self.ranks.table([float(len(batches)), float(self._spare is None)])
        if any(row[1] for row in rows) and any(row[0] for row in rows):
            raise TrainError(
                f"shard: the first batch has too few rows; expected {self.ranks.world}, one for each rank.",
                world=self.ranks.world,
            )
        return int(max(row[0] for row in rows)) - len(batches)

    def own_gradients(self, samples: int) -> None:
        """Use gradients that the user's own ``backward()`` left: means over ``samples`` items of an unknown loss."""
        part = self.part
        part.count, part.samples, part.loss_known = float(samples), samples, False
        part.divided = self.sum_of_means or not self.share_gradients
        if not part.divided:
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            torch._foreach_mul_(grads, part.count)  # pyright: ignore[reportPrivateImportUsage]

    # ---- reduce, decide and apply --------------------------------------------------------------------

    def update(self, *, step: int = 0, flags: Sequence[float] = ()) -> StepResult:
        """Finish the step: sum over ranks, divide by the count, clip, update the parameters, clear gradients."""
        part, self.part = self.part, Part()
        if self.share_gradients:
            total, count, unknown, flags = self._reduce(part, flags)
        else:
            total = 0.0 if part.total is None else float(part.total)  # waits for the device
            count, unknown = float(part.count), not part.loss_known
        loss = total / count if count and not self.sum_of_means else total
        grads = [p.grad for p in self.model.parameters() if p.grad is not None and p.requires_grad]
        count = count if grads else 0.0
        norm = self._norm_of_mean(grads, count, part.divided) if count else torch.zeros(())
        grad_norm = float(whole(norm) if self.sharded else norm)
        reason = decide(loss, count, grad_norm)
        if reason:
            reason = self._leave_out(reason, loss, grad_norm, step)
        else:
            self._apply(norm)
        timer = self.timer
        compute_ms, timer.ms = timer.ms if timer.is_plain else timer.take(), 0.0
        loss = math.nan if unknown else loss
        result = StepResult(loss, count, part.samples, grad_norm, compute_ms, not reason, reason, flags)
        if part.metrics:
            packed, rest = pack_metrics(part.metrics, self.ranks.device)
            result.add_metrics(read_metrics(packed, iter(() if rest is None else rest.tolist())))
        self.model.zero_grad(set_to_none=True)
        return result

    def _reduce(self, part: Part, flags: Sequence[float]) -> tuple[float, float, bool, Sequence[float]]:
        """Sum gradients, and return the sums of losses, counts and flags, and whether a loss is unknown."""
        self.ranks.phase("reduce")
        lacking = () if self.sharded else self.sums.send()
        total = 0.0 if part.total is None else float(part.total)  # waits for the device
        row = [total, float(part.count), float(not part.loss_known), *flags]
        rows = self.ranks.table(row) if self.sharded else self.sums.finish(lacking, row)
        if self.buffers is not None:
            self.buffers(float(part.samples))
        self.ranks.phase("optimiser")
        total, count, unknown, *summed = [float(sum(column)) for column in zip(*rows, strict=True)]
        return total, count, bool(unknown), summed

    def _norm_of_mean(self, grads: list[torch.Tensor], count: float, divided: bool) -> torch.Tensor:
        """Convert gradients of the sum to gradients of the mean loss, and return their norm."""
        if self.precision.scaler is not None:
            self.precision.scaler.unscale_(self.optimizer)
        if not divided:
            divide(grads, count * (self._unit or 1.0))
        if self.hooks is not None:
            self.hooks.call("before_optimizer_step")
            grads = [p.grad for p in self.model.parameters() if p.grad is not None and p.requires_grad]
        return get_total_norm(grads)

    def _apply(self, norm: torch.Tensor) -> None:
        """Clip, and update the parameters."""
        if self.max_grad_norm is not None:
            learned = [p for p in self.model.parameters() if p.requires_grad]
            clip_grads_with_norm_(learned, self.max_grad_norm, norm)
        scaler = self.precision.scaler
        if scaler is None:
            take_step(self.optimizer)
            return
        scaler.step(self.optimizer)
        scaler.update()
        self._overflows = 0

    def _leave_out(self, reason: str, loss: float, grad_norm: float, step: int) -> str:
        """Return why the step is left out, in detail.

        Raises:
            TrainError: loss or gradient is not finite and ``on_nan`` is ``"stop"``, or too many steps overflowed.
        """
        scaler = self.precision.scaler
        if reason == NOTHING_COUNTED:
            return reason
        if reason == GRADIENT_FAULT and scaler is not None:
            scaler.step(self.optimizer)  # finds the infinities and does nothing
            scaler.update()
            self._overflows += 1
            if self._overflows >= MAX_OVERFLOWS:
                raise TrainError(
                    f"step {step}: the float16 gradient overflowed {self._overflows} times in a row, at a loss scale "
                    f"of {scaler.get_scale():g}. Train in bf16 or fp32.",
                    step=step,
                )
            return f"float16 overflow, loss scale now {scaler.get_scale():g}"
        grads = ((name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None)
        tensor = next((name for name, grad in grads if not bool(whole(torch.isfinite(grad).all()))), None)
        if self.on_nan == "stop":
            raise not_finite(self.ranks.rank, step, reason, loss, grad_norm, tensor)
        if scaler is not None:
            scaler.update()
        return f"{reason} (first in {tensor})" if tensor else reason


def divide(grads: Sequence[torch.Tensor], count: float | torch.Tensor) -> None:
    """Divide gradients in place, each by the count in its own precision."""
    if not isinstance(count, torch.Tensor):
        if count != 1:
            torch._foreach_div_(list(grads), float(count))  # pyright: ignore[reportPrivateImportUsage]
        return
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        part = [grad for grad in grads if grad.dtype == dtype]
        torch._foreach_div_(part, count.to(dtype))  # pyright: ignore[reportPrivateImportUsage]


def has_plain_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if ``optimizer.step`` is that of its class in torch, without hooks."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks or "step" in vars(optimizer):
        return False
    return type(optimizer).__module__.startswith("torch.optim.")


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """Call ``optimizer.step()``, without its import of `torch._dynamo`."""
    profiled = getattr(type(optimizer).step, "__wrapped__", None)
    update = getattr(profiled, "__wrapped__", None)
    if update is None or "torch._dynamo" in sys.modules or not has_plain_step(optimizer):
        optimizer.step()
        return
    name = f"Optimizer.step#{type(optimizer).__name__}.step"
    has_grad = optimizer.defaults.get("differentiable", False)
    with torch.autograd.profiler.record_function(name), torch.set_grad_enabled(has_grad):
        update(optimizer)


class StepTimer:
    """Measure the compute time of steps, and slow a rank down for experiments.

    On CUDA the time between two events counts, because the host runs ahead of the device. A slowed rank waits for its
    device, so the clock of the host measures it.

    Args:
        device: the device that computes.
        slowdown: factor by which the measured time is stretched by sleeping.

    Attributes:
        is_plain: True if the time of the host's clock counts, without a slowdown.
        ms: milliseconds measured by the host's clock since the last `take`.
    """

    def __init__(self, device: torch.device, *, slowdown: float = 1.0) -> None:
        self.device, self.slowdown = device, slowdown
        self._cuda = device.type == "cuda"
        self._events = self._cuda and slowdown <= 1
        self.is_plain = not self._cuda and slowdown <= 1
        self._spans: list[tuple[Any, Any]] = []
        self._previous: list[tuple[Any, Any]] = []
        self.ms = self._start = 0.0
        self._mark: Any = None

    def __enter__(self) -> None:
        """Start to measure."""
        if self._events:
            self._mark = torch.cuda.Event(enable_timing=True)
            self._mark.record()
            return
        if self._cuda:
            torch.cuda.synchronize(self.device)
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        """Add the time since `__enter__`; with the slowdown unless an error or another object is given."""
        if self._events:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self._spans.append((self._mark, end))
            return
        if self._cuda:
            torch.cuda.synchronize(self.device)
        spent = time.perf_counter() - self._start
        if self.slowdown > 1 and not any(error):
            time.sleep(spent * (self.slowdown - 1))
            spent *= self.slowdown
        self.ms += spent * 1e3

    def take(self) -> float:
        """Return the milliseconds measured since the last call; waits for the device."""
        ms, spans, self.ms, self._spans = self.ms, self._spans, 0.0, []
        return ms + _ms_of(spans) if spans else ms

    def take_previous(self) -> float:
        """Return the milliseconds of the step before, so that the device always has a next step; the first waits."""
        sent, self._spans = self._spans, []
        known, self._previous = self._previous or sent, sent
        return _ms_of(known)


def _ms_of(spans: list[tuple[Any, Any]]) -> float:
    spans[-1][1].synchronize()
    return sum(start.elapsed_time(end) for start, end in spans)

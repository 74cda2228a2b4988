"""One optimiser step: accumulate, reduce, decide, apply.

Gradients of *sums* of losses are added up, so that the same samples give the same step however they are cut into
micro-batches and ranks; they are divided once, by the count of all. A step whose samples are one micro-batch of one
rank divides before the backward pass instead, which gives the bits of a plain ``mean().backward()`` loop.

`Step` reads its figures and decides on the host: that serves loss scales, all optimisers, shards and CPUs. On a device
that should never wait, `flodl.train.step.device` reduces, decides and applies without the host.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from flodl.distributed.average import BufferMean
from flodl.distributed.gradients import GradientSum
from flodl.distributed.group import Ranks, Summed
from flodl.distributed.sharded import whole
from flodl.errors import TrainError
from flodl.train.callback import Hooks
from flodl.train.loss import Loss, as_loss, batch_len
from flodl.train.precision import Precision
from flodl.train.recorded import Recorded
from flodl.train.step.capturer import Capturer, CudaCapturer
from flodl.train.step.device import DeviceStep
from flodl.train.step.fused import divide, why_unsupported
from flodl.train.step.outcome import OBSERVED, Figures, Part, StepResult, not_finite, pack_metrics, read_metrics
from flodl.train.watching import Watching

__all__ = ["Step", "StepTimer", "TrainStep"]

TrainStep = Callable[[nn.Module, Any], Any]
MAX_OVERFLOWS = 50


class Step:
    """Turn micro-batches into one update of the parameters.

    ::

        step = Step(model, adamw(1e-3)(model.parameters()), train_step)
        step.capture()  # on CUDA: capture each shape of batch once, then replay it
        for batch in loader:
            result = step(batch)
        print(step.recorded())

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
        device: takes steps without the host; None if the host decides.
        unrecorded: why steps are not captured on a device that can; None if they are.
        arrived: returns True if the oldest pending figures are on this host.
        timer: measures the compute time of this rank.
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
        self.device: DeviceStep | None = None
        self.unrecorded: str | None = None
        self.arrived: Callable[[], bool] = lambda: False
        self._part = Part()
        self._unit = 1.0  # float16 sums are kept small by this power of two, which rounds nothing
        self._unit_known = self.precision.scaler is None
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
        self.ranks.phase("forward", step)
        if self.device is not None:
            return self.device.run(batches, step, flags)
        more = self._extra_passes(batches) if self.sharded else 0
        with self.timer:
            self.accumulate(batches)
            for _ in range(more):
                # For the other ranks, whose passes wait for this rank's part of the weights; it counts for nothing.
                (self.loss_of(self._spare, 1).as_sum() * 0.0).backward()
        return self.update(step=step, flags=flags)

    # ---- accumulate ----------------------------------------------------------------------------------

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
                with self.sums.during_backward(send=self.device is None):
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

    def _extra_passes(self, batches: Sequence[Any]) -> int:
        """Return how many passes other ranks take more than this one.

        Raises:
            TrainError: a rank has no batch now and never had one; on all ranks alike.
        """
        self._spare = batches[-1] if batches else self._spare
        rows = self.ranks.table([float(len(batches)), float(self._spare is None)])
        if any(row[1] for row in rows) and any(row[0] for row in rows):
            raise TrainError(
                "shard: the first batch has fewer rows than there are ranks, and each rank needs one. "
                f"Expected at least {self.ranks.world} rows; use larger batches.",
                world=self.ranks.world,
            )
        return int(max(row[0] for row in rows)) - len(batches)

    def _agree_on_unit(self, count: Any) -> None:
        """Choose, once, the power of two that keeps scaled float16 sums about as small as means."""
        rows = self.ranks.table([float(count)]) if self.share_gradients else [[float(count)]]
        self._unit = 2.0 ** -math.ceil(math.log2(max(1.0, *(row[0] for row in rows))))
        self._unit_known = True

    # ---- a loop that the user writes -----------------------------------------------------------------

    def timed(self) -> StepTimer:
        """Return a context that adds its time to the compute time of this step."""
        return self.timer

    def backward(self, loss: Loss, samples: int) -> None:
        """Add the gradient of one micro-batch."""
        self._add(self._part, loss, samples)

    def observe(self, values: Mapping[str, tuple[Any, Any]]) -> None:
        """Add values collected inside the model in one forward pass."""
        self._part.add_metrics(values, OBSERVED)

    def own_gradients(self, weight: float) -> None:
        """Use gradients that the user's own ``backward()`` left: means over ``weight`` items of an unknown loss."""
        if self.share_gradients and not self.sum_of_means:
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            torch._foreach_mul_(grads, float(weight))  # pyright: ignore[reportPrivateImportUsage]
        divided = self.sum_of_means or not self.share_gradients
        self._part = Part(None, float(weight), round(weight), divided, loss_known=False)

    # ---- reduce, decide and apply on the host --------------------------------------------------------

    def update(self, *, step: int = 0, flags: Sequence[float] = ()) -> StepResult:
        """Finish the step: sum over ranks, divide by the count, clip, update the parameters, clear gradients."""
        part, self._part = self._part, Part()
        total, count, unknown, flags = self._reduce(part, flags)
        loss = total / count if count and not self.sum_of_means else total
        packed, rest = pack_metrics(part.metrics, self.ranks.device) if part.metrics else ((), None)
        metrics = read_metrics(packed, iter(() if rest is None else rest.tolist()))
        grads = [p.grad for p in self.model.parameters() if p.grad is not None and p.requires_grad]
        norm = self._norm_of_mean(grads, count, part.divided) if grads and count else None
        figures = Figures(loss, count if grads else 0.0, 0.0 if norm is None else float(whole(norm)), metrics)
        fault, scaler = figures.fault, self.precision.scaler
        overflow = scaler is not None and fault == "gradient"
        if norm is not None and (fault is None or overflow):
            self._apply(norm, overflow)
        elif scaler is not None and fault is not None:
            scaler.update()
        result = StepResult(samples=part.samples, flags=flags)
        raising = partial(not_finite, self.ranks.rank, step) if self.on_nan == "stop" and not overflow else None
        tensor = None if fault is None or overflow else self._first_not_finite()
        result.settle(figures, self.timer.take(), raising=raising, tensor=tensor)
        if unknown:
            result.loss = math.nan
        if overflow:
            result.reason = self._count_overflow(step)
        self.model.zero_grad(set_to_none=True)
        return result

    def _reduce(self, part: Part, flags: Sequence[float]) -> tuple[float, float, bool, Sequence[float]]:
        """Sum gradients, and return the sums of losses, counts and flags, and whether a loss is unknown."""
        sums = self.share_gradients and not self.sharded
        self.ranks.phase("reduce" if self.share_gradients else "optimiser")
        lacking = self.sums.send() if sums else ()
        total = 0.0 if part.total is None else float(part.total)  # waits for the device
        if not self.share_gradients:
            return total, float(part.count), not part.loss_known, flags
        row = [total, float(part.count), float(not part.loss_known), *flags]
        rows = self.sums.finish(lacking, row) if sums else self.ranks.table(row)
        if self.buffers is not None:
            self.buffers(float(part.samples))
        self.ranks.phase("optimiser")
        total, count, unknown, *summed = [float(sum(column)) for column in zip(*rows, strict=True)]
        return total, count, bool(unknown), summed

    def _norm_of_mean(self, grads: list[torch.Tensor], count: float, divided: bool) -> torch.Tensor:
        """Make gradients those of the mean loss, and return their norm."""
        if self.precision.scaler is not None:
            self.precision.scaler.unscale_(self.optimizer)
        if not divided:
            divide(grads, count * self._unit)
        if self.hooks is not None:
            self.hooks.call("before_optimizer_step")
            grads = [p.grad for p in self.model.parameters() if p.grad is not None and p.requires_grad]
        return get_total_norm(grads)

    def _apply(self, norm: torch.Tensor, overflow: bool) -> None:
        """Clip, and update the parameters; after an overflow of float16 only lower the loss scale."""
        if self.max_grad_norm is not None and not overflow:
            learned = [p for p in self.model.parameters() if p.requires_grad]
            clip_grads_with_norm_(learned, self.max_grad_norm, norm)
        scaler = self.precision.scaler
        if scaler is None:
            self.optimizer.step()
            return
        scaler.step(self.optimizer)  # does nothing if it finds infinities
        scaler.update()
        self._overflows = self._overflows + 1 if overflow else 0

    def _count_overflow(self, step: int) -> str:
        """Return why the step was left out.

        Raises:
            TrainError: too many steps in a row overflowed.
        """
        assert self.precision.scaler is not None
        scale = f"{self.precision.scaler.get_scale():g}"
        if self._overflows >= MAX_OVERFLOWS:
            raise TrainError(
                f"step {step}: the float16 gradient overflowed {self._overflows} times in a row, at a loss scale of "
                f"{scale}. Expected no overflow after a few halvings. Train in bf16 or fp32.",
                step=step,
            )
        return f"float16 overflow, loss scale now {scale}"

    def _first_not_finite(self) -> str | None:
        """Return the name of the first parameter whose gradient is not finite."""
        for name, p in self.model.named_parameters():
            if p.grad is not None and not bool(whole(torch.isfinite(p.grad).all())):
                return name
        return None

    # ---- on the device -------------------------------------------------------------------------------

    def capture(self, *, strict: bool = False) -> str | None:
        """Decide on the device from now on, and capture steps if it is a CUDA device.

        Args:
            strict: raise if steps cannot be captured, instead of a warning.

        Returns:
            Why steps are decided on the host; None if they are not.
        """
        capturer = CudaCapturer(self.ranks.device) if self.ranks.device.type == "cuda" else None
        return self.decide_on_device(capturer, warnings.warn, deferred=False, strict=strict)

    def decide_on_device(
        self,
        capturer: Capturer | None,
        warn: Callable[[str], Any],
        *,
        deferred: bool,
        strict: bool = False,
        num_rows: bool = True,
    ) -> str | None:
        """Reduce, decide and apply on the device from now on; return why this is not possible, or None.

        Args:
            capturer: captures steps; None runs them one operation at a time.
            warn: receives one message if steps cannot be captured.
            deferred: results have no figures, which `StepResult.outcome` contains, and no times. Otherwise a CUDA
                device still runs one step ahead of the known figures: a result then has the time of the step before.
            strict: raise if steps cannot be captured.
            num_rows: whether the step may read `flodl.data.Batch.num_rows`.
        """
        if self.sharded:
            return "the weights are sharded"
        if self.share_gradients and self.sums.on_cpu:
            return "gradients travel through host memory"
        if self.precision.scaler is not None:
            return "float16 needs a loss scale, which the host decides"
        reason = why_unsupported(self.optimizer)
        if reason is None:
            self.device = DeviceStep(self, capturer, warn, deferred=deferred, strict=strict, num_rows=num_rows)
        return reason

    def recorded(self, steps: int = 0) -> Recorded | None:
        """Return how many steps were replayed, and why not all; None on a device that captures none.

        Args:
            steps: number of steps of the run, for runs without captures.
        """
        if self.device is not None and self.device.captures is not None:
            return self.device.captures.recorded
        return None if self.unrecorded is None else Recorded(steps, 0, 0, reason=self.unrecorded)

    @property
    def summed(self) -> Summed | None:
        """How gradients are summed over ranks, and why not faster; None if they are not."""
        if not self.share_gradients:
            return None
        if self.sharded:
            cuda = self.ranks.device.type == "cuda"
            return Summed("NCCL", "the weights are sharded") if cuda else Summed("gloo")
        return self.sums.summed

    def count_writes(self) -> None:
        """Increment the versions of parameters that replays wrote to, which torch does not see."""
        if self.device is not None and self.device.num_graphs:
            torch.autograd.graph.increment_version(list(self.model.parameters()))

    def drop_captures(self) -> None:
        """Free the device memory of captured graphs."""
        if self.device is not None:
            self.device.forget()

    def invalidate_if_changed(self) -> None:
        """Drop captured graphs if the model or the optimiser changed."""
        if self.device is not None:
            self.device.invalidate_if_changed()

    def loaded(self) -> None:
        """Drop what depends on parameters and buffers, which were replaced, or on modules, which changed."""
        if self.device is not None:
            self.device.reload()
        if self.buffers is not None:
            self.buffers.refresh()


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

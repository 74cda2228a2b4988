"""One optimiser step: accumulate, reduce, decide, apply.

The parts stand in one place each: gradients of micro-batches are added up in `flodl.train.step.accumulate`, summed over
ranks in `flodl.distributed.gradients`; whether a step counts, and what it moves, is decided on the device in
`flodl.train.step.on_device`, where a captured graph can stand in for it (`Step.decide_on_device`). Optimisers that
cannot be told there to leave a step out, and loss scales, are decided here, from figures that are read now.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from flodl.distributed.average import BufferMean
from flodl.distributed.gradients import GradientSum
from flodl.distributed.group import Ranks
from flodl.distributed.sharded import whole
from flodl.distributed.summed import Summed
from flodl.errors import TrainError
from flodl.train.callback import Hooks
from flodl.train.loss import Loss, batch_len
from flodl.train.precision import Precision
from flodl.train.recorded import Recorded
from flodl.train.step.accumulate import Accumulator, Part
from flodl.train.step.capture import Capturer, Captures
from flodl.train.step.on_device import DeviceStep, divide, make_ready, unfit
from flodl.train.step.outcome import Outcome, StepResult, apart, not_finite
from flodl.train.step.pace import StepTimes
from flodl.train.step.shared import Common, SharedStep

__all__ = ["Step", "TrainStep"]

TrainStep = Callable[[nn.Module, Any], Any]
MAX_OVERFLOWS = 50


class Step:
    """Turns micro-batches into one update of the parameters.

    Args:
        train_step: ``train_step(model, batch)``, see `flodl.train.loss.as_loss` for what it may return.
        share_gradients: sum gradients over ranks (Sync); otherwise the step is this rank's own.
        on_nan: ``"stop"`` raises when loss or gradient is not finite, ``"skip"`` leaves the step out.
            Either way no rank applies it.
        sum_of_means: add up the *means* of micro-batches and ranks without dividing: the gradient is too large by
            accumulation times processes. For recipes that were tuned to it.
        slowdown: this rank sleeps so that its compute takes this many times as long; for experiments.
        reduce_on_cpu: sum gradients through host memory whatever the device.
        sharded: weights are sharded, so gradients are summed over ranks by the backward pass itself, and every rank
            takes as many passes as the others.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        train_step: TrainStep | None,
        *,
        ranks: Ranks,
        precision: Precision,
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
        self.ranks, self.precision = ranks, precision
        self.share_gradients = share_gradients and not ranks.solo
        self.max_grad_norm, self.on_nan, self.slowdown = max_grad_norm, on_nan, slowdown
        self.sum_of_means, self.sharded = sum_of_means, sharded
        self._spare: Any = None
        self._reduce = GradientSum(ranks, model, on_cpu=reduce_on_cpu)
        self._buffers = (
            BufferMean(ranks, model) if self.share_gradients and any(True for _ in model.buffers()) else None
        )
        self.accumulator = Accumulator(model, precision, sum_of_means=sum_of_means)
        self._on_device: Callable[[TrainStep, Sequence[Any]], Outcome] | None = None
        self._deferred = False
        self._lag: StepTimes | None = None
        self.captures: Captures | None = None
        self.unrecorded: str | None = None  # why steps on a device that captures them are not captured
        self.common: Common | None = None
        self.arrived: Callable[[], bool] = lambda: False  # whether the oldest figures under way are on this host
        self._device_step: DeviceStep | None = None
        self._unit_known = precision.scaler is None
        self._overflows = 0
        self._begin()

    @property
    def hooks(self) -> Hooks | None:
        """Callbacks that act around the backward pass."""
        return self.accumulator.hooks

    @hooks.setter
    def hooks(self, hooks: Hooks | None) -> None:
        self.accumulator.hooks = hooks

    def _begin(self) -> None:
        self._part = Part()
        self._compute_ms = 0.0
        self._spans: list[tuple[Any, Any]] = []

    def decide_on_device(
        self,
        capturer: Capturer | None,
        warn: Callable[[str], Any],
        *,
        deferred: bool,
        strict: bool = False,
        num_rows: bool = True,
    ) -> str | None:
        """Leave the decisions of a step to the device from now on; return why that cannot be, or None.

        Args:
            capturer: captures steps; None runs them one operation at a time.
            warn: told once when steps turn out not to be capturable.
            deferred: results come without figures, which `StepResult.outcome` holds, and without times. Else a CUDA
                device still runs one step ahead of what is known: a result then has the time of the step before.
            strict: raise where steps turn out not to be capturable.
            num_rows: whether the step may read `flodl.data.Batch.num_rows`.
        """
        if self.sharded:
            return "the weights are sharded"
        if self.share_gradients and self._reduce.on_cpu:
            return "gradients travel through host memory"
        if self.precision.scaler is not None:
            return "float16 needs a loss scale, which the host decides"
        reason = unfit(self.optimizer)
        if reason is not None:
            return reason
        rules: Any = {
            "max_grad_norm": self.max_grad_norm,
            "sticky": self.on_nan == "stop",
            "sum_of_means": self.sum_of_means,
        }
        model, optimizer, ranks = self.model, self.optimizer, self.ranks
        # A rank that is made slow waits, so as to know how long.
        may_wait = self.slowdown <= 1
        self._deferred = deferred and may_wait
        if self.share_gradients:
            shared = SharedStep(model, optimizer, self.precision, ranks, self._reduce, self._buffers, **rules)
            again = None
            if capturer is not None:
                again, overlap = capturer.beside(ranks)
                if isinstance(overlap, str):
                    self._reduce.prepare_capture(fault=f"sums do not begin beside the backward pass ({overlap})")
                else:
                    shared.begin_sums_early(overlap, warn)
            self.common = Common(shared, again, warn, strict=strict)
            self._device_step = shared
        else:
            self._device_step = DeviceStep(model, optimizer, ranks.device, self.precision, **rules)
            if may_wait and not deferred and ranks.device.type == "cuda":
                self._deferred, self._lag = True, StepTimes(ranks.device)
        self._on_device = self._device_step
        self._device_step.accumulator.watching = self.accumulator.watching
        if capturer is not None:
            self.captures = Captures(self._device_step, capturer, warn, strict=strict, num_rows=num_rows)
            self._on_device = self.captures.run
        return None

    def _run_on_device(self, batches: Sequence[Any], step: int, flags: Sequence[float]) -> StepResult:
        assert self.train_step is not None
        assert self._on_device is not None
        assert self._device_step is not None
        self.ranks.phase("forward", step)
        self._device_step.hold_rates()
        start, graphs = time.perf_counter(), self._graphs()
        samples = sum(batch_len(batch) for batch in batches)
        if self.common is not None and self._reduce.refresh_buckets():
            self._forget()
        if self._lag is not None:
            self._lag.begin()
        outcome = (self._on_device if batches else self._device_step)(self.train_step, batches)
        result = StepResult(math.nan, 0.0, samples, math.nan, 0.0, flags=list(flags), outcome=outcome)
        if self.common is not None:
            self.ranks.phase("reduce")
            agreed = self.common.step.agree(outcome, flags, arrived=self.arrived())
            result.flags, result.arrived = agreed.flags, agreed.arrived
            self.ranks.phase("optimiser")
            result.outcome = outcome = self.common.run(outcome, samples, agreed)
        if self._lag is not None:
            result.compute_ms = self._lag.end()
        if not self._deferred:
            figures = outcome.read(outcome.row.tolist())
            spent = (time.perf_counter() - start) * 1e3
            if self.slowdown > 1 and graphs == self._graphs():  # capturing is not what a device is slow at
                time.sleep(spent / 1e3 * (self.slowdown - 1))
                spent *= self.slowdown
            stop = self.on_nan == "stop"
            result.settle(figures, spent, raising=partial(not_finite, self.ranks.rank, step) if stop else None)
        return result

    def _forget(self) -> None:
        for captures in (self.captures, self.common):
            if captures is not None:
                captures.forget()

    def _graphs(self) -> int:
        return sum(made.num_graphs for made in (self.captures, self.common) if made is not None)

    def run(self, batches: Sequence[Any], *, step: int = 0, flags: Sequence[float] = ()) -> StepResult:
        """Return the result of one optimiser step over ``batches``, this rank's micro-batches; may be none.

        Args:
            step: number of the step, for messages.
            flags: figures that are summed over ranks along the way.

        Raises:
            TrainError: loss or gradient is not finite and ``on_nan`` is ``"stop"``.
        """
        assert self.train_step is not None
        if self._on_device is not None and (batches or self.share_gradients):
            return self._run_on_device(batches, step, flags)
        if not batches:
            self._agree_on_unit(0.0)
        more = self._passes_more(batches) if self.sharded else 0
        # What callbacks change after the pass has to be what is sent.
        changed = self.hooks is not None and bool(self.hooks.acts("after_backward"))

        @contextlib.contextmanager
        def backward(last: bool) -> Iterator[None]:
            self.ranks.phase("backward")
            with self._reduce.reducing_in_backward(
                last and self.share_gradients and not self.sharded and not changed
            ):  # nothing is added after the last pass
                yield
            if not last:
                self.ranks.phase("forward", step)

        self.ranks.phase("forward", step)
        with self.timed():
            self._part = self.accumulator.run(
                self.train_step,
                batches,
                alone=not self.share_gradients,
                around=backward,
                counted=self._agree_on_unit,
            )
            for _ in range(more):
                # For the others, whose passes wait for this rank's part of the weights; it counts for nothing.
                (self.accumulator.loss_of(self.train_step, self._spare).as_sum() * 0.0).backward()
        return self.update(step=step, flags=flags)

    def _passes_more(self, batches: Sequence[Any]) -> int:
        """Return how many passes other ranks take more than this one.

        Raises:
            TrainError: a rank has none of its own, and never had a batch to pass in its place; on all ranks alike.
        """
        self._spare = batches[-1] if batches else self._spare
        rows = self.ranks.table([float(len(batches)), float(self._spare is None)])
        if any(row[1] for row in rows) and any(row[0] for row in rows):
            raise TrainError(
                "shard: the first batch has fewer rows than there are ranks, and each of them has to pass some. "
                f"Expected at least {self.ranks.world}; give larger batches.",
                world=self.ranks.world,
            )
        return int(max(row[0] for row in rows)) - len(batches)

    def _agree_on_unit(self, count: Any) -> None:
        """Choose, once, the power of two that keeps scaled float16 sums about as small as means."""
        if self._unit_known:
            return
        rows = self.ranks.table([float(count)]) if self.share_gradients else [[float(count)]]
        self.accumulator.unit = 2.0 ** -math.ceil(math.log2(max(1.0, *(row[0] for row in rows))))
        self._unit_known = True

    def timed(self) -> _Timed:
        """Return a context that adds its time to the compute time of this step."""
        return _Timed(self)

    def backward(self, loss: Loss, samples: int) -> None:
        """Add the gradient of one micro-batch, for a loop that the user writes."""
        self.accumulator.add(self._part, loss, samples)

    def observe(self, values: Mapping[str, tuple[Any, Any]]) -> None:
        """Take in what was watched in one forward pass of a loop that the user writes."""
        self._part.observe(values)

    def own_gradients(self, weight: float) -> None:
        """Take gradients that the user's own ``backward()`` left as means, standing for ``weight`` items.

        Of which loss they are nobody said, so that of the step is NaN.
        """
        grads = [p.grad for p in self._parameters() if p.grad is not None]
        if self.share_gradients and not self.sum_of_means:
            torch._foreach_mul_(grads, float(weight))  # pyright: ignore[reportPrivateImportUsage]
        total = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        divided = self.sum_of_means or not self.share_gradients
        self._part = Part(total, float(weight), round(weight), divided)
        self._loss_known = False

    _loss_known = True

    def update(self, *, step: int = 0, flags: Sequence[float] = ()) -> StepResult:
        """Finish the step: sum over ranks, divide by the count, clip, move the parameters, clear gradients."""
        device, part = self.ranks.device, self._part
        # Of a loss that nobody said a rank without a batch does not know that.
        rest = torch.tensor([*flags, float(not self._loss_known)], dtype=torch.float64, device=device)
        totals = torch.cat([part.pair(device), rest])
        if self.share_gradients:
            self.ranks.phase("reduce")
            totals = self.ranks.sum_(totals) if self.sharded else self._reduce(totals)
            if self._buffers is not None:
                self._buffers(float(part.samples))
        self.ranks.phase("optimiser")
        loss_sum, count, *summed, unknown = totals.tolist()
        for start, end in self._spans:
            end.synchronize()
            self._compute_ms += start.elapsed_time(end)
        metrics, observed = apart(part.figures())
        result = StepResult(
            loss_sum / count if count and not self.sum_of_means else loss_sum,
            count,
            part.samples,
            0.0,
            self._compute_ms,
            flags=summed,
            metrics=metrics,
            observed=observed,
        )
        self._apply(result, step)
        if unknown:
            result.loss, self._loss_known = math.nan, True
        self.model.zero_grad(set_to_none=True)
        self._begin()
        return result

    def _apply(self, result: StepResult, step: int) -> None:
        scaler = self.precision.scaler
        grads = [p.grad for p in self._parameters() if p.grad is not None]
        if not grads or result.count == 0:
            result.applied, result.reason = False, "nothing was counted in this step"
            return
        if scaler is not None:
            scaler.unscale_(self.optimizer)
        if not self._part.divided and not self.sum_of_means:
            divide(grads, result.count * self.accumulator.unit)
        if self.hooks is not None:
            self.hooks.call("before_optimizer_step")
            grads = [p.grad for p in self._parameters() if p.grad is not None]
        norm = get_total_norm(grads)
        result.grad_norm = float(whole(norm))
        if scaler is not None and math.isfinite(result.loss) and not math.isfinite(result.grad_norm):
            self._overflow(result, step)
            return
        if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            self._not_finite(result, step)
            if scaler is not None:
                scaler.update()
            return
        if self.max_grad_norm is not None:
            clip_grads_with_norm_(self._parameters(), self.max_grad_norm, norm)
        if scaler is not None:
            scaler.step(self.optimizer)
            scaler.update()
            self._overflows = 0
        else:
            self.optimizer.step()

    def _overflow(self, result: StepResult, step: int) -> None:
        """Leave out a step whose scaled float16 gradient overflowed; the scale halves."""
        scaler = self.precision.scaler
        assert scaler is not None
        scaler.step(self.optimizer)  # sees the infinities and does nothing
        scaler.update()
        result.applied, result.reason = False, f"float16 overflow, loss scale now {scaler.get_scale():g}"
        self._overflows += 1
        if self._overflows >= MAX_OVERFLOWS:
            raise TrainError(
                f"step {step}: the float16 gradient overflowed {self._overflows} times in a row, at a loss scale of "
                f"{scaler.get_scale():g}. Expected it to fit after a few halvings. Train in bf16 or fp32.",
                step=step,
            )

    def _not_finite(self, result: StepResult, step: int) -> None:
        what = "loss" if not math.isfinite(result.loss) else "gradient"
        named = [
            name
            for name, p in self.model.named_parameters()
            if p.grad is not None and not bool(whole(torch.isfinite(p.grad).all()))
        ]
        where = f" (first in {named[0]})" if named else ""
        result.applied, result.reason = False, f"{what} is not finite{where}"
        if self.on_nan == "skip":
            return
        value = result.loss if what == "loss" else result.grad_norm
        raise not_finite(self.ranks.rank, step, what, value, named[0] if named else None)

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (p for p in self.model.parameters() if p.requires_grad)

    def recorded(self, steps: int) -> Recorded | None:
        """Return what became of the steps of this run; None on a device that captures none.

        Args:
            steps: how many there were.
        """
        if self.captures is not None:
            return self.captures.recorded
        return None if self.unrecorded is None else Recorded(steps, 0, 0, reason=self.unrecorded)

    @property
    def summed(self) -> Summed | None:
        """By what gradients are summed over ranks, and why not by what would be faster; None where they are not."""
        if not self.share_gradients:
            return None
        if self.sharded:
            cuda = self.ranks.device.type == "cuda"
            return Summed("NCCL", "the weights are sharded") if cuda else Summed("gloo")
        return self._reduce.summed

    def count_writes(self) -> None:
        """Tell torch that replays wrote to the parameters, which it does not see."""
        if self._graphs():
            torch.autograd.graph.increment_version(list(self.model.parameters()))

    def drop_captures(self) -> None:
        """Give back the device memory of what was captured; garbage collection would do it some day."""
        self._forget()

    def invalidate_if_changed(self) -> None:
        """Note that somebody may have changed the model or the optimiser."""
        for captures in (self.captures, self.common):
            if captures is not None:
                captures.invalidate_if_changed()

    def loaded(self) -> None:
        """Note that parameters and buffers were replaced from outside, modules changed, or others learn now."""
        self._forget()
        if self._device_step is not None:
            make_ready(self.optimizer, self.ranks.device)
        if self._buffers is not None:
            self._buffers.refresh()


class _Timed:
    """Measures compute, and stretches it where a slow rank is simulated.

    On CUDA the time between two events counts, since the host runs ahead of the device; a simulated
    slow rank waits for its device, so the host's clock serves it.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self.cuda = step.ranks.device.type == "cuda"

    def __enter__(self) -> None:
        if self.cuda and self.step.slowdown > 1:
            torch.cuda.synchronize(self.step.ranks.device)
        if self.cuda and self.step.slowdown <= 1:
            self.mark = torch.cuda.Event(enable_timing=True)
            self.mark.record()
        self.start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        step = self.step
        if self.cuda and step.slowdown <= 1:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            step._spans.append((self.mark, end))
            return
        if self.cuda:
            torch.cuda.synchronize(step.ranks.device)
        spent = time.perf_counter() - self.start
        if step.slowdown > 1 and error[0] is None:
            time.sleep(spent * (step.slowdown - 1))
            spent *= step.slowdown
        step._compute_ms += spent * 1e3

"""One optimiser step: forward, loss, backward over micro-batches; one sum over ranks; one division; clip; update.

The exact-step contract lives here. Gradients of *sums* of losses are added up over micro-batches and
ranks and divided once by the count of all of them, so the same samples give the same step however they
were cut. A step whose samples are one micro-batch of one rank divides before the backward pass instead,
which is the same number and, to the bit, what a plain ``mean().backward()`` loop computes.

`Step.run` takes everything that varies as arguments and keeps everything else fixed. A step whose samples
are all one rank's may leave its decisions to the device (`Step.decide_on_device`), where a recorded graph can
stand in for it; everything else asks the device once a step and decides here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from flodl.distributed.average import BufferMean, GradientSum
from flodl.distributed.group import Ranks
from flodl.errors import TrainError
from flodl.train.callback import Hooks
from flodl.train.capture import Captures, Recorder
from flodl.train.loss import Loss, as_loss, batch_len
from flodl.train.on_device import DeviceStep, Figures, Outcome, unfit
from flodl.train.pace import StepTimes
from flodl.train.precision import Precision
from flodl.train.shared_step import SharedStep

__all__ = ["Step", "StepResult", "TrainStep"]

TrainStep = Callable[[nn.Module, Any], Any]
MAX_OVERFLOWS = 50


@dataclass
class StepResult:
    """What one step did.

    Attributes:
        loss: mean loss over ``count`` items, as computed before the update.
        count: items counted, over ranks where gradients are summed over them.
        samples: samples of this rank.
        grad_norm: 2-norm of the whole gradient before clipping.
        compute_ms: time of forward and backward on this rank.
        applied: whether parameters moved.
        reason: why not, when they did not.
        flags: sums over ranks of the flags given to the step.
        metrics: ``name: (sum, count)`` of this rank.
        outcome: the figures while they are on the device; `settle` puts them here.
    """

    loss: float
    count: float
    samples: int
    grad_norm: float
    compute_ms: float
    applied: bool = True
    reason: str = ""
    flags: list[float] = field(default_factory=list)
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    outcome: Outcome | None = None

    def settle(
        self, figures: Figures, compute_ms: float, *, raising: Callable[[str, float], TrainError] | None
    ) -> None:
        """Take in the figures that came from the device.

        Args:
            compute_ms: how long the device took.
            raising: makes the error for a loss or gradient (the word and its value) that is not finite; None
                leaves it at the step not being applied.

        Raises:
            TrainError: what ``raising`` made.
        """
        self.loss, self.count, self.grad_norm = figures.loss, figures.count, figures.grad_norm
        self.metrics, self.compute_ms, self.outcome = figures.metrics, compute_ms, None
        if figures.fault is not None:
            self.applied, self.reason = False, f"{figures.fault} is not finite"
            if raising is not None:
                raise raising(figures.fault, self.loss if figures.fault == "loss" else self.grad_norm)
        elif not figures.count:
            self.applied, self.reason = False, "nothing was counted in this step"


class Step:
    """Turns micro-batches into one update of the parameters.

    Args:
        train_step: ``train_step(model, batch)``, see `flodl.train.loss.as_loss` for what it may return.
        share_gradients: sum gradients over ranks (Sync); otherwise the step is this rank's own.
        on_nan: ``"stop"`` raises when loss or gradient is not finite, ``"skip"`` leaves the step out.
            Either way no rank applies it.
        compat: ``"transformers"`` adds up the *means* of micro-batches and ranks without dividing, as
            that library's Trainer does for encoder heads: the gradient is too large by accumulation
            times processes. For recipes that were tuned to it.
        slowdown: this rank sleeps so that its compute takes this many times as long; for experiments.
        reduce_on_cpu: sum gradients through host memory whatever the device.
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
        compat: str | None = None,
        slowdown: float = 1.0,
        reduce_on_cpu: bool = False,
    ) -> None:
        if on_nan not in ("stop", "skip") or compat not in (None, "transformers"):
            raise TrainError(
                f"Step: found on_nan={on_nan!r}, compat={compat!r}; expected 'stop' or 'skip', and None or "
                "'transformers'.",
                on_nan=on_nan,
                compat=compat,
            )
        self.model, self.optimizer, self.train_step = model, optimizer, train_step
        self.ranks, self.precision = ranks, precision
        self.share_gradients = share_gradients and not ranks.solo
        self.max_grad_norm, self.on_nan, self.compat, self.slowdown = max_grad_norm, on_nan, compat, slowdown
        self._reduce = GradientSum(ranks, model, on_cpu=reduce_on_cpu)
        self._buffers = (
            BufferMean(ranks, model) if self.share_gradients and any(True for _ in model.buffers()) else None
        )
        self._on_device: Callable[[TrainStep, Sequence[Any]], Outcome] | None = None
        self._deferred = False
        self._lag: StepTimes | None = None
        self.captures: Captures | None = None
        self.hooks: Hooks | None = None  # callbacks that act around the backward pass
        self._device_step: DeviceStep | None = None
        self._unit = 1.0  # float16 sums are kept small by this power of two, which rounds nothing
        self._unit_known = precision.scaler is None
        self._overflows = 0
        self._begin()

    def _begin(self) -> None:
        self._totals: torch.Tensor | None = None
        self._samples = 0
        self._compute_ms = 0.0
        self._divided = self.compat is not None
        self._spans: list[tuple[Any, Any]] = []
        self._metrics: dict[str, list[Any]] = {}

    def decide_on_device(
        self, recorder: Recorder | None, warn: Callable[[str], Any], *, deferred: bool, strict: bool = False
    ) -> str | None:
        """Leave the decisions of a step to the device from now on; return why that cannot be, or None.

        Args:
            recorder: records steps; None runs them one operation at a time.
            warn: told once when steps turn out not to be recordable.
            deferred: results come without figures, which `StepResult.outcome` holds, and without times. Else a CUDA
                device still runs one step ahead of what is known: a result then has the time of the step before.
            strict: raise where steps turn out not to be recordable.
        """
        if self.share_gradients and self._reduce.on_cpu:
            return "gradients travel through host memory"
        if self.precision.scaler is not None:
            return "float16 needs a loss scale, which the host decides"
        reason = unfit(self.optimizer)
        if reason is not None:
            return reason
        rules: Any = {"max_grad_norm": self.max_grad_norm, "sticky": self.on_nan == "stop", "compat": self.compat}
        model, optimizer, ranks = self.model, self.optimizer, self.ranks
        if self.share_gradients:
            self._device_step = SharedStep(model, optimizer, self.precision, ranks, self._buffers, **rules)
        else:
            self._device_step = DeviceStep(model, optimizer, ranks.device, self.precision, **rules)
        # A slow rank waits, so as to know how long; all ranks must know of each other's flags at once.
        may_wait = self.slowdown <= 1 and not self.share_gradients
        self._deferred = deferred and may_wait
        if may_wait and not deferred and ranks.device.type == "cuda":
            self._deferred, self._lag = True, StepTimes(ranks.device)
        self._on_device = self._device_step
        if recorder is not None:
            self.captures = Captures(self._device_step, recorder, warn, strict=strict)
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
        shared = self._device_step if isinstance(self._device_step, SharedStep) else None
        if shared is not None and shared.sums.renew() and self.captures is not None:
            self.captures.forget()
        if self._lag is not None:
            self._lag.begin()
        outcome = (self._on_device if batches else self._device_step)(self.train_step, batches)
        if shared is not None:
            self.ranks.phase("reduce")
            outcome = shared.finish(outcome, flags, samples)
        result = StepResult(math.nan, 0.0, samples, math.nan, 0.0, flags=list(flags), outcome=outcome)
        if self._lag is not None:
            result.compute_ms = self._lag.end()
        if not self._deferred:
            values = outcome.row.tolist()
            figures = outcome.read(values)
            if shared is not None and flags:
                result.flags = values[-len(flags) :]
            spent = (time.perf_counter() - start) * 1e3
            if self.slowdown > 1 and graphs == self._graphs():  # recording is not what a device is slow at
                time.sleep(spent / 1e3 * (self.slowdown - 1))
                spent *= self.slowdown
            stop = self.on_nan == "stop"
            result.settle(figures, spent, raising=partial(not_finite, self.ranks.rank, step) if stop else None)
        return result

    def _graphs(self) -> int:
        return self.captures.num_graphs if self.captures is not None else 0

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
        alone = len(batches) == 1 and not self.share_gradients
        if not batches:
            self._agree_on_unit(0.0)
        for number, batch in enumerate(batches, start=1):
            self.ranks.phase("forward", step)
            with self.timed():
                with self.precision.context():
                    loss = as_loss(self.train_step(self.model, batch), batch_len(batch))
                self._agree_on_unit(loss.count)
                self.ranks.phase("backward")
                last = number == len(batches)  # nothing is added to the gradients after its pass
                with self._reduce.sending(last and self.share_gradients):
                    self.backward(loss, batch_len(batch), alone=alone)
        return self.update(step=step, flags=flags)

    def _agree_on_unit(self, count: Any) -> None:
        """Choose, once, the power of two that keeps scaled float16 sums about as small as means."""
        if self._unit_known:
            return
        rows = self.ranks.table([float(count)]) if self.share_gradients else [[float(count)]]
        self._unit = 2.0 ** -math.ceil(math.log2(max(1.0, *(row[0] for row in rows))))
        self._unit_known = True

    def timed(self) -> _Timed:
        """Return a context that adds its time to the compute time of this step."""
        return _Timed(self)

    def backward(self, loss: Loss, samples: int, *, alone: bool = False) -> None:
        """Add the gradient of one micro-batch.

        Args:
            alone: this is the only micro-batch of the step, so it may be divided at once.
        """
        loss.check_depends()
        if self.hooks is not None:
            loss = self.hooks.before_backward(loss)
        totals = loss.totals()
        if self.compat == "transformers":
            value = loss.as_mean()
            totals = torch.stack([value.detach().to(torch.float64), torch.ones_like(totals[0])])
        elif alone:
            value, self._divided = loss.as_mean(), True
        else:
            value = loss.as_sum() * self._unit
        scaler = self.precision.scaler
        (scaler.scale(value) if scaler is not None else value).backward()
        if self.hooks is not None:
            self.hooks.call("after_backward")
        self._totals = totals if self._totals is None else self._totals + totals
        self._samples += samples
        for name, (total, count) in loss.metrics.items():
            kept = self._metrics.setdefault(name, [0.0, 0.0])
            kept[0] = kept[0] + (total.detach() if isinstance(total, torch.Tensor) else total)
            kept[1] = kept[1] + (count.detach() if isinstance(count, torch.Tensor) else count)

    def own_gradients(self, weight: float) -> None:
        """Take gradients that the user's own ``backward()`` left as means, standing for ``weight`` items."""
        grads = [p.grad for p in self._parameters() if p.grad is not None]
        if self.share_gradients and self.compat is None:
            torch._foreach_mul_(grads, float(weight))  # pyright: ignore[reportPrivateImportUsage]
        else:
            self._divided = True
        self._totals = torch.tensor([0.0, weight], dtype=torch.float64, device=self.ranks.device)
        self._samples = round(weight)

    def update(self, *, step: int = 0, flags: Sequence[float] = ()) -> StepResult:
        """Finish the step: sum over ranks, divide by the count, clip, move the parameters, clear gradients."""
        device = self.ranks.device
        own = self._totals if self._totals is not None else torch.zeros(2, dtype=torch.float64, device=device)
        totals = torch.cat([own.to(device), torch.tensor([*flags, self._samples], dtype=torch.float64, device=device)])
        if self.share_gradients:
            self.ranks.phase("reduce")
            totals = self._reduce(totals)
            if self._buffers is not None:
                self._buffers(float(self._samples))
        self.ranks.phase("optimiser")
        loss_sum, count, *rest = totals.tolist()
        for start, end in self._spans:
            end.synchronize()
            self._compute_ms += start.elapsed_time(end)
        result = StepResult(
            loss_sum / count if count and self.compat is None else loss_sum,
            count,
            self._samples,
            0.0,
            self._compute_ms,
            flags=rest[:-1],
            metrics={name: (float(a), float(b)) for name, (a, b) in self._metrics.items()},
        )
        self._apply(result, step)
        self.optimizer.zero_grad(set_to_none=True)
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
        if not self._divided:
            _divide(grads, result.count * self._unit)
        if self.hooks is not None:
            self.hooks.call("before_optimizer_step")
            grads = [p.grad for p in self._parameters() if p.grad is not None]
        norm = get_total_norm(grads)
        result.grad_norm = float(norm)
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
            if p.grad is not None and not bool(torch.isfinite(p.grad).all())
        ]
        where = f" (first in {named[0]})" if named else ""
        result.applied, result.reason = False, f"{what} is not finite{where}"
        if self.on_nan == "skip":
            return
        value = result.loss if what == "loss" else result.grad_norm
        raise not_finite(self.ranks.rank, step, what, value, named[0] if named else None)

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (p for p in self.model.parameters() if p.requires_grad)

    def count_writes(self) -> None:
        """Tell torch that replays wrote to the parameters, which it does not see."""
        if self.captures is not None:
            self.captures.count_writes()

    def drop_recordings(self) -> None:
        """Give back the device memory of what was recorded; garbage collection would do it some day."""
        if self.captures is not None:
            self.captures.forget()

    def look_again(self) -> None:
        """Be told that somebody may have changed the model or the optimiser."""
        if self.captures is not None:
            self.captures.look_again()

    def loaded(self) -> None:
        """Be told that parameters and buffers were replaced from outside, or modules changed."""
        if self.captures is not None:
            self.captures.forget()
        if self._buffers is not None:
            self._buffers.refresh()


def not_finite(rank: int, step: int, what: str, value: float, tensor: str | None = None) -> TrainError:
    """Return the error of a loss or gradient that is not finite."""
    where = f" (first in {tensor})" if tensor else ""
    return TrainError(
        f"rank {rank}, step {step}: the {what} is {value}{where}; expected a finite number. The step was not applied "
        "on any rank. Lower the learning rate, clip (max_grad_norm), look at the batch, or go on without such steps "
        "with on_nan='skip'.",
        rank=rank,
        step=step,
        tensor=tensor,
    )


def _divide(grads: Sequence[torch.Tensor], count: float) -> None:
    """Divide in place, each gradient by the count in its own precision."""
    if count != 1:
        torch._foreach_div_(list(grads), float(count))  # pyright: ignore[reportPrivateImportUsage]


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

"""One optimiser step: accumulate, reduce, decide, apply.

`Step` reads its figures and decides on the host: that serves loss scales, all optimisers, shards and CPUs. On a device
that should never wait, `flodl.train.step.device` reduces, decides and applies without the host.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from flodl.distributed.group import Summed
from flodl.distributed.sharded import whole
from flodl.errors import TrainError
from flodl.train.loss import Loss
from flodl.train.recorded import Recorded
from flodl.train.step.accumulate import Accumulator, StepTimer, TrainStep
from flodl.train.step.capturer import Capturer, CudaCapturer
from flodl.train.step.device import DeviceStep
from flodl.train.step.fused import divide, why_unsupported
from flodl.train.step.outcome import OBSERVED, Figures, Part, StepResult, not_finite, pack_metrics, read_metrics

__all__ = ["Step", "TrainStep"]

MAX_OVERFLOWS = 50


class Step(Accumulator):
    """Turn micro-batches into one update of the parameters.

    ::

        step = Step(model, adamw(1e-3)(model.parameters()), train_step)
        step.capture()  # on CUDA: capture each shape of batch once, then replay it
        for batch in loader:
            result = step(batch)
        print(step.recorded())

    Its arguments and attributes are those of `flodl.train.step.accumulate.Accumulator`.

    Attributes:
        device: takes steps without the host; None if the host decides.
        unrecorded: why steps are not captured on a device that can; None if they are.
    """

    device: DeviceStep | None = None
    unrecorded: str | None = None
    _overflows = 0
    _spare: Any = None

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

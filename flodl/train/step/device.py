"""The parts of a step after the gradients, decided on the device, so that the host never waits and graphs contain them.

Whether a step counts (something was counted, loss and gradient are finite) is a number on the device that the fused
optimiser reads; the clip factor is another one, by which the update divides. `flodl.train.steplog` copies the figures
to the host later.

With several ranks a step has two parts. A rank's own part (forward, backward, gradients copied to buckets) does not
communicate; each rank captures it as its batches allow. The end is the same on all ranks, and all capture it or none:
one sum, and an update that divides by the count of all. Before the end, ranks exchange flags and missing gradients
between hosts, so that no host waits for a device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from flodl.distributed.group import Summed
from flodl.train.events import Recorded
from flodl.train.loss import Loss, Metrics, batch_len
from flodl.train.step.capture import EndCaptures, StepCaptures
from flodl.train.step.cuda_graphs import CudaCapturer, Overlap
from flodl.train.step.decide import GradientCheck
from flodl.train.step.host import HostStep, divide
from flodl.train.step.outcome import Outcome, Part, StepResult, outcome_of, pack_metrics
from flodl.train.step.update import FusedUpdate, why_unsupported

Warn = Callable[[str], Any]


class DeviceStep:
    """Reduce, decide and apply steps on their device.

    Args:
        step: accumulates gradients; its optimiser is one that `flodl.train.step.update.why_unsupported` accepts.
        capturer: captures steps; None runs them one operation at a time.
        warn: receives one message if steps cannot be captured.
        deferred: see `Step.decide_on_device`.
        strict: raise if steps cannot be captured.
        num_rows: whether the step may read ``num_rows`` of a batch.

    Attributes:
        captures: captured graphs of this rank's part; None without a capturer.
        end: the end of a step that all ranks share; None on one rank.
    """

    def __init__(
        self, step: HostStep, capturer: CudaCapturer | None, warn: Warn, *, deferred: bool, strict: bool, num_rows: bool
    ) -> None:
        self.step, self.ranks, self.place = step, step.ranks, step.ranks.device
        self.warn, self.strict, self.num_rows = warn, strict, num_rows
        self.check = GradientCheck(self.place, max_grad_norm=step.max_grad_norm, sticky=step.on_nan == "stop")
        self.fused = FusedUpdate(step.optimizer, self.place)
        can_run_ahead = step.timer.slowdown <= 1  # a slowed rank waits to measure its time
        self._deferred = deferred and can_run_ahead
        self._one_late = can_run_ahead and not deferred and not step.share_gradients and self.place.type == "cuda"
        self.captures: StepCaptures | None = None
        self.end: EndCaptures | None = None
        if step.share_gradients:
            again, overlap = (None, None) if capturer is None else capturer.beside(self.ranks)
            self.end = EndCaptures(self, self.reduce_and_update, again)
            if isinstance(overlap, str):
                step.sums.prepare_capture(fault=f"sums do not overlap with the backward pass ({overlap})")
            elif overlap is not None:
                self.end.overlap = overlap
                step.sums.prepare_capture(overlap.event, fault=overlap.fault, tell=warn)
        if capturer is not None:
            self.captures = StepCaptures(self, self.compute, capturer)
        self.all_captures = [captures for captures in (self.captures, self.end) if captures is not None]

    def run(self, batches: Sequence[Any], number: int, flags: Sequence[float]) -> StepResult:
        """Return the result of one step; see `Step.run`."""
        step, timer = self.step, self.step.timer
        self.fused.restore_rates()
        if self.end is not None and step.sums.refresh_buckets():
            for captures in self.all_captures:
                captures.forget()
        if not self._deferred:
            timer.__enter__()
        outcome = self.captures.run(batches) if self.captures is not None and batches else self.compute(batches)
        result = StepResult(samples=sum(map(batch_len, batches)), flags=flags, outcome=outcome)
        if self.end is not None:
            outcome = result.outcome = self._finish(self.end, outcome, result)
        if self._one_late:
            timer.__exit__()
            result.compute_ms = timer.take_previous()
        elif not self._deferred:
            figures = outcome.row.tolist()
            timer.__exit__()
            result.settle(figures, timer.take(), stop=(self.ranks.rank, number) if step.on_nan == "stop" else None)
        return result

    def _finish(self, end: EndCaptures, own: Outcome, result: StepResult) -> Outcome:
        """Exchange flags and missing gradients, and return the outcome of the end of the step."""
        self.ranks.phase("reduce")
        rows, missing = self.step.sums.agree(own.lacking, [float(self.step.arrived()), *result.flags])
        arrived, *flags = zip(*rows, strict=True)
        result.flags, result.arrived = [float(sum(column)) for column in flags], all(arrived)
        self.ranks.phase("optimiser")
        outcome = end.run(own.row[:2], result.samples, missing)
        if not own.metrics:
            return outcome
        return replace(outcome, row=torch.cat([outcome.row, own.row[2:]]), metrics=own.metrics)

    # ---- what graphs contain -------------------------------------------------------------------------

    def compute(self, batches: Sequence[Any]) -> Outcome:
        """Return the outcome of a step of one rank, or sum and count of this rank's losses with full buckets."""
        part = self.step.accumulate(batches)
        try:
            if self.end is not None:
                lacking = self.step.sums.fill_buckets()
                pair = Loss(self._total(part), part.count).totals().to(self.place)
                return outcome_of(pair, part.metrics, lacking)
            with torch.no_grad():
                count: Any = part.count
                if isinstance(count, torch.Tensor) and count.device != self.place:
                    count = float(count) if count.device.type == "cpu" else count.to(self.place)
                return self._update(self._total(part).to(self.place), count, divided=part.divided, metrics=part.metrics)
        finally:
            self.step.model.zero_grad(set_to_none=True)

    def reduce_and_update(
        self, pair: torch.Tensor, weight: torch.Tensor, missing: Sequence[int], overlap: Overlap | None
    ) -> Outcome:
        """Return the outcome of the step of all ranks.

        Args:
            pair: sum and count of this rank's losses, float64 ``(2,)``; replaced by the sums over ranks.
            weight: this rank's samples, the weight of its buffers, float64 ``()``.
            missing: positions of parameters without a gradient on any rank.
            overlap: launches this while the rest of the step runs.
        """
        step = self.step
        with torch.no_grad():
            step.sums.launch()
            if overlap is not None:
                overlap.end.wait()
            step.sums.sum_last(pair)
            step.sums.wait(missing)
            if step.buffers is not None:
                step.buffers(weight)
            total, count = pair.unbind()
            # Dividing inside the update reads the gradient one time less, and rounds once instead of twice if it clips.
            outcome = self._update(total, count, divided=step.sum_of_means, metrics={}, inside=not step.sum_of_means)
            step.model.zero_grad(set_to_none=True)
        return outcome

    def _update(
        self, total: torch.Tensor, count: Any, *, divided: bool, metrics: Metrics, inside: bool = False
    ) -> Outcome:
        """Divide gradients by ``count``, decide whether the step counts, and update the parameters if it does.

        Args:
            total: float64, the sum of losses; with ``sum_of_means`` of means.
            count: the number of items, a number or a tensor on the device.
            divided: True if gradients are divided already.
            metrics: metrics of the outcome.
            inside: divide inside the update.
        """
        grads = [p.grad for p in self.step.model.parameters() if p.requires_grad and p.grad is not None]
        on_device, loss = isinstance(count, torch.Tensor), total
        if not self.step.sum_of_means and (on_device or count):
            loss = torch.where(count == 0, total, total / count) if on_device else total / count
        if not grads or not (on_device or count != 0):
            return outcome_of(torch.stack([loss, loss.new_zeros(())]), metrics)
        if not divided and not inside:
            divide(grads, count)
        packed, rest = pack_metrics(metrics, self.place)
        decision = self.check(grads, loss, count, summed=inside, rest=rest)
        self.fused(decision)
        return Outcome(decision.figures, None if on_device else float(count), packed)

    def _total(self, part: Part) -> torch.Tensor:
        """Return the sum of losses, float64 ``()``."""
        return torch.zeros((), dtype=torch.float64, device=self.place) if part.total is None else part.total

    # ---- captured graphs -----------------------------------------------------------------------------

    def finish_capture(self) -> object:
        """Complete a capture; keep the returned object as long as the graph is replayed."""
        return self.check.tables.finish_capture(), self.fused.adam.tables.finish_capture()


class Step(HostStep):
    """Turn micro-batches into one update of the parameters.

    ::

        step = Step(model, adamw(1e-3)(model.parameters()), train_step)
        step.capture()  # on CUDA: capture each shape of batch once, then replay it
        for batch in loader:
            result = step(batch)
        print(step.recorded())

    Its arguments and attributes are those of `flodl.train.step.host.HostStep`.

    Attributes:
        device: takes steps without the host; None if the host decides.
        unrecorded: why steps are not captured on a device that can; None if they are.
    """

    device: DeviceStep | None = None
    all_captures: Sequence[StepCaptures | EndCaptures] = ()
    unrecorded: str | None = None

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
        self, capturer: CudaCapturer | None, warn: Warn, *, deferred: bool, strict: bool = False, num_rows: bool = True
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
            self.runner, self.all_captures = self.device.run, self.device.all_captures
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
        if self.sharded and self.share_gradients:
            cuda = self.ranks.device.type == "cuda"
            return Summed("NCCL", "the weights are sharded") if cuda else Summed("gloo")
        return self.sums.summed if self.share_gradients else None

    def count_writes(self) -> None:
        """Increment the versions of parameters that replays wrote to, which torch does not see."""
        if any(captures.num_graphs for captures in self.all_captures):
            torch.autograd.graph.increment_version(list(self.model.parameters()))

    def drop_captures(self) -> None:
        """Free the device memory of captured graphs."""
        for captures in self.all_captures:
            captures.forget()

    def invalidate_if_changed(self) -> None:
        """Drop captured graphs if the model or the optimiser changed."""
        for captures in self.all_captures:
            captures.invalidate_if_changed()

    def loaded(self) -> None:
        """Drop what depends on parameters and buffers, which were replaced, or on modules, which changed."""
        self.drop_captures()
        if self.device is not None:
            self.device.fused.prepare()
        if self.buffers is not None:
            self.buffers.refresh()

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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from flodl.train.loss import batch_len
from flodl.train.step.capture import EndCaptures, StepCaptures
from flodl.train.step.capturer import Capturer
from flodl.train.step.decide import GradientCheck
from flodl.train.step.fused import FusedUpdate
from flodl.train.step.host import HostStep, divide
from flodl.train.step.outcome import Outcome, Part, StepResult, not_finite, outcome_of, pack_metrics
from flodl.train.step.overlap import Overlap

__all__ = ["DeviceStep"]


class DeviceStep:
    """Reduce, decide and apply steps on their device.

    Args:
        step: accumulates gradients; its optimiser is one that `flodl.train.step.fused.why_unsupported` accepts.
        capturer: captures steps; None runs them one operation at a time.
        warn: receives one message if steps cannot be captured.
        deferred: see `flodl.train.step.step.Step.decide_on_device`.
        strict: raise if steps cannot be captured.
        num_rows: whether the step may read ``num_rows`` of a batch.

    Attributes:
        captures: captured graphs of this rank's part; None without a capturer.
        end: the end of a step that all ranks share; None on one rank.
    """

    def __init__(
        self,
        step: HostStep,
        capturer: Capturer | None,
        warn: Callable[[str], Any],
        *,
        deferred: bool,
        strict: bool,
        num_rows: bool,
    ) -> None:
        self.step, self.ranks, self.place = step, step.ranks, step.ranks.device
        self.check = GradientCheck(self.place, max_grad_norm=step.max_grad_norm, sticky=step.on_nan == "stop")
        self.fused = FusedUpdate(step.optimizer, self.place)
        can_run_ahead = step.timer.slowdown <= 1  # a slowed rank waits to measure its time
        self._deferred = deferred and can_run_ahead
        self._one_late = can_run_ahead and not deferred and not step.share_gradients and self.place.type == "cuda"
        self.captures: StepCaptures | None = None
        self.end: EndCaptures | None = None
        if step.share_gradients:
            again, overlap = (None, None) if capturer is None else capturer.beside(self.ranks)
            self.end = EndCaptures(step, self.reduce_and_update, self.finish_capture, again, warn, strict=strict)
            if isinstance(overlap, str):
                step.sums.prepare_capture(fault=f"sums do not overlap with the backward pass ({overlap})")
            elif overlap is not None:
                self.end.overlap = overlap
                step.sums.prepare_capture(overlap.event, fault=overlap.fault, tell=warn)
        if capturer is not None:
            self.captures = StepCaptures(step, self.compute, self.finish_capture, capturer, warn, strict=strict)
            self.captures.num_rows = num_rows

    def run(self, batches: Sequence[Any], number: int, flags: Sequence[float]) -> StepResult:
        """Return the result of one step; see `flodl.train.step.step.Step.run`."""
        step, timer = self.step, self.step.timer
        self.fused.restore_rates()
        if self.end is not None and step.sums.refresh_buckets():
            self.forget()
        slowed, samples = timer.slowdown > 1, sum(map(batch_len, batches))
        graphs = self.num_graphs if slowed else 0
        if not self._deferred:
            timer.__enter__()
        outcome = self.captures.run(batches) if self.captures is not None and batches else self.compute(batches)
        result = StepResult(samples=samples, flags=flags, outcome=outcome)
        if self.end is not None:
            self._finish(self.end, outcome, result)
        if self._one_late:
            timer.__exit__()
            result.compute_ms = timer.take_previous()
        elif not self._deferred:
            outcome = result.outcome or outcome
            figures = outcome.read(outcome.row.tolist())
            timer.__exit__(slowed and graphs != self.num_graphs)  # a capture is not slowed down
            raising = partial(not_finite, self.ranks.rank, number) if step.on_nan == "stop" else None
            result.settle(figures, timer.take(), raising=raising)
        return result

    def _finish(self, end: EndCaptures, own: Outcome, result: StepResult) -> None:
        """Exchange flags and missing gradients, and run the end of the step."""
        self.ranks.phase("reduce")
        rows, missing = self.step.sums.agree(own.lacking, [float(self.step.arrived()), *result.flags])
        arrived, *flags = zip(*rows, strict=True)
        result.flags, result.arrived = [float(sum(column)) for column in flags], all(arrived)
        self.ranks.phase("optimiser")
        outcome = end.run(own.row[:2], result.samples, missing)
        if own.metrics:
            row = torch.cat([outcome.row.to(torch.float64), own.row[2:]])
            outcome = replace(outcome, row=row, metrics=own.metrics)
        result.outcome = outcome

    # ---- what graphs contain -------------------------------------------------------------------------

    def compute(self, batches: Sequence[Any]) -> Outcome:
        """Return the outcome of a step of one rank, or sum and count of this rank's losses with full buckets."""
        part = self.step.accumulate(batches)
        try:
            if self.end is not None:
                lacking = self.step.sums.fill_buckets()
                return outcome_of(self._pair(part), 0.0, True, part.metrics, lacking)
            with torch.no_grad():
                total = self._zero() if part.total is None else part.total.to(self.place)
                count: Any = part.count
                if isinstance(count, torch.Tensor) and count.device != self.place:
                    count = float(count) if count.device.type == "cpu" else count.to(self.place)
                return self._update(total, count, divided=part.divided, apart=len(batches) == 1, metrics=part.metrics)
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
                overlap.wait_for_end()
            step.sums.sum_last(pair)
            step.sums.wait(missing)
            if step.buffers is not None:
                step.buffers(weight)
            total, count = pair.unbind()
            # Dividing inside the update reads the gradient one time less, and rounds once instead of twice if it clips.
            outcome = self._update(total, count, divided=step.sum_of_means, apart=False, metrics={}, inside=True)
            step.model.zero_grad(set_to_none=True)
        return outcome

    def _update(
        self,
        total: torch.Tensor,
        count: Any,
        *,
        divided: bool,
        apart: bool,
        metrics: Mapping[str, tuple[Any, Any]],
        inside: bool = False,
    ) -> Outcome:
        """Divide gradients by ``count``, decide whether the step counts, and update the parameters if it does.

        Args:
            total: float64, the sum of losses; with ``sum_of_means`` of means.
            count: the number of items, a number or a tensor on the device.
            divided: True if gradients are divided already.
            apart: norms of parts of the gradient may be figures.
            metrics: metrics of the outcome.
            inside: divide inside the update.
        """
        grads = [p.grad for p in self.step.model.parameters() if p.requires_grad and p.grad is not None]
        on_device = isinstance(count, torch.Tensor)
        loss = total
        if on_device and not self.step.sum_of_means:
            loss = torch.where(count == 0, total, total / count)
        elif count and not self.step.sum_of_means:
            loss = total / count
        if not grads or not (on_device or count != 0):
            return outcome_of(torch.stack([loss, loss.new_zeros(())]), count, False, metrics)
        inside = inside and not divided
        if not divided and not inside:
            divide(grads, count)
        packed, rest = pack_metrics(metrics, self.place)
        decision = self.check(grads, loss, count, apart=apart, summed=inside, rest=rest)
        self.fused(decision)
        known = None if on_device else float(count)
        return Outcome(decision.figures, known, packed, norms=decision.norms, next_row=decision.next_row)

    def _zero(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.place)

    def _pair(self, part: Part) -> torch.Tensor:
        """Return total and count as float64 ``(2,)`` on the device, without waiting for it."""
        total, count = self._zero() if part.total is None else part.total, part.count
        if isinstance(count, torch.Tensor):
            return torch.stack([total, count.to(total.device, torch.float64)]).to(self.place)
        # Filled on the device: a copy from the host would wait for it.
        return torch.stack([total, total.new_full((), float(count))]).to(self.place)

    # ---- captured graphs -----------------------------------------------------------------------------

    def finish_capture(self) -> object:
        """Complete a capture; keep the returned object as long as the graph is replayed."""
        return self.check.finish_capture(), self.fused.finish_capture()

    @property
    def num_graphs(self) -> int:
        """Number of captured graphs."""
        return sum(graphs.num_graphs for graphs in (self.captures, self.end) if graphs is not None)

    def forget(self) -> None:
        """Drop all captured graphs, and free their device memory."""
        for graphs in (self.captures, self.end):
            if graphs is not None:
                graphs.forget()

    def invalidate_if_changed(self) -> None:
        """Drop captured graphs if the model or the optimiser changed."""
        for graphs in (self.captures, self.end):
            if graphs is not None:
                graphs.invalidate_if_changed()

    def reload(self) -> None:
        """Drop captured graphs after values were loaded, and move the loaded state to the device."""
        self.forget()
        self.fused.prepare()

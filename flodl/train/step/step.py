"""One optimiser step: accumulate, reduce, decide, apply.

`Step` reads its figures and decides on the host: that serves loss scales, all optimisers, shards and CPUs. On a device
that should never wait, `flodl.train.step.device` reduces, decides and applies without the host.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from flodl.distributed.group import Summed
from flodl.train.recorded import Recorded
from flodl.train.step.capturer import Capturer, CudaCapturer
from flodl.train.step.device import DeviceStep
from flodl.train.step.fused import why_unsupported
from flodl.train.step.host import HostStep, TrainStep

__all__ = ["Step", "TrainStep"]


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
    unrecorded: str | None = None

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
            self.runner = self.device = DeviceStep(
                self, capturer, warn, deferred=deferred, strict=strict, num_rows=num_rows
            )
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

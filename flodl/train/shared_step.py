"""One optimiser step of all ranks together, decided on the device.

A rank's own part (forward, backward, gradients brought to where they are summed) holds no talk with other ranks and
may be recorded (`flodl.train.capture`), on each rank as its batches allow. What follows is the same on all ranks:
one sum, one division by the count of all, and an update that leaves itself out where something is not finite. The
arithmetic is that of `flodl.train.step`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import get_total_norm

from flodl.distributed.average import BufferMean
from flodl.distributed.gradients import FlatSum
from flodl.distributed.group import Ranks
from flodl.train.loss import Loss, as_loss, batch_len
from flodl.train.on_device import DeviceStep, Outcome, outcome_of
from flodl.train.precision import Precision

__all__ = ["SharedStep"]


class SharedStep(DeviceStep):
    """Called with micro-batches, does this rank's part of a step; `finish` does the rest with all ranks.

    Args:
        ranks: who takes part.
        buffers: averages the model's buffers; None where it has none.
        **others: as for `flodl.train.on_device.DeviceStep`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        ranks: Ranks,
        buffers: BufferMean | None,
        **others: Any,
    ) -> None:
        super().__init__(model, optimizer, ranks.device, precision, **others)
        self.ranks, self.buffers = ranks, buffers
        self.sums = FlatSum(ranks, model)
        self._own: tuple[float, ...] = ()
        self._held = torch.zeros(0, dtype=torch.float64, device=self.device)

    def __call__(self, train_step: Callable[..., Any], batches: Sequence[Any]) -> Outcome:
        """Return sum and count of this rank's losses, its gradients brought to where they are summed.

        Raises:
            TrainError: the loss depends on no parameter, or is none.
        """
        losses: list[Loss] = []
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        count = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch in batches:
            with self.precision.context():
                loss = as_loss(train_step(self.model, batch), batch_len(batch))
            loss.check_depends()
            value = loss.as_sum() if self.compat is None else loss.as_mean()
            value.backward()
            losses.append(loss)
            total = total + value.detach()
            count = count + (loss.count if self.compat is None else 1.0)
        try:
            lacking = self.sums.collect()
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        return outcome_of(torch.stack([total, count]), 0.0, True, losses, lacking=lacking)

    def finish(self, part: Outcome, flags: Sequence[float], samples: int) -> Outcome:
        """Return the outcome of the step of all ranks; the sums of ``flags`` are at the end of its row."""
        self._hold((*flags, float(samples)))
        with torch.no_grad():
            sums = self.sums.exchange(torch.cat([part.row[:2], self._held]), part.lacking)
            if self.buffers is not None:
                self.buffers(self._held[-1])
            total, count = sums[0], sums[1]
            grads = [p.grad for p in self.model.parameters() if p.requires_grad and p.grad is not None]
            if self.compat is None:
                total = torch.where(count == 0, total, total / count)
                for dtype in dict.fromkeys(flat.dtype for flat in self.sums.flats):
                    flats = [flat for flat in self.sums.flats if flat.dtype == dtype]
                    torch._foreach_div_(flats, count.to(dtype))  # pyright: ignore[reportPrivateImportUsage]
            norm = get_total_norm(grads) if grads else total.new_zeros(())
            if grads:
                self._move(self.judge.of_figures(torch.stack([total.to(norm.dtype), norm]), norm, count))
            self.optimizer.zero_grad(set_to_none=True)
            row = torch.cat([torch.stack([total, norm.to(torch.float64), count]), part.row[2:], sums[2:-1]])
        return Outcome(row, None, metrics=part.metrics, moved=bool(grads))

    def _hold(self, own: tuple[float, ...]) -> None:
        """Have flags and samples on the device; they seldom change, and bringing them there makes the host wait."""
        if own != self._own:
            self._own = own
            self._held = torch.tensor(own, dtype=torch.float64, device=self.device)

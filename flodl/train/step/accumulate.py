"""The first part of a step: gradients of micro-batches added up where parameters are, sums and counts beside them.

Gradients of *sums* of losses are added up, so that the same samples give the same step however they were cut; they are
divided once, by the count of all. A step whose samples are one micro-batch of one rank divides before the backward pass
instead, which is the same number and, to the bit, what a plain ``mean().backward()`` loop computes. Nothing here
synchronises with the device, so all of it can be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from flodl.train.callback import Hooks
from flodl.train.loss import Loss, as_loss, batch_len
from flodl.train.precision import Precision
from flodl.train.step.outcome import OBSERVED
from flodl.train.watching import Watching

__all__ = ["Accumulator", "Part"]


@dataclass
class Part:
    """What micro-batches of one rank came to, beside the gradients.

    Attributes:
        total: float64, the sum of their losses; with ``sum_of_means`` of their means. None of no micro-batch.
        count: items that it stands for, a number where the host knows it; with ``sum_of_means`` micro-batches.
        samples: samples in them.
        divided: whether gradients are those of the step already, and not of a sum.
        metrics: ``name: (sum, count)``.
    """

    total: torch.Tensor | None = None
    count: float | torch.Tensor = 0.0
    samples: int = 0
    divided: bool = False
    metrics: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def pair(self, device: torch.device) -> torch.Tensor:
        """Return total and count as float64 ``(2,)`` on the device, without waiting for it."""
        total = self.total if self.total is not None else torch.zeros((), dtype=torch.float64, device=device)
        count = self.count
        if isinstance(count, torch.Tensor):
            return torch.stack([total, count.to(total.device, torch.float64)]).to(device)
        # Filled in on the device: a copy from the host would wait for it.
        return torch.stack([total, total.new_full((), float(count))]).to(device)

    def add(self, total: torch.Tensor, count: Any, samples: int, metrics: Mapping[str, tuple[Any, Any]]) -> None:
        """Take in one micro-batch."""
        self.count = count if self.total is None else self.count + count
        self.total = total if self.total is None else self.total + total
        self.samples += samples
        for name, (value, weight) in metrics.items():
            before = self.metrics.get(name)
            found = _plain(value), _plain(weight)
            self.metrics[name] = found if before is None else (before[0] + found[0], before[1] + found[1])

    def observe(self, values: Mapping[str, tuple[Any, Any]]) -> None:
        """Take in what was watched in the forward pass of one micro-batch."""
        for name, (total, weight) in values.items():
            before = self.metrics.get(OBSERVED + name)
            self.metrics[OBSERVED + name] = (
                (total, weight) if before is None else (before[0] + total, before[1] + weight)
            )

    def figures(self) -> dict[str, tuple[float, float]]:
        """Return metrics as numbers of the host, brought over together."""
        rows = [value for pair in self.metrics.values() for value in pair if isinstance(value, torch.Tensor)]
        if len({value.device for value in rows}) > 1:
            rows = [value.cpu() for value in rows]
        read = iter(torch.stack([value.reshape(()).to(torch.float64) for value in rows]).tolist() if rows else ())
        return {
            name: (
                next(read) if isinstance(total, torch.Tensor) else float(total),
                next(read) if isinstance(count, torch.Tensor) else float(count),
            )
            for name, (total, count) in self.metrics.items()
        }


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else float(value)


class Accumulator:
    """Adds up gradients, losses and counts of micro-batches.

    Args:
        model: whose parameters get the gradients.
        precision: of forward and loss.
        sum_of_means: add up the *means* of micro-batches.

    Attributes:
        unit: float16 sums are kept small by this power of two, which rounds nothing.
        hooks: callbacks that act around the backward pass.
        watching: collects what is watched inside of the model.
    """

    def __init__(self, model: nn.Module, precision: Precision, *, sum_of_means: bool = False) -> None:
        self.model, self.precision, self.sum_of_means = model, precision, sum_of_means
        self.unit = 1.0
        self.hooks: Hooks | None = None
        self.watching: Watching | None = None

    def loss_of(self, train_step: Callable[..., Any], batch: Any) -> Loss:
        """Return the loss of a micro-batch."""
        with self.precision.context():
            return as_loss(train_step(self.model, batch), batch_len(batch))

    def add(self, part: Part, loss: Loss, samples: int, *, alone: bool = False) -> None:
        """Add the gradient of one micro-batch, and what it comes to, to ``part``.

        Args:
            alone: this is the only micro-batch of the step, so it may be divided at once.

        Raises:
            TrainError: the loss depends on no parameter.
        """
        loss.check_depends()
        if self.hooks is not None:
            loss = self.hooks.before_backward(loss)
        if self.sum_of_means or alone:
            value, part.divided = loss.as_mean(), True
        else:
            value = loss.as_sum() * self.unit if self.unit != 1 else loss.as_sum()
        scaler = self.precision.scaler
        (scaler.scale(value) if scaler is not None else value).backward()
        if self.hooks is not None:
            self.hooks.call("after_backward")
        if self.sum_of_means:
            part.add(value.detach().to(torch.float64), 1.0, samples, loss.metrics)
        else:
            count = loss.count.detach() if isinstance(loss.count, torch.Tensor) else float(loss.count)
            part.add(loss.summed(), count, samples, loss.metrics)

    def run(
        self,
        train_step: Callable[..., Any],
        batches: Sequence[Any],
        *,
        alone: bool = False,
        around: Callable[[bool], AbstractContextManager[Any]] = lambda last: nullcontext(),
        counted: Callable[[Any], object] = lambda count: None,
    ) -> Part:
        """Return what ``batches`` come to, their gradients added up.

        Args:
            alone: the step has no other samples than these.
            around: a context for each backward pass, told whether it is the last.
            counted: told the count of each micro-batch before its backward pass.

        Raises:
            TrainError: the loss depends on no parameter, or is none.
        """
        part = Part()
        for number, batch in enumerate(batches, start=1):
            if self.watching is None:
                loss = self.loss_of(train_step, batch)
            else:
                with self.watching:
                    loss = self.loss_of(train_step, batch)
                part.observe(self.watching.take())
            counted(loss.count)
            with around(number == len(batches)):
                self.add(part, loss, batch_len(batch), alone=alone and len(batches) == 1)
        return part

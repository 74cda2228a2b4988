"""The last parts of a step without a synchronisation: what is to be decided is decided on the device.

Whether the step counts (something was counted, loss and gradient are finite) is a number on the device that the fused
optimiser heeds; the clip factor is one too, divided out inside the update. The figures come back as one row of
numbers, read when `flodl.train.steplog` wants them. So the host never waits, and a CUDA graph can hold the whole step
(`flodl.train.step.capture`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from flodl.train.precision import Precision
from flodl.train.step.accumulate import Accumulator
from flodl.train.step.adam import AdamUpdate
from flodl.train.step.decide import GradientCheck, StepDecision
from flodl.train.step.outcome import Outcome, outcome_of, told_of

__all__ = ["DeviceStep", "divide", "make_ready", "mean_of", "unfit"]

KINDS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimisers whose fused kernels take a flag that says not to move, and a number to divide gradients by."""


def unfit(optimizer: torch.optim.Optimizer) -> str | None:
    """Return why the optimiser cannot decide on the device, as half a sentence; None when it can."""
    kind = type(optimizer)
    if kind not in KINDS:
        return f"{kind.__name__} has no fused kernel that can be told to leave a step out"
    for group in optimizer.param_groups:
        if group.get("fused") is False or group.get("foreach") or group.get("differentiable"):
            return f"{kind.__name__} was asked for another kernel than the fused one"
        if kind is torch.optim.SGD and group.get("momentum") and group.get("dampening"):
            return "SGD with dampening treats its first step apart"
        if any(not p.is_floating_point() or p.is_sparse for p in group["params"]):
            return "a parameter is not dense and floating-point"
    return None


def make_ready(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Choose fused kernels and rates on the device, as options of the optimiser's groups; in place."""
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, False
        if "capturable" in group:
            # On a CPU the flag is refused and nothing is captured.
            group["capturable"] = device.type == "cuda"
        if not isinstance(group["lr"], torch.Tensor) or group["lr"].device != device:
            group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32, device=device)
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].to(device, torch.float32)
        if type(optimizer) is torch.optim.SGD and group["momentum"]:
            # Zero momentum makes the first step like any other; the kernel would otherwise start from
            # memory that a first step left out has not written.
            for parameter in group["params"]:
                if parameter.requires_grad and optimizer.state[parameter].get("momentum_buffer") is None:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


class DeviceStep:
    """Turns micro-batches into one update, deciding on the device.

    Args:
        model: whose parameters move.
        optimizer: one that `unfit` has nothing against, made ready.
        device: where the model is.
        precision: of forward and loss; without a loss scale.
        max_grad_norm: clip the gradient to this 2-norm.
        sticky: after a step that is not finite none moves any more; else just that one is left out.
        sum_of_means: as for `flodl.train.step.accumulate.Accumulator`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        precision: Precision,
        *,
        max_grad_norm: float | None = None,
        sticky: bool = True,
        sum_of_means: bool = False,
    ) -> None:
        self.model, self.optimizer, self.device = model, optimizer, device
        self.sum_of_means = sum_of_means
        self.accumulator = Accumulator(model, precision, sum_of_means=sum_of_means)
        self.check = GradientCheck(device, max_grad_norm=max_grad_norm, sticky=sticky)
        self.update = AdamUpdate(device)
        make_ready(optimizer, device)
        self._rates = [group["lr"] for group in optimizer.param_groups]

    def hold_rates(self) -> None:
        """Put rates that somebody set as numbers back where the device reads them."""
        groups = self.optimizer.param_groups
        if len(groups) != len(self._rates):
            make_ready(self.optimizer, self.device)
            self._rates += [group["lr"] for group in groups[len(self._rates) :]]
        for group, rate in zip(groups, self._rates, strict=True):
            if group["lr"] is not rate:
                rate.fill_(float(group["lr"]))
                group["lr"] = rate

    def __call__(self, train_step: Callable[..., Any], batches: Sequence[Any]) -> Outcome:
        """Return the outcome of one step over ``batches``; gradients are gone afterwards.

        Raises:
            TrainError: the loss depends on no parameter, or is none.
        """
        part = self.accumulator.run(train_step, batches, alone=True)
        try:
            with torch.no_grad():
                count: Any = part.count
                if isinstance(count, torch.Tensor) and count.device != self.device:
                    count = float(count) if count.device.type == "cpu" else count.to(self.device)
                assert part.total is not None
                total = part.total.to(self.device)
                return self.apply(total, count, divided=part.divided, apart=len(batches) == 1, metrics=part.metrics)
        finally:
            self.model.zero_grad(set_to_none=True)

    def apply(
        self,
        total: torch.Tensor,
        count: Any,
        *,
        divided: bool,
        apart: bool,
        metrics: Mapping[str, tuple[Any, Any]],
        inside: bool = False,
    ) -> Outcome:
        """Divide gradients by ``count``, decide whether the step counts, and move the parameters if it does.

        Args:
            total: float64, the sum of losses; with ``sum_of_means`` of means.
            count: what it stands for, a number or a tensor on the device.
            divided: whether gradients are divided already.
            apart: whether norms of parts of the gradient may be figures.
            metrics: go into the outcome.
            inside: divide inside of the update, which spares a pass over the gradient and rounds once instead of twice
                where it is clipped.
        """
        grads = [p.grad for p in self.model.parameters() if p.requires_grad and p.grad is not None]
        loss = mean_of(total, count, sum_of_means=self.sum_of_means)
        if not grads or not (isinstance(count, torch.Tensor) or count != 0):
            return outcome_of(torch.stack([loss, loss.new_zeros(())]), count, False, metrics)
        inside = inside and not divided
        if not divided and not inside:
            divide(grads, count)
        told, rest = told_of(metrics, self.device)
        decision = self.check(grads, loss, count, apart=apart, summed=inside, rest=rest)
        self._move(decision)
        known = None if isinstance(count, torch.Tensor) else float(count)
        return Outcome(decision.figures, known, told, norms=decision.norms, next_row=decision.next_row)

    def finish_capture(self) -> object:
        """Complete what was captured; the answer must be held as long as that is replayed."""
        return self.check.finish_capture(), self.update.finish_capture()

    def _move(self, decision: StepDecision) -> None:
        """Move the parameters unless the decision says not to; clip on the way."""
        if self.update(self.optimizer, decision.found, decision.scale):
            return
        flags: Any = self.optimizer
        flags.found_inf = decision.found
        if decision.scale is not None:
            flags.grad_scale = decision.scale
        try:
            with largest_first(self.optimizer):
                self.optimizer.step()
            self.update.prepare(self.optimizer, decision.scale is not None)
        finally:
            del flags.found_inf
            if decision.scale is not None:
                del flags.grad_scale


def mean_of(total: torch.Tensor, count: Any, *, sum_of_means: bool) -> torch.Tensor:
    """Return the loss that is reported of a step: the mean over what was counted, or the sum of means."""
    if sum_of_means:
        return total
    if isinstance(count, torch.Tensor):
        return torch.where(count == 0, total, total / count)
    return total / count if count else total


def divide(grads: Sequence[torch.Tensor], count: float | torch.Tensor) -> None:
    """Divide in place, each gradient by the count in its own precision."""
    if not isinstance(count, torch.Tensor):
        if count != 1:
            torch._foreach_div_(list(grads), float(count))  # pyright: ignore[reportPrivateImportUsage]
        return
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        part = [grad for grad in grads if grad.dtype == dtype]
        torch._foreach_div_(part, count.to(dtype))  # pyright: ignore[reportPrivateImportUsage]


@contextmanager
def largest_first(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Have the optimiser go through each group's parameters from the largest to the smallest inside.

    Its kernels take a few dozen tensors a launch, and each launch lasts at least as long as its largest tensor: a
    large one that comes last costs a launch of its own, in which the device has little to do.
    """
    before = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = sorted(group["params"], key=torch.Tensor.numel, reverse=True)
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, before, strict=True):
            group["params"] = parameters

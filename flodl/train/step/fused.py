"""Update of the parameters that is decided on the device: torch's fused optimisers, or our kernels of Adam.

The fused kernels read a number that makes them leave a step out and a number to divide gradients by, so the host never
waits for the decision, and a CUDA graph can contain it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from flodl.train.step.adam import AdamUpdate
from flodl.train.step.decide import StepDecision
from flodl.train.step.host import take_step

__all__ = ["FusedUpdate", "largest_first", "why_unsupported"]

KINDS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimisers whose fused kernels can leave a step out and divide gradients."""


def why_unsupported(optimizer: torch.optim.Optimizer) -> str | None:
    """Return why the optimiser cannot leave a step out on the device, as a clause; None if it can."""
    kind = type(optimizer)
    if kind not in KINDS:
        return f"{kind.__name__} has no fused kernel that can leave a step out"
    for group in optimizer.param_groups:
        if group.get("fused") is False or group.get("foreach") or group.get("differentiable"):
            return f"{kind.__name__} was created with another kernel than the fused one"
        if kind is torch.optim.SGD and group.get("momentum") and group.get("dampening"):
            return "SGD with dampening treats its first step differently"
        if any(not p.is_floating_point() or p.is_sparse for p in group["params"]):
            return "a parameter is not dense and floating-point"
    return None


class FusedUpdate:
    """Update parameters on the device unless a decision there excludes the step.

    Args:
        optimizer: an optimiser that `why_unsupported` accepts; its options are changed to the fused kernels and to
            learning rates on the device.
        device: device of the parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.optimizer, self.device = optimizer, device
        self._adam = AdamUpdate(device)
        self.prepare()
        self._rates = [group["lr"] for group in optimizer.param_groups]

    def prepare(self) -> None:
        """Choose fused kernels, and learning rates and state on the device; call it after a state was loaded."""
        for group in self.optimizer.param_groups:
            group["fused"], group["foreach"] = True, False
            if "capturable" in group:
                # On a CPU the flag is refused and nothing is captured.
                group["capturable"] = self.device.type == "cuda"
            if not isinstance(group["lr"], torch.Tensor) or group["lr"].device != self.device:
                group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32, device=self.device)
            momentum = type(self.optimizer) is torch.optim.SGD and group["momentum"]
            for parameter in group["params"]:
                state = self.optimizer.state.get(parameter, {})
                if isinstance(state.get("step"), torch.Tensor):
                    state["step"] = state["step"].to(self.device, torch.float32)
                # Zero momentum makes the first step like any other; otherwise the kernel would start from memory that
                # a first step that was left out has not written.
                if momentum and parameter.requires_grad and state.get("momentum_buffer") is None:
                    self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def restore_rates(self) -> None:
        """Copy learning rates that were set as numbers to the tensors that the device reads."""
        groups = self.optimizer.param_groups
        if len(groups) != len(self._rates):
            self.prepare()
            self._rates += [group["lr"] for group in groups[len(self._rates) :]]
        for group, rate in zip(groups, self._rates, strict=True):
            if group["lr"] is not rate:
                rate.fill_(float(group["lr"]))
                group["lr"] = rate

    def __call__(self, decision: StepDecision) -> None:
        """Update the parameters unless the decision excludes the step; divide gradients by its scale."""
        if self._adam(self.optimizer, decision.found, decision.scale):
            return
        flags: Any = self.optimizer
        flags.found_inf = decision.found
        if decision.scale is not None:
            flags.grad_scale = decision.scale
        try:
            with largest_first(self.optimizer):
                take_step(self.optimizer)
            self._adam.prepare(self.optimizer, decision.scale is not None)
        finally:
            del flags.found_inf
            if decision.scale is not None:
                del flags.grad_scale

    def finish_capture(self) -> object:
        """Complete a capture; keep the returned object as long as the graph is replayed."""
        return self._adam.finish_capture()


@contextmanager
def largest_first(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Order each group's parameters from the largest to the smallest inside the context.

    The kernels process a few dozen tensors per launch, and each launch lasts at least as long as its largest tensor: a
    large tensor at the end costs a launch of its own, in which the device has little to do.
    """
    before = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = sorted(group["params"], key=torch.Tensor.numel, reverse=True)
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, before, strict=True):
            group["params"] = parameters

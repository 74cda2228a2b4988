"""Update of the parameters that is decided on the device: by our kernels of Adam and AdamW, or torch's fused ones.

The fused kernels read a number that makes them leave a step out and a number to divide gradients by, so the host never
waits for the decision, and a CUDA graph can contain it. `torch.optim` keeps options and state, which are saved and
resumed. On CUDA our kernels update the parameters of Adam and AdamW where they give the bits of torch's. Torch updates
those of other classes, of optimisers with hooks or with options without a kernel, and in the first step, which creates
the state. It also updates all on a device on which a trial, once per process, finds other bits.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from flodl.train.step.decide import BlockLayout, BlockTables, StepDecision, capturing, is_dense, sent
from flodl.train.step.host import has_plain_step, take_step

# Optimisers whose fused kernels can leave a step out and divide gradients.
KINDS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
MOST_PROGRAMS = 1 << 15
BLOCK = 1024
STEPS = 256  # counts that a program counts up
AVERAGES = ("exp_avg", "exp_avg_sq")
# Parameters, gradients, averages, averages of squares, and counts of steps, each in the same order.
Tensors = list[list[torch.Tensor]]


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
        self.adam = AdamUpdate(device)
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
        if self.adam(self.optimizer, decision.found, decision.scale):
            return
        flags: Any = self.optimizer
        flags.found_inf = decision.found
        if decision.scale is not None:
            flags.grad_scale = decision.scale
        try:
            with largest_first(self.optimizer):
                take_step(self.optimizer)
            if not capturing(self.device):  # create the tables for a capture of the next step
                self.adam.plan(self.optimizer, decision.scale is not None)
        finally:
            del flags.found_inf
            if decision.scale is not None:
                del flags.grad_scale


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


# ---- Adam and AdamW --------------------------------------------------------------------------------------------


class _Settings(NamedTuple):
    """Numbers of a group on the device: betas, epsilon and decay, float64; the betas in float32, ``(2, 1)``."""

    numbers: torch.Tensor
    betas: torch.Tensor


class AdamUpdate:
    """Update the parameters of optimisers, one group after the other.

    Args:
        device: device of all parameters.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.tables = device, BlockTables(device, rows=6, most=MOST_PROGRAMS)
        self._settings: dict[tuple[float, ...], _Settings] = {}

    def __call__(self, optimizer: torch.optim.Optimizer, skip: torch.Tensor, by: torch.Tensor | None) -> bool:
        """Do what ``optimizer.step()`` does and return True, or do nothing if torch has to do it.

        Args:
            skip: float32, 1 if the step is left out.
            by: float32, divides the gradients, which are not written back; None for 1.
        """
        launches = self.plan(optimizer, by is not None)
        for group, tensors, made in launches or ():
            self._launch(group, tensors, made, skip, by)
        return launches is not None

    def plan(self, optimizer: torch.optim.Optimizer, divided: bool) -> list[tuple[dict[str, Any], Tensors, Any]] | None:
        """Return groups, their tensors and what their launches need; None if torch updates everything."""
        is_adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
        if self.device.type != "cuda" or not is_adam or not has_plain_step(optimizer):
            return None
        launches = []
        for number, group in enumerate(optimizer.param_groups):
            tensors = _tensors_of(optimizer, group)
            if tensors is None:
                return None
            if not tensors[0]:
                continue
            if not has_torch_bits(self.device, group["decoupled_weight_decay"], group["weight_decay"] != 0, divided):
                return None
            launches.append((group, tensors, self._ready(group, tensors, number)))
        return None if not launches or any(made is None for _, _, made in launches) else launches

    def _ready(self, group: dict[str, Any], tensors: Tensors, number: int = 0) -> tuple[BlockLayout, _Settings] | None:
        """Return the layout of programs and the settings of a group; None if it is too late to create them."""
        numbers = (*group["betas"], group["eps"], group["weight_decay"])
        layout, settings = self.tables.layout(tuple(p.numel() for p in tensors[0]), number), self._settings.get(numbers)
        if layout is None or (settings is None and capturing(self.device)):
            return None
        if settings is None:
            betas = np.asarray(group["betas"], np.float32)[:, None]
            settings = _Settings(sent(np.asarray(numbers, np.float64), self.device), sent(betas, self.device))
            self._settings[numbers] = settings
        return layout, settings

    def _launch(
        self, group: dict[str, Any], tensors: Tensors, made: Any, skip: torch.Tensor, by: torch.Tensor | None
    ) -> None:
        from flodl.train.step import adam_kernels

        kernels: Any = adam_kernels
        layout, settings = made
        rows = _places(tensors)
        table = self.tables.table(layout, rows)
        number, decays = len(tensors[0]), group["weight_decay"] != 0
        counted = torch.empty(number, dtype=torch.float32, device=self.device)
        with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
            kernels.count_steps[(-(-number // STEPS),)](table[5], number, skip, counted, STEPS, num_warps=4)
            powers = torch.pow(settings.betas, counted)
            kernels.move[(layout.which.numel(),)](
                tensors[0][_base(rows[4])], table, number, layout.sizes, layout.which, layout.starts, powers,
                settings.numbers, group["lr"], skip, skip if by is None else by, layout.span, by is not None, decays,
                group["decoupled_weight_decay"], decays and not group["decoupled_weight_decay"] and by is None, BLOCK,
                num_warps=4,
            )  # fmt: skip
        if not capturing(self.device):
            # As torch's operations do, for code that keeps values computed from weights.
            torch.autograd.graph.increment_version(tensors[0])


def _places(tensors: Sequence[Sequence[torch.Tensor]]) -> np.ndarray:
    """Return the rows that the kernels read, int64 ``(6, parameters)``; the last are addresses of counts.

    Positions are relative to the first parameter that is even, else to the first (`_base`).
    """
    *four, steps = [np.asarray([t.data_ptr() for t in part], np.int64) for part in tensors]
    sizes = np.asarray([p.numel() for p in tensors[0]], np.int64)
    even = np.logical_and.reduce([sizes % 4 == 0, *(part % 16 == 0 for part in four)])
    return np.stack([*((part - four[0][_base(even)]) // 4 for part in four), even.astype(np.int64), steps])


def _base(even: np.ndarray) -> int:
    """Return the parameter to which positions are relative: an even one, if any; even ones differ by fours."""
    return int(even.argmax())


def _tensors_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Tensors | None:
    """Return parameters with a gradient, their gradients, averages and counts; None if there is no kernel for one."""
    if group["amsgrad"] or group["maximize"] or group["differentiable"] or not group["fused"]:
        return None
    if not isinstance(group["lr"], torch.Tensor) or any(isinstance(beta, torch.Tensor) for beta in group["betas"]):
        return None
    found: Tensors = [[], [], [], [], []]
    for p in group["params"]:
        if p.grad is None:
            continue
        state = optimizer.state.get(p)
        if not state or not all(name in state for name in (*AVERAGES, "step")):
            return None
        four = (p, p.grad, state["exp_avg"], state["exp_avg_sq"])
        step = state["step"]
        same = all(t.dtype == torch.float32 and t.stride() == p.stride() and t.device == p.device for t in four)
        if not same or not p.numel() or not is_dense(p) or step.device != p.device or step.dtype != torch.float32:
            return None
        for part, tensor in zip(found, (*four, step), strict=True):
            part.append(tensor)
    return found


# ---- comparison with torch's kernels ---------------------------------------------------------------------

_KNOWN: dict[tuple[Any, ...], bool] = {}


def has_torch_bits(device: torch.device, decoupled: bool, decays: bool, divided: bool) -> bool:
    """Return True if our kernels give the bits of torch's on a device; tries it once per process, not in a capture.

    Args:
        decoupled: weights decay in addition to the gradient (AdamW), not through it.
        decays: weights decay.
        divided: the update divides gradients.
    """
    key = (device, decoupled, decays, divided)
    if key not in _KNOWN:
        if capturing(device):
            return False  # a trial would be captured
        _KNOWN[key] = _try(*key)
    return _KNOWN[key]


def _try(device: torch.device, decoupled: bool, decays: bool, divided: bool) -> bool:
    try:
        from flodl.train.step import adam_kernels  # noqa: F401
    except ImportError:
        return False
    with _waiting_allowed():
        try:
            return all(
                all(map(torch.equal, *(_moved(device, shapes, ours, decoupled, decays, divided) for ours in (0, 1))))
                for shapes in SHAPES
            )
        except Exception as error:  # compilers and drivers fail in many ways
            fault = f"{type(error).__name__}: {error}".splitlines()[0]
    warnings.warn(
        f"train: torch's own kernel updates the parameters on {device}, which is slower: {fault}",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


@contextmanager
def _waiting_allowed() -> Iterator[None]:
    """Let the trial wait for the device without being reported as a step that waits."""
    mode = torch.cuda.get_sync_debug_mode()
    if mode:
        torch.cuda.set_sync_debug_mode(0)
    try:
        yield
    finally:
        if mode:  # torch warns of its prototype at every call
            torch.cuda.set_sync_debug_mode(mode)


# Counts of steps at which a trial begins: ways to compute powers that differ may round alike at the first counts.
COUNTS = tuple(range(1, 640, 20))
# Shapes of tensors that start at sixteen bytes and contain a whole number of these, and of others.
SHAPES = tuple((large, *[small] * (len(COUNTS) - 1)) for large, small in (((512, 96), (64,)), ((257, 129), (3,))))


def _moved(
    device: torch.device, shapes: Any, ours: bool | int, decoupled: bool, decays: bool, divided: bool
) -> list[torch.Tensor]:
    """Return parameters and state after four steps: by torch, or from the second on by our kernels."""
    # The random numbers of a run must not depend on whether its process has done this before.
    drawn = partial(torch.randn, device=device, generator=torch.Generator(device).manual_seed(0))
    params = [torch.nn.Parameter(drawn(shape)) for shape in shapes]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    rate = torch.tensor(3e-4, device=device)
    decay = 0.01 if decays else 0.0
    optimizer = kind(params, lr=rate, weight_decay=decay, fused=True, capturable=device.type == "cuda")
    group, update = optimizer.param_groups[0], AdamUpdate(device)
    by = torch.tensor(7.3, device=device) if divided else None
    for turn in range(4):
        for p in params:
            p.grad = drawn(p.shape) * 10.0 ** (turn - 2)
        found = torch.tensor(float(turn == 2), device=device)
        tensors = _tensors_of(optimizer, group)
        if ours and tensors is not None:
            update._launch(group, tensors, update._ready(group, tensors), found, by)
            continue
        flags: Any = optimizer
        flags.found_inf, flags.grad_scale = found, by
        take_step(optimizer)
        for p, count in zip(params, COUNTS, strict=False) if turn == 0 else ():
            optimizer.state[p]["step"].fill_(count)
    return [*params, *(optimizer.state[p][name] for p in params for name in (*AVERAGES, "step"))]

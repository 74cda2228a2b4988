"""Adam and AdamW on CUDA by kernels of our own, where these give torch's bits.

`torch.optim` stays what holds options and state, is saved and resumed; only what moves the parameters is launched here.
What is not plain (another class, hooks, options without a kernel, a first step, which makes the state) torch does.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from flodl.train.step.blocks import BlockLayout, capturing, is_dense, sent

__all__ = ["AdamUpdate", "powers_of"]

MOST_PROGRAMS = 1 << 15
BLOCK = 1024
STEPS = 256  # counts that a program counts up
AVERAGES = ("exp_avg", "exp_avg_sq")


class AdamUpdate:
    """Moves the parameters of optimisers, one group after the other.

    Args:
        device: of all parameters.
        wide: how powers of the betas are computed; None asks `powers_of` when it is needed.
    """

    def __init__(self, device: torch.device, wide: bool | None = None) -> None:
        self.device, self._wide = device, wide
        self._layouts: dict[Any, BlockLayout] = {}
        self._settings: dict[tuple[float, ...], torch.Tensor] = {}
        self._unknown: list[tuple[BlockLayout, torch.Tensor, np.ndarray]] = []

    def __call__(self, optimizer: torch.optim.Optimizer, found: torch.Tensor, by: torch.Tensor | None) -> bool:
        """Do what ``optimizer.step()`` does, and return True; or nothing, where it has to be asked itself.

        Args:
            found: float32, 1 where the step is left out.
            by: float32, what gradients are divided by; None for nothing. They are not written back.
        """
        if self.device.type != "cuda" or not _is_plain(optimizer):
            return False
        parts = [(group, _tensors_of(optimizer, group)) for group in optimizer.param_groups]
        parts = [(group, tensors) for group, tensors in parts if tensors is None or tensors[0]]
        if not parts or any(tensors is None for _, tensors in parts):
            return False
        wide = self._wide
        if wide is None:
            if capturing(self.device):
                return False  # it was not asked before; what is tried now would be captured
            powers = powers_of(self.device)
            if powers is None:
                return False
            self._wide = wide = powers == "float64"
        ready = [(group, tensors, self._ready(group, tensors)) for group, tensors in parts]
        if any(made is None for _, _, made in ready):
            return False
        for group, tensors, made in ready:
            self._launch(group, tensors, made, found, by, wide)
        return True

    def finish_capture(self) -> object:
        """Complete what was captured since the last call; the answer must be held as long as that is replayed."""
        done, self._unknown = self._unknown, []
        for layout, table, rows in done:
            table.copy_(torch.from_numpy(rows))
            layout.spare.append(torch.empty_like(table))
        return done

    def _ready(self, group: dict[str, Any], tensors: Any) -> tuple[BlockLayout, torch.Tensor] | None:
        """Return where programs read, and the group's settings; None where it is too late to make them."""
        sizes = tuple(p.numel() for p in tensors[0])
        numbers = (*group["betas"], group["eps"], group["weight_decay"])
        layout, settings = self._layouts.get(sizes), self._settings.get(numbers)
        if capturing(self.device):
            return None if layout is None or settings is None or not layout.spare else (layout, settings)
        if layout is None:
            layout = self._layouts[sizes] = BlockLayout.of(sizes, self.device, MOST_PROGRAMS)
        if not layout.spare:
            # What is allocated during capture shares its memory with other tensors of the graph.
            layout.spare.append(torch.empty(6, len(sizes), dtype=torch.int64, device=self.device))
        if settings is None:
            settings = self._settings[numbers] = sent(np.asarray(numbers, np.float64), self.device)
        return layout, settings

    def _launch(
        self, group: dict[str, Any], tensors: Any, made: Any, found: torch.Tensor, by: torch.Tensor | None, wide: bool
    ) -> None:
        from flodl.train.step import adam_kernels

        kernels: Any = adam_kernels
        layout, settings = made
        params = tensors[0]
        rows = _places(tensors)
        if capturing(self.device):
            table = layout.spare.pop()
            self._unknown.append((layout, table, rows))
        else:
            table = sent(rows, self.device)
        number = len(params)
        corrections = torch.empty(2, number, dtype=torch.float32, device=self.device)
        decays = group["weight_decay"] != 0
        with torch.cuda.device(self.device):
            kernels.count_steps[(-(-number // STEPS),)](
                table[5], number, settings, found, corrections, wide, STEPS, num_warps=4
            )
            kernels.move[(layout.which.numel(),)](
                params[0], table, number, layout.sizes, layout.which, layout.starts, corrections, settings,
                group["lr"], found, found if by is None else by, layout.span, by is not None, decays,
                group["decoupled_weight_decay"], BLOCK, num_warps=4,
            )  # fmt: skip


def _places(tensors: Sequence[Sequence[torch.Tensor]]) -> np.ndarray:
    """Return the rows that the kernels go by, int64 ``(6, parameters)``; the last are addresses of counts."""
    *four, steps = [np.asarray([t.data_ptr() for t in part], np.int64) for part in tensors]
    sizes = np.asarray([p.numel() for p in tensors[0]], np.int64)
    even = np.logical_and.reduce([sizes % 4 == 0, *((part - four[0][0]) % 16 == 0 for part in four)])
    return np.stack([*((part - four[0][0]) // 4 for part in four), even.astype(np.int64), steps])


def _is_plain(optimizer: Any) -> bool:
    """Return whether nothing stands between the optimiser's options and its fused kernel."""
    kind = type(optimizer)
    return (
        kind in (torch.optim.Adam, torch.optim.AdamW)
        and "step" not in vars(optimizer)
        and not optimizer._optimizer_step_pre_hooks
        and not optimizer._optimizer_step_post_hooks
        and not _global_optimizer_pre_hooks
        and not _global_optimizer_post_hooks
    )


def _tensors_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> list[list[torch.Tensor]] | None:
    """Return parameters with a gradient, their gradients, averages and counts; None where a kernel lacks for one."""
    if group["amsgrad"] or group["maximize"] or group["differentiable"] or not group["fused"]:
        return None
    if not isinstance(group["lr"], torch.Tensor) or any(isinstance(beta, torch.Tensor) for beta in group["betas"]):
        return None
    found: list[list[torch.Tensor]] = [[], [], [], [], []]
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


@lru_cache(maxsize=8)
def powers_of(device: torch.device) -> str | None:
    """Return in which numbers torch's fused kernels raise betas to powers; None where their bits are not met at all.

    Both "float64" and "float32" are tried, for steps with and without decay, with divided gradients, and left out.
    """
    with contextlib.suppress(ImportError):
        from flodl.train.step import adam_kernels  # noqa: F401

        faults = []
        for name in ("float64", "float32"):
            try:
                with torch.random.fork_rng(devices=[device]):
                    if all(_agrees(device, kind, name) for kind in (torch.optim.AdamW, torch.optim.Adam)):
                        return name
                faults.append(f"{name}: other bits")
            except Exception as error:  # compilers and drivers fail in many ways
                faults.append(f"{name}: {type(error).__name__}: {error}".splitlines()[0])
        warnings.warn(
            f"train: torch's own kernel moves the parameters on {device}, which is slower: {'; '.join(faults)}",
            RuntimeWarning,
            stacklevel=2,
        )
    return None


def _agrees(device: torch.device, kind: Any, name: str) -> bool:
    torch.manual_seed(0)
    shapes = [(257, 129), (1024, 192), (3,), (64,)]
    start = [torch.randn(shape, device=device) for shape in shapes]
    both = []
    for update in (None, AdamUpdate(device, name == "float64")):
        params = [torch.nn.Parameter(tensor.clone()) for tensor in start]
        rate = torch.tensor(3e-4, device=device)
        groups = [{"params": params[:2], "weight_decay": 0.01}, {"params": params[2:], "weight_decay": 0.0}]
        optimizer = kind(groups, lr=rate, betas=(0.9, 0.999), eps=1e-8, fused=True, capturable=True)
        torch.manual_seed(1)
        for turn in range(5):
            for p in params:
                p.grad = torch.randn_like(p) * 10.0 ** (turn - 3)
            found = torch.tensor(float(turn == 3), device=device)
            by = torch.tensor(7.3, device=device) if turn % 2 else None
            if update is None or not update(optimizer, found, by):
                optimizer.found_inf, optimizer.grad_scale = found, by
                optimizer.step()
                del optimizer.found_inf, optimizer.grad_scale
        both.append([*params, *(optimizer.state[p][key] for p in params for key in (*AVERAGES, "step"))])
    return all(torch.equal(a, b) for a, b in zip(*both, strict=True))

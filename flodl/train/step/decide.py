"""The decision on a step, on the device: the gradient's norm, whether all is finite, and the factor to clip by.

On CUDA two kernels of `flodl.train.step.norm_kernels` decide for dense gradients in float32 or half precision; a few
operations of torch decide for other gradients and devices. `flodl.train.step.device` applies the decision. The programs
of a kernel get stretches of many tensors, whose addresses they read from a table.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

SUMS = 1024
WARPS = 4


# Elements that a program reads in one operation.
BLOCK = 2048
# Programs that write one number each: all run simultaneously, and one program can sum their results.
MOST_PROGRAMS = 1056


@dataclass(frozen=True)
class BlockLayout:
    """Assignment of stretches to programs, the same for all gradients of these shapes.

    ``spare`` is memory for the addresses that a captured graph reads. It is allocated before the capture, because other
    tensors of the graph overwrite memory of the capture at each replay.
    """

    sizes: Tensor
    which: Tensor
    starts: Tensor
    span: int
    spare: list[Tensor]

    @classmethod
    def of(cls, sizes: Sequence[int], device: torch.device, most: int = MOST_PROGRAMS) -> BlockLayout:
        """Return the assignment for tensors of these sizes, to at most ``most`` programs, or one for each tensor."""
        span = BLOCK
        while sum(-(-size // span) for size in sizes) > max(most, len(sizes)):
            span *= 2
        which = np.repeat(np.arange(len(sizes)), [-(-size // span) for size in sizes])
        starts = np.concatenate([np.arange(0, size, span) for size in sizes])
        numbers = np.asarray(sizes)
        return cls(sent(numbers, device), sent(which.astype(np.int32), device), sent(starts, device), span, [])


class BlockTables:
    """Layouts of kernels over many tensors, and the tables of addresses that the kernels read.

    Args:
        device: device of the tensors.
        rows: addresses of each tensor.
        most: bound of the number of programs.
    """

    def __init__(self, device: torch.device, *, rows: int = 1, most: int = MOST_PROGRAMS) -> None:
        self.device, self.rows, self.most = device, rows, most
        self.layouts: dict[Any, BlockLayout] = {}
        self._pending: list[tuple[BlockLayout, Tensor, np.ndarray]] = []

    def layout(self, sizes: Sequence[int], number: int = 0) -> BlockLayout | None:
        """Return the layout for tensors of these sizes; None in a capture without memory for its table.

        Args:
            number: number of the group of tensors: each has its own memory, even if another has the same sizes.
        """
        layout = self.layouts.get((number, sizes))
        if capturing(self.device):
            return layout if layout is not None and layout.spare else None
        if layout is None:
            layout = self.layouts[number, sizes] = BlockLayout.of(sizes, self.device, self.most)
        if not layout.spare:
            # Memory that is allocated during a capture is shared with other tensors of the graph.
            layout.spare.append(torch.empty(self.rows, len(sizes), dtype=torch.int64, device=self.device))
        return layout

    def table(self, layout: BlockLayout, addresses: np.ndarray) -> Tensor:
        """Return addresses, int64 ``(rows, tensors)``, on the device; in a capture `finish_capture` copies them."""
        if not capturing(self.device):
            return sent(addresses, self.device)
        table = layout.spare.pop()
        self._pending.append((layout, table, addresses))
        return table

    def finish_capture(self) -> object:
        """Complete a capture; keep the returned object as long as the graph is replayed."""
        done, self._pending = self._pending, []
        for layout, table, addresses in done:
            table.copy_(torch.from_numpy(addresses))
            layout.spare.append(torch.empty_like(table))
        return done


def capturing(device: torch.device) -> bool:
    """Return True if launches are captured now instead of run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def is_dense(tensor: Tensor) -> bool:
    """Return True if the elements are one stretch of memory, in any order."""
    spans = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    size = 1
    for stride, length in spans:
        if length != 1 and stride != size:
            return False
        size *= length
    return True


def sent(array: Any, device: torch.device) -> Tensor:
    """Return the numbers on the device, without a wait of the host."""
    found = torch.from_numpy(array)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found


@dataclass(frozen=True)
class StepDecision:
    """Decision on a step, on the device.

    Attributes:
        found: float32, 1 if the step is left out.
        scale: float32, divisor of the gradients; None if nothing is clipped.
        figures: float64, the loss, the norm, the count if it is a tensor, and the rest.
    """

    found: Tensor
    scale: Tensor | None
    figures: Tensor


class GradientCheck:
    """Decide whether steps count.

    Args:
        device: device of the gradients.
        max_grad_norm: clip the gradient to this 2-norm.
        sticky: after a step that is not finite no step is applied any more; otherwise only that step is left out.

    Attributes:
        state: float32, 1 after a fault.
    """

    def __init__(self, device: torch.device, *, max_grad_norm: float | None = None, sticky: bool = True) -> None:
        self.device, self.max_grad_norm, self.sticky = device, max_grad_norm, sticky
        self.state = torch.zeros((), dtype=torch.float32, device=device)
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self._kernels = _kernels(device) if device.type == "cuda" else None
        self.tables = BlockTables(device)

    def __call__(
        self, grads: Sequence[Tensor], loss: Tensor, count: Any, *, summed: bool = False, rest: Tensor | None = None
    ) -> StepDecision:
        """Return the decision on a step.

        Args:
            grads: the whole gradient, at least one tensor.
            loss: the mean loss.
            count: number of items; 0 is possible only if it is a tensor.
            summed: the gradient is not divided by ``count``, a tensor, so the scale of the decision includes it.
            rest: further figures, float64, appended to the row.
        """
        blocks = self._layout_of(grads) if self._kernels is not None else None
        if blocks is not None:
            return self._by_kernels(blocks, grads, loss, count, summed, rest)
        norm = get_total_norm(list(grads))
        norm = norm if norm.dtype == torch.float64 else norm.to(torch.float32)
        if summed:
            norm = norm / _divisor(count).to(norm.dtype)
        counts = isinstance(count, Tensor)
        figures = torch.stack([loss.reshape(()).to(torch.float64), norm.to(torch.float64)])
        if not self.sticky:
            self.state.zero_()
        found = torch.zeros_like(self.state) if counts else self.state
        torch._amp_foreach_non_finite_check_and_unscale_([figures], found, self._one)  # pyright: ignore
        if counts:
            # The mean of nothing is NaN but no fault; the step is left out nevertheless.
            empty = (count == 0).to(torch.float32)
            torch.maximum(self.state, found * (1 - empty), out=self.state)
            found = torch.maximum(self.state, empty)
        scale = None
        if self.max_grad_norm is not None:
            # The update divides gradients by it, which saves a pass over them.
            scale = ((norm + 1e-6) / self.max_grad_norm).clamp(min=1.0).to(torch.float32)
        if summed:
            divisor = _divisor(count).to(torch.float32)
            scale = divisor if scale is None else scale * divisor
        further = [count.reshape(1).to(torch.float64)] if counts else []
        further += [] if rest is None else [rest]
        return StepDecision(found, scale, torch.cat([figures, *further]) if further else figures)

    def _layout_of(self, grads: Sequence[Tensor]) -> BlockLayout | None:
        if grads[0].dtype not in _KINDS or any(
            g.dtype != grads[0].dtype or g.layout != torch.strided or g.device != self.device for g in grads
        ):
            return None
        sizes = tuple(g.numel() for g in grads)
        return self.tables.layout(sizes) if min(sizes) and all(map(is_dense, grads)) else None

    def _by_kernels(
        self, blocks: BlockLayout, grads: Sequence[Tensor], loss: Tensor, count: Any, summed: bool, rest: Tensor | None
    ) -> StepDecision:
        kernels: Any = self._kernels
        further = 0 if rest is None else rest.numel()
        counts, clips = isinstance(count, Tensor), self.max_grad_norm is not None
        table = self.tables.table(blocks, np.asarray([[g.data_ptr() for g in grads]]))
        programs = blocks.which.numel()
        sums = torch.empty(programs, dtype=torch.float32, device=self.device)
        figures = torch.empty((3 if counts else 2) + further, dtype=torch.float64, device=self.device)
        found = torch.empty_like(self.state) if counts else self.state
        scale = torch.empty_like(self.state) if clips or summed else None
        kind = getattr(kernels.tl, _KINDS[grads[0].dtype])
        room = max(16, 1 << (further - 1).bit_length()) if further else 0
        with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
            kernels.square_sums[(programs,)](
                table, blocks.sizes, blocks.which, blocks.starts, sums, blocks.span, kind, BLOCK, num_warps=WARPS
            )
            kernels.decide[(1,)](
                sums, programs, loss, count if counts else loss, self.state, found,
                self.state if scale is None else scale, figures, figures if rest is None else rest, further,
                float(self.max_grad_norm or 1.0), counts, self.sticky, clips, summed, room, SUMS, num_warps=8,
            )  # fmt: skip
        return StepDecision(found, scale, figures)


def _divisor(count: Tensor) -> Tensor:
    """Return the count, or 1 if nothing was counted and the step is left out."""
    return torch.where(count == 0, 1, count)


_KINDS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def load_kernels() -> Any:
    """Return the module of the kernels; None without Triton."""
    with contextlib.suppress(ImportError):
        from flodl.train.step import norm_kernels

        return norm_kernels
    return None


def hash_triton() -> None:
    """Compute the hash of Triton, which its first kernel needs, in a thread: half a second of reading files."""

    def run() -> None:
        with contextlib.suppress(Exception):  # a version without this function computes the hash later
            import_module("triton.runtime.cache").triton_key()

    threading.Thread(target=run, name="flodl-triton", daemon=True).start()


@lru_cache(maxsize=8)
def _kernels(device: torch.device) -> Any:
    """Return the kernels; None without Triton, or if their results differ from torch's on this device."""
    kernels = load_kernels()
    if kernels is None:
        return None
    check = GradientCheck(torch.device("cpu"), max_grad_norm=1.0)
    check.device, check._kernels, check.state = device, kernels, check.state.to(device)
    check.tables = BlockTables(device)
    grads = [torch.linspace(-1, 1, size, device=device) for size in (3, BLOCK + 1)]
    try:
        found = check(grads, torch.ones((), device=device), 1.0).figures.tolist()
        wanted = [1.0, float(get_total_norm(grads))]
        fault = None if np.allclose(found, wanted, rtol=1e-5) else f"found {found}, expected {wanted}"
    except Exception as error:  # compilers and drivers fail in many ways
        fault = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    if fault is None:
        return kernels
    warnings.warn(f"train: kernels for the gradient's norm are not used: {fault}", RuntimeWarning, stacklevel=2)
    return None

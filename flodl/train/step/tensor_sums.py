"""Sums and norms of several tensors in two launches on CUDA, also while a step is captured.

Torch takes a launch or two for each, and what is watched inside of a model is small work that comes in tens. The
kernels go by a table of addresses (`flodl.train.step.norm_kernels`); sums are in an order that depends on sizes alone.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flodl.train.step.decide import KINDS, BlockLayout, capturing, is_dense, load_kernels, sent

__all__ = ["TensorSums"]

BLOCK = 2048  # elements that a program reads at once
SUMS = 256
WARPS = 4


@dataclass(frozen=True)
class _Layout:
    """Which program reads what, which tensors are squared, and where each tensor's sums begin."""

    blocks: BlockLayout
    squares: Tensor
    firsts: Tensor


class TensorSums:
    """Adds up tensors of one CUDA device.

    Args:
        device: where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kernels: Any = _kernels(device)
        self._layouts: dict[Any, _Layout] = {}
        self._unknown: list[tuple[BlockLayout, Tensor, list[int]]] = []

    def takes(self, value: Tensor) -> bool:
        """Return whether a tensor can be added up here."""
        return (
            self._kernels is not None
            and value.dtype in KINDS
            and value.device == self.device
            and value.layout == torch.strided
            and value.numel() > 1
            and is_dense(value)
        )

    def __call__(self, values: Sequence[Tensor], squares: Sequence[bool]) -> Tensor | None:
        """Return the sum of each tensor, or its 2-norm where ``squares`` says so, float64 ``(len(values),)``.

        Args:
            values: of one dtype, each of which `takes` takes.
            squares: one for each.

        Returns:
            None while a step is captured that has not run before with tensors of these sizes.
        """
        key = tuple(value.numel() for value in values), tuple(squares), values[0].dtype
        layout = self._layout_of(*key)
        if layout is None:
            return None
        kernels, blocks = self._kernels, layout.blocks
        table = self._table(blocks, [value.data_ptr() for value in values])
        programs = blocks.which.numel()
        sums = torch.empty(programs, dtype=torch.float32, device=self.device)
        found = torch.empty(len(values), dtype=torch.float64, device=self.device)
        kind = getattr(kernels.tl, KINDS[values[0].dtype])
        with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
            kernels.stretch_sums[(programs,)](
                table, blocks.sizes, blocks.which, blocks.starts, layout.squares, sums, blocks.span, kind, BLOCK,
                num_warps=WARPS,
            )  # fmt: skip
            kernels.add_up[(len(values),)](sums, layout.firsts, layout.squares, found, SUMS, num_warps=WARPS)
        return found

    def finish_capture(self) -> object:
        """Complete what was captured since the last call; the answer must be held as long as that is replayed."""
        done, self._unknown = self._unknown, []
        for blocks, table, addresses in done:
            table.copy_(torch.tensor(addresses))
            blocks.spare.append(torch.empty_like(table))
        return done

    def _layout_of(self, sizes: tuple[int, ...], squares: tuple[bool, ...], dtype: torch.dtype) -> _Layout | None:
        layout = self._layouts.get((sizes, squares, dtype))
        if capturing(self.device):
            return layout if layout is not None and layout.blocks.spare else None
        if layout is None:
            blocks = BlockLayout.of(sizes, self.device)
            programs = [-(-size // blocks.span) for size in sizes]
            firsts = np.cumsum([0, *programs]).astype(np.int32)
            layout = self._layouts[sizes, squares, dtype] = _Layout(
                blocks, sent(np.asarray(squares, np.int32), self.device), sent(firsts, self.device)
            )
        if not layout.blocks.spare:
            layout.blocks.spare.append(torch.empty(len(sizes), dtype=torch.int64, device=self.device))
        return layout

    def _table(self, blocks: BlockLayout, addresses: list[int]) -> Tensor:
        if not capturing(self.device):
            return sent(np.asarray(addresses), self.device)
        table = blocks.spare.pop()
        self._unknown.append((blocks, table, addresses))
        return table


@lru_cache(maxsize=8)
def _kernels(device: torch.device) -> Any:
    """Return the kernels; None where there is no Triton, or where they do not agree with torch on this device."""
    kernels = load_kernels() if device.type == "cuda" else None
    if kernels is None:
        return None
    sums = TensorSums.__new__(TensorSums)
    sums.device, sums._kernels, sums._layouts, sums._unknown = device, kernels, {}, []
    try:
        values = [torch.linspace(0, 1, size, device=device) for size in (3, BLOCK + 1, 300 * BLOCK)]
        found = sums(values, [False, True, False])
        wanted = [float(values[0].sum()), float(values[1].norm()), float(values[2].sum())]
        told = [] if found is None else found.tolist()
        fault = None if np.allclose(told, wanted, rtol=1e-5) else f"found {told}, expected {wanted}"
    except Exception as error:  # compilers and drivers fail in many ways
        fault = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    if fault is not None:
        warnings.warn(f"train: kernels for what is watched are not used: {fault}", RuntimeWarning, stacklevel=2)
        return None
    return kernels

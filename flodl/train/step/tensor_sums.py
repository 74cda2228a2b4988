"""Sums and norms of tensors on CUDA, each in one launch while the tensor is still in the cache of the device.

Torch needs two or three launches for each sum, and values that are collected inside a model are small and come in tens.
One more launch adds up the results of all tensors, into one tensor that becomes part of a step's row of figures. The
order of sums depends on sizes only.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flodl.train.step.blocks import is_dense
from flodl.train.step.decide import kernels_with

__all__ = ["TensorSums"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PROGRAMS = 1024  # enough for a large device to process all of a tensor simultaneously
BLOCK = 4096  # elements that a program reads in one operation
ROWS = 24  # tensors that one launch finishes
WARPS = 8


class TensorSums:
    """Add up tensors of one CUDA device; used by one thread.

    Args:
        device: device of the tensors.
        kernels: module of the kernels; None accepts no tensor.
    """

    def __init__(self, device: torch.device, kernels: Any = None) -> None:
        self.device = device
        self._kernels = kernels
        self.clear()

    @classmethod
    def of(cls, device: torch.device) -> TensorSums:
        """Return an object with the kernels of a device; waits for the device."""
        return cls(device, _kernels(device) if device.type == "cuda" else None)

    def takes(self, value: Tensor) -> bool:
        """Return True if `add` accepts a tensor."""
        return (
            self._kernels is not None
            and value.dtype in DTYPES
            and value.device == self.device
            and value.layout == torch.strided
            and value.numel() > 1
            and is_dense(value)
        )

    def add(self, value: Tensor, *, squared: bool) -> None:
        """Start to add up a tensor that `takes` accepts.

        Args:
            value: the tensor; later writes to it have no effect.
            squared: compute the 2-norm instead of the sum.
        """
        if not self._begun or len(self._begun[-1][1]) == ROWS:
            self._begun.append((torch.empty(ROWS, PROGRAMS, dtype=torch.float32, device=self.device), []))
        parts, norms = self._begun[-1]
        norms.append(squared)
        size = value.numel()
        span = -(-size // (PROGRAMS * BLOCK)) * BLOCK
        with self._here():
            self._kernels.one_sum[(PROGRAMS,)](
                value.detach(), parts[len(norms) - 1], size, span, squared, BLOCK, num_warps=WARPS
            )

    def finish(self) -> Tensor:
        """Return the sums and norms that were started since the last call, float64 ``(count,)``, in new memory."""
        found = torch.empty(sum(len(norms) for _, norms in self._begun), dtype=torch.float64, device=self.device)
        with self._here():
            for (parts, norms), results in zip(self._begun, found.split(ROWS) if self._begun else (), strict=True):
                bits = sum(1 << place for place, squared in enumerate(norms) if squared)
                self._kernels.finish_sums[(len(norms),)](parts, results, bits, PROGRAMS, num_warps=WARPS)
        self.clear()
        return found

    def clear(self) -> None:
        """Discard started sums."""
        self._begun: list[tuple[Tensor, list[bool]]] = []  # memory for sums, and which of its rows become norms

    def _here(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()


@lru_cache(maxsize=8)
def _kernels(device: torch.device) -> Any:
    def trial(kernels: Any) -> tuple[list[float], list[float]]:
        sums, found, expected = TensorSums(device, kernels), [], []
        for dtype in DTYPES:
            for size in (3, PROGRAMS * BLOCK + 1):
                value = torch.linspace(0, 1, size, device=device).to(dtype)
                sums.add(value, squared=False)
                sums.add(value, squared=True)
                expected += [float(value.double().sum()), float(value.double().norm())]
            found += sums.finish().tolist()
        return found, expected

    return kernels_with(trial, "collected values")

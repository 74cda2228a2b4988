"""Layer norms with a reference that computes them differently from torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class StepwiseNorm(nn.LayerNorm):
    """The layer norm of DeBERTa v1: each step by itself, in float32, and gain and shift in the dtype of the states."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised states, in their dtype."""
        wide = input.float()
        mean = wide.mean(-1, keepdim=True)
        variance = (wide - mean).pow(2).mean(-1, keepdim=True)
        wide = (wide - mean) / torch.sqrt(variance + self.eps)
        return self.weight * wide.to(input.dtype) + self.bias

    def fused(self, hidden: Tensor) -> Tensor:
        """Return the same up to rounding, by torch's own layer norm."""
        return super().forward(hidden)


def normalised(norm: nn.Module, hidden: Tensor) -> Tensor:
    """Return the normalised states by the quickest way that torch has."""
    return norm.fused(hidden) if type(norm) is StepwiseNorm else norm(hidden)

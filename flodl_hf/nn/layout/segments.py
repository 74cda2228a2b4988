"""Maximum values of concatenated texts, with a gradient shared by equal maxima.

``torch.segment_reduce`` finds the largest too, and gives its gradient whole to each of several equal ones where it is
below zero; in half precision equal ones are common. Nothing here synchronises a device, so steps can be recorded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_ROWS = 4096
"""Features with gradients computed together: scores of a whole vocabulary would need twice their memory."""


def largest_of_texts(values: Tensor, offsets: Tensor) -> Tensor:
    """Return the largest value of each feature in each text, ``(texts, size)``; 0 for a text without tokens.

    Args:
        values: ``(tokens, size)``.
        offsets: where each text begins, and the end of the last one, ``(texts + 1,)``.
    """
    return _Largest.apply(values, offsets)  # type: ignore[return-value]


class _Largest(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, offsets: Tensor) -> Tensor:
        lengths = offsets.to(torch.int64).diff()
        found = torch.segment_reduce(values, "max", lengths=lengths, axis=0, unsafe=True)
        found = found.masked_fill((lengths == 0)[:, None], 0.0)
        ctx.save_for_backward(values, found, offsets, lengths)
        return found

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        values, found, offsets, lengths = ctx.saved_tensors
        given = grad_outputs[0]
        tokens = torch.arange(len(values), device=values.device, dtype=offsets.dtype)
        owners = torch.searchsorted(offsets[1:].contiguous(), tokens, right=True).clamp(max=len(found) - 1)
        outside = (tokens >= offsets[-1])[:, None]
        gradient = torch.empty_like(values)
        for start in range(0, values.shape[1], CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            chosen = (values[:, part] == found[owners, part]) & ~outside
            equal = torch.segment_reduce(chosen.float(), "sum", lengths=lengths, axis=0, unsafe=True)
            share = given[:, part] / equal.clamp(min=1.0)
            gradient[:, part] = share[owners] * chosen
        return gradient, None

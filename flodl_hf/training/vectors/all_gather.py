"""All-gather of vectors with gradients, for negatives of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["gather", "max_over_ranks", "rows_per_rank"]


def rows_per_rank(count: int, device: torch.device) -> list[int]:
    """Return the number of examples of each rank."""
    place = torch.device("cpu") if "gloo" in dist.get_backend() else device
    counts = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=place)
    counts[dist.get_rank()] = count
    dist.all_reduce(counts)
    return counts.tolist()


def max_over_ranks(numbers: Sequence[int], device: torch.device) -> list[int]:
    """Return the largest of each of some numbers that every rank has."""
    place = torch.device("cpu") if "gloo" in dist.get_backend() else device
    found = torch.tensor(list(numbers), dtype=torch.int64, device=place)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


def gather(own: Tensor, shares: list[int]) -> Tensor:
    """Return the rows of all ranks, ``(sum of shares, ...)``, in the order of ranks.

    Gradients are summed over ranks, each of which computes its own loss.

    Args:
        own: this rank's rows.
        shares: how many rows each rank has.
    """
    return _Gathered.apply(own, shares)  # type: ignore[return-value]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, shares: list[int]) -> Tensor:
        ctx.shares = shares
        padded = own.new_zeros(max(shares), *own.shape[1:])
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in shares]
        dist.all_gather(parts, padded)
        return torch.cat([part[:count] for part, count in zip(parts, shares, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        summed = grad_outputs[0].contiguous().clone()
        dist.all_reduce(summed)
        start = sum(ctx.shares[: dist.get_rank()])
        return summed[start : start + ctx.shares[dist.get_rank()]], None

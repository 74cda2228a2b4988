"""Sums of gradients at fixed places, for steps whose parts are recorded.

A recorded backward pass writes to the same memory each time, so that what comes after it can be recorded apart or
not at all. Sums that leave while the pass still runs are `flodl.distributed.average`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from flodl.distributed.average import GRADIENT_BUCKET, buckets_of, parts_like
from flodl.distributed.group import Ranks

__all__ = ["FlatSum"]


class FlatSum:
    """Sums gradients over ranks in buckets that stay where they are.

    A step is `collect` (which may be recorded) and `exchange`; afterwards gradients are views of the buckets.

    Args:
        model: whose trainable parameters take part.
    """

    def __init__(self, ranks: Ranks, model: nn.Module) -> None:
        self.ranks, self.model = ranks, model
        self._parameters: list[nn.Parameter] = []
        self.renew()

    def renew(self) -> bool:
        """Look which parameters are trained; return whether they changed, so that buckets lie elsewhere now."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if len(parameters) == len(self._parameters) and all(
            a is b for a, b in zip(parameters, self._parameters, strict=True)
        ):
            return False
        self._parameters = parameters
        backwards = parameters[::-1]
        self._views: list[torch.Tensor] = list(parameters)
        self.flats: list[torch.Tensor] = []
        for places in buckets_of(backwards, GRADIENT_BUCKET):
            members = [backwards[place] for place in places]
            flat = torch.zeros(sum(p.numel() for p in members), dtype=members[0].dtype, device=members[0].device)
            for place, piece in zip(places, parts_like(flat, members), strict=True):
                like = backwards[place]
                # in the order that the parameter has in memory, which fused optimisers rely on
                view = piece if like.is_contiguous() else piece.as_strided(like.shape, like.stride())
                self._views[len(parameters) - 1 - place] = view
            self.flats.append(flat)
        device = parameters[0].device if parameters else self.ranks.device
        self._all_used = torch.ones(len(parameters), dtype=torch.float64, device=device)
        return True

    @torch.no_grad()
    def collect(self) -> tuple[int, ...]:
        """Copy gradients into the buckets; return the places of parameters that have none."""
        lacking = tuple(i for i, p in enumerate(self._parameters) if p.grad is None)
        pairs = [(view, p.grad) for view, p in zip(self._views, self._parameters, strict=True) if p.grad is not None]
        if pairs:
            torch._foreach_copy_([view for view, _ in pairs], [grad for _, grad in pairs])  # pyright: ignore
        if lacking:
            torch._foreach_zero_([self._views[i] for i in lacking])  # pyright: ignore
        return lacking

    @torch.no_grad()
    def exchange(self, totals: torch.Tensor, lacking: Sequence[int]) -> torch.Tensor:
        """Sum buckets and ``totals`` (float64, 1-dimensional) over ranks; set gradients, and return the totals.

        Args:
            lacking: from `collect`; a parameter that all ranks lack keeps no gradient.
        """
        handles = [self.ranks.sum_async(flat) for flat in self.flats]
        used = self._all_used
        if lacking:
            used = used.clone()
            used[list(lacking)] = 0.0
        sums = self.ranks.sum_(torch.cat([totals, used]))
        with self.ranks.naming_the_dead():
            for handle in handles:
                handle.wait()
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view
        if lacking:
            # Reading the counts makes the host wait for the device, so only a rank that must know does.
            for place, users in zip(lacking, sums[len(totals) :][list(lacking)].tolist(), strict=True):
                if users == 0:
                    self._parameters[place].grad = None
        return sums[: len(totals)]

"""Collectives over several models, for loops that need no trainer (GANs, reinforcement learning)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from flodl.distributed.average import BufferMean, model_tensors
from flodl.distributed.gradients import GradientSum
from flodl.distributed.group import Ranks, join_ranks
from flodl.train.saving.state import check_same_model


class Replicas:
    """The copies of some models on this rank; all ranks start from the weights of rank 0.

    Args:
        models: the models.
        ranks: the ranks; None joins the ranks of torchrun.

    Attributes:
        world_size: number of ranks; with one rank the operations change nothing.
        rank: this rank.
        device: device of the models.
    """

    def __init__(self, models: Sequence[nn.Module], ranks: Ranks | None = None) -> None:
        self.ranks = ranks or join_ranks()
        self.world_size, self.rank, self.device = self.ranks.world, self.ranks.rank, self.ranks.device
        self.models = [model.to(self.device) for model in models]
        for model in self.models:
            check_same_model(self.ranks, model)
        self.sync_params()
        self._sums = [GradientSum(self.ranks, model) for model in self.models]
        self._buffers = [BufferMean(self.ranks, model) for model in self.models]

    @torch.no_grad()
    def sync_params(self) -> None:
        """Overwrite parameters and buffers of all ranks with the values of rank 0."""
        for model in self.models:
            self.ranks.copy_from(0, model_tensors(model))

    def all_reduce_gradients(self) -> None:
        """Replace gradients by their mean over ranks."""
        self.weighted_all_reduce_gradients(1.0)

    @torch.no_grad()
    def weighted_all_reduce_gradients(self, count: float) -> None:
        """Replace gradients, means over ``count`` items on this rank, by the mean over the items of all ranks."""
        for model, total in zip(self.models, self._sums, strict=True):
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(count)
            counted = sum(row[0] for row in total([float(count)]))
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(counted or 1.0)  # without items the gradient is 0

    def sync_buffers(self, weight: float = 1.0) -> None:
        """Replace floating-point buffers by their weighted mean over ranks, integer ones by the maximum."""
        for buffers in self._buffers:
            buffers(weight)

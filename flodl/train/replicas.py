"""The bare collectives over several models, for loops that fit no scheme (GANs, reinforcement learning)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from flodl.distributed.average import BufferMean, model_tensors
from flodl.distributed.gradients import GradientSum
from flodl.distributed.group import Ranks
from flodl.train.saving.identity import check_same_model

__all__ = ["Replicas"]


class Replicas:
    """One process's copies of some models; made by `Trainer.wrap`, which gives all ranks rank 0's numbers.

    Attributes:
        world_size: number of ranks; with one, every operation leaves things as they are.
        rank: this one.
        device: where the models are.
    """

    def __init__(self, models: Sequence[nn.Module], ranks: Ranks) -> None:
        self.models, self.ranks = [model.to(ranks.device) for model in models], ranks
        for model in self.models:
            check_same_model(ranks, model)
        self.sync_params()
        self._sums = [GradientSum(ranks, model) for model in self.models]
        self._buffers = [BufferMean(ranks, model) for model in self.models]

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.ranks.world

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.ranks.rank

    @property
    def device(self) -> torch.device:
        """Where the models are."""
        return self.ranks.device

    @torch.no_grad()
    def sync_params(self) -> None:
        """Overwrite parameters and buffers of all ranks by rank 0's."""
        for model in self.models:
            self.ranks.copy_from(0, model_tensors(model))

    def all_reduce_gradients(self) -> None:
        """Replace gradients by their mean over ranks."""
        self.weighted_all_reduce_gradients(1.0)

    @torch.no_grad()
    def weighted_all_reduce_gradients(self, count: float) -> None:
        """Replace gradients, means over ``count`` items on this rank, by the mean over all ranks' items."""
        for model, total in zip(self.models, self._sums, strict=True):
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(count)
            counted = sum(row[0] for row in total([float(count)]))
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(counted or 1.0)  # gradients of nothing are 0, and stay so

    def sync_buffers(self, weight: float = 1.0) -> None:
        """Replace floating-point buffers by their weighted mean over ranks, whole-number ones by the largest."""
        for buffers in self._buffers:
            buffers(weight)

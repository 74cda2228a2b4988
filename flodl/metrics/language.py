"""Perplexity: how many tokens a model hesitates between, on average."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from flodl.metrics.sums import Sums

__all__ = ["Perplexity"]


class Perplexity(Sums):
    """The exponential of the mean loss per token: ``perplexity``, ``loss`` and ``count``.

    For a masked language model the tokens are the masked ones, so figures depend on the masking.

    Args:
        ignore_index: labels of this value do not count.
    """

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__(2, dtype=torch.float64, key="sums")
        self.ignore_index = ignore_index

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch.

        Args:
            logits: ``(..., vocabulary)``.
            labels: token numbers, ``(...)``.
        """
        flat = labels.reshape(-1)
        losses = functional.cross_entropy(
            logits.detach().reshape(-1, logits.shape[-1]).float(),
            flat,
            ignore_index=self.ignore_index,
            reduction="none",
        )
        # added up in double precision, so that the size of batches does not show in the figure
        self.add(losses.sum(dtype=torch.float64), (flat != self.ignore_index).sum())

    def add(self, total_loss: Tensor | float, num_tokens: Tensor | int) -> None:
        """Add a sum of losses, in nats, over ``num_tokens`` tokens, where the loss is known already."""
        device = total_loss.device if isinstance(total_loss, Tensor) else self._sums.device
        more = torch.stack(
            [torch.as_tensor(v, dtype=torch.float64, device=device).detach() for v in (total_loss, num_tokens)]
        )
        self._add(more)

    def compute(self) -> dict[str, float]:
        """Return ``perplexity``, ``loss`` (nats per token) and ``count``; NaN before anything was seen."""
        total, count = self._sums.tolist()
        loss = total / count if count else math.nan
        # exp overflows near 709 nats, where a figure says no more than infinity does
        return {"perplexity": math.exp(loss) if not loss > 700 else math.inf, "loss": loss, "count": count}

"""A loss that torch lacks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from flodl.errors import TrainError

__all__ = ["focal_loss"]


def focal_loss(
    logits: Tensor,
    labels: Tensor,
    *,
    gamma: float = 2.0,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Return the focal loss ``-(1 - p) ** gamma * log(p)`` of label probabilities ``p``.

    Easy examples get a small weight, which helps if most are easy (Lin et al. 2017, equation 4). ``gamma=0`` is
    bit-identical to the cross entropy.

    Args:
        logits: ``(batch, labels)``, or ``(batch, labels, ...)`` as ``cross_entropy`` takes them.
        labels: ``(batch,)`` or ``(batch, ...)``, integers.
        gamma: exponent of the weight, 0 or more.
        weight: weight of each label, ``(labels,)``; alpha in the paper.
        ignore_index: labels to ignore.
        reduction: ``"mean"``, weighted as by ``cross_entropy``; ``"sum"``; ``"none"`` returns ``(batch, ...)``.

    Raises:
        TrainError: an unknown reduction, or gamma below 0.
    """
    if reduction not in ("mean", "sum", "none"):
        raise TrainError(
            f"focal loss: found reduction={reduction!r}, expected 'mean', 'sum' or 'none'", found=reduction
        )
    if not gamma >= 0:
        raise TrainError(f"focal loss: found gamma={gamma!r}, expected 0 or more", gamma=gamma)
    if gamma == 0:
        return cross_entropy(logits, labels, weight, ignore_index=ignore_index, reduction=reduction)
    plain = cross_entropy(logits, labels, ignore_index=ignore_index, reduction="none")
    counted = labels != ignore_index
    share = counted.to(plain.dtype)
    if weight is not None:
        share = share * weight.to(plain.dtype)[labels.clamp(min=0) * counted]
    # expm1 of the logarithm is exact near p = 1, where 1 - p is small.
    losses = (-torch.expm1(-plain)).clamp(min=0) ** gamma * plain * share
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / share.sum()

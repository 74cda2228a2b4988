"""Losses that torch lacks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, logsigmoid

from flodl.errors import TrainError

__all__ = ["binary_focal_loss", "focal_loss"]


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
    _check(gamma, reduction)
    if gamma == 0:
        return cross_entropy(logits, labels, weight, ignore_index=ignore_index, reduction=reduction)
    plain = cross_entropy(logits, labels, ignore_index=ignore_index, reduction="none")
    counted = labels != ignore_index
    share = counted.to(plain.dtype)
    if weight is not None:
        share = share * weight.to(plain.dtype)[labels.clamp(min=0) * counted]
    # expm1 of the logarithm is exact near p = 1, where 1 - p is small.
    losses = (-torch.expm1(-plain)).clamp(min=0) ** gamma * plain * share
    return _reduced(losses, share, reduction)


def binary_focal_loss(
    logits: Tensor, targets: Tensor, *, gamma: float = 2.0, alpha: float | None = None, reduction: str = "mean"
) -> Tensor:
    """Return the focal loss of independent binary labels.

    Args:
        logits: any shape.
        targets: the same shape, from 0 to 1.
        gamma: exponent of the weight, 0 or more; 0 without alpha is ``binary_cross_entropy_with_logits``.
        alpha: weight of positive labels; negative ones get ``1 - alpha``.
        reduction: ``"mean"`` over all elements, ``"sum"`` or ``"none"``.

    Raises:
        TrainError: an unknown reduction, gamma below 0, or alpha outside of 0 to 1.
    """
    _check(gamma, reduction)
    if alpha is not None and not 0 <= alpha <= 1:
        raise TrainError(f"binary_focal_loss: found alpha={alpha!r}, expected 0 to 1, or None", alpha=alpha)
    targets = targets.to(logits.dtype)
    if gamma == 0 and alpha is None:
        return binary_cross_entropy_with_logits(logits, targets, reduction=reduction)
    # Both terms are computed, because targets between 0 and 1 mix them.
    right, wrong = -logsigmoid(logits), -logsigmoid(-logits)
    hard_right, hard_wrong = torch.sigmoid(-logits) ** gamma, torch.sigmoid(logits) ** gamma
    up, down = (1.0, 1.0) if alpha is None else (alpha, 1.0 - alpha)
    losses = up * targets * hard_right * right + down * (1 - targets) * hard_wrong * wrong
    return _reduced(losses, torch.ones_like(losses), reduction)


def _check(gamma: float, reduction: str) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise TrainError(
            f"focal loss: found reduction={reduction!r}, expected 'mean', 'sum' or 'none'", found=reduction
        )
    if not gamma >= 0:
        raise TrainError(f"focal loss: found gamma={gamma!r}, expected 0 or more", gamma=gamma)


def _reduced(losses: Tensor, share: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / share.sum()

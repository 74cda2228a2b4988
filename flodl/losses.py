"""Losses that torch does not have."""

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
    """Return the focal loss ``-(1 - p) ** gamma * log(p)`` of single labels, ``p`` being the label's probability.

    Examples that are easy already weigh little, which helps where most are (Lin et al. 2017, equation 4). With
    ``gamma=0`` it is the cross entropy, to the bit.

    Args:
        logits: ``(batch, labels)``, or ``(batch, labels, ...)`` as ``cross_entropy`` takes them.
        labels: ``(batch,)`` or ``(batch, ...)``, integers.
        gamma: how little; from 0.
        weight: of each label, ``(labels,)``; the alpha of the paper.
        ignore_index: labels that count nothing.
        reduction: ``"mean"`` divides by the weight of what is counted, as ``cross_entropy`` does; ``"sum"``;
            ``"none"`` gives ``(batch, ...)``.

    Raises:
        TrainError: another reduction, or gamma below 0.
    """
    _check(gamma, reduction)
    if gamma == 0:
        return cross_entropy(logits, labels, weight, ignore_index=ignore_index, reduction=reduction)
    plain = cross_entropy(logits, labels, ignore_index=ignore_index, reduction="none")
    counted = labels != ignore_index
    share = counted.to(plain.dtype)
    if weight is not None:
        share = share * weight.to(plain.dtype)[labels.clamp(min=0) * counted]
    # 1 - p from the logarithm: exact where p is near 1, which is where it matters.
    losses = (-torch.expm1(-plain)).clamp(min=0) ** gamma * plain * share
    return _reduced(losses, share, reduction)


def binary_focal_loss(
    logits: Tensor, targets: Tensor, *, gamma: float = 2.0, alpha: float | None = None, reduction: str = "mean"
) -> Tensor:
    """Return the focal loss of labels that are each right or wrong by themselves.

    Args:
        logits: of any shape.
        targets: of the same shape, from 0 to 1.
        gamma: how little easy ones weigh; from 0. With 0 and no alpha it is ``binary_cross_entropy_with_logits``.
        alpha: weight of what is right; ``1 - alpha`` that of what is wrong.
        reduction: ``"mean"`` over all elements, ``"sum"`` or ``"none"``.

    Raises:
        TrainError: another reduction, or gamma below 0, or alpha outside of 0 to 1.
    """
    _check(gamma, reduction)
    if alpha is not None and not 0 <= alpha <= 1:
        raise TrainError(f"binary_focal_loss: found alpha={alpha!r}; expected 0 to 1, or None.", alpha=alpha)
    targets = targets.to(logits.dtype)
    if gamma == 0 and alpha is None:
        return binary_cross_entropy_with_logits(logits, targets, reduction=reduction)
    # Each side by itself, so that targets between 0 and 1 mix the two.
    right, wrong = -logsigmoid(logits), -logsigmoid(-logits)
    hard_right, hard_wrong = torch.sigmoid(-logits) ** gamma, torch.sigmoid(logits) ** gamma
    up, down = (1.0, 1.0) if alpha is None else (alpha, 1.0 - alpha)
    losses = up * targets * hard_right * right + down * (1 - targets) * hard_wrong * wrong
    return _reduced(losses, torch.ones_like(losses), reduction)


def _check(gamma: float, reduction: str) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise TrainError(
            f"focal loss: found reduction={reduction!r}; expected 'mean', 'sum' or 'none'.", found=reduction
        )
    if not gamma >= 0:
        raise TrainError(f"focal loss: found gamma={gamma!r}; expected a number from 0.", gamma=gamma)


def _reduced(losses: Tensor, share: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / share.sum()

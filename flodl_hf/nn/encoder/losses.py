"""Losses as transformers computes them for encoder heads, operation by operation."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from flodl_hf.errors import PredictError

IGNORED_LABEL = -100  # the label of tokens that do not count


def classification_loss(logits: Tensor, labels: Tensor, problem_type: str | None) -> Tensor:
    """Return the mean loss of whole-text labels.

    Args:
        logits: ``(batch, labels)``.
        labels: ids ``(batch,)``; 0/1 floats ``(batch, labels)`` for several labels a text; numbers
            ``(batch,)`` or ``(batch, labels)`` for regression.
        problem_type: as in the configuration; None infers it.

    Raises:
        PredictError: a label id is outside the classifier's rows.
    """
    num_labels = logits.shape[-1]
    labels = labels.to(logits.device)
    if problem_type is None and num_labels > 1:
        single = labels.dtype in (torch.long, torch.int)
        problem_type = "single_label_classification" if single else "multi_label_classification"
    if problem_type in (None, "regression"):
        return F.mse_loss(logits.squeeze(), labels.squeeze()) if num_labels == 1 else F.mse_loss(logits, labels)
    if problem_type == "multi_label_classification":
        return F.binary_cross_entropy_with_logits(logits, labels)
    return F.cross_entropy(logits.view(-1, num_labels), labels.view(-1))


def token_loss(logits: Tensor, labels: Tensor, *, upcast: bool = False) -> Tensor:
    """Return the mean cross-entropy over tokens with labels other than -100.

    Args:
        logits: ``(..., classes)``.
        labels: ``(...)``.
        upcast: compute in float32 (the masked-word loss does).
    """
    scores = logits.float() if upcast else logits
    return F.cross_entropy(
        scores.view(-1, scores.shape[-1]), labels.to(logits.device).view(-1), ignore_index=IGNORED_LABEL
    )


def span_loss(start_logits: Tensor, end_logits: Tensor, start_positions: Tensor, end_positions: Tensor) -> Tensor:
    """Return the mean of the losses of both ends; positions outside the row do not count.

    Args:
        start_logits: ``(batch, seq)``; ``end_logits`` alike.
        start_positions: ``(batch,)`` or ``(batch, 1)``; ``end_positions`` alike.
    """
    outside = start_logits.shape[1]

    def one(logits: Tensor, positions: Tensor) -> Tensor:
        flat = positions.squeeze(-1) if positions.dim() > 1 else positions
        return F.cross_entropy(logits, flat.to(logits.device).clamp(0, outside), ignore_index=outside)

    return (one(start_logits, start_positions) + one(end_logits, end_positions)) / 2


def check_labels(labels: Tensor, classes: int) -> None:
    """Raise if a label id has no class; torch's own message names neither.

    Raises:
        PredictError: an id is outside ``0..classes-1`` and is not -100.
    """
    if labels.dtype not in (torch.long, torch.int) or labels.numel() == 0:
        return
    low, high = int(labels.min()), int(labels.max())
    if high >= classes or (low < 0 and low != IGNORED_LABEL):
        raise PredictError(
            f"labels run from {low} to {high}; expected 0 to {classes - 1} (or {IGNORED_LABEL} for tokens that do "
            "not count). Check num_labels against the data.",
            low=low,
            high=high,
            classes=classes,
        )

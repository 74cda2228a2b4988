"""A loss of the user's in place of the task's: what it may return, and how that adds up.

A step with one is the same however its rows are cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flodl.errors import TrainError
from flodl.train import Loss
from flodl_hf.nn.encoder.losses import IGNORED_LABEL

__all__ = ["LossFunction", "own_loss"]

LossFunction = Callable[[Tensor, Tensor], Any]


def own_loss(call: LossFunction, scores: Tensor, labels: Tensor, rows: Any) -> Loss:
    """Return what a user's loss gives for some items, as a sum and a count.

    A value for each item is added up; a mean is taken to be over the items, those of whole-number labels that are
    not -100. Both, and a pair ``(sum, count)`` or a `Loss`, give the same step however rows are cut.

    Args:
        call: called with scores ``(items, classes)`` and labels ``(items,)``, or ``(items, ...)`` as the task has them.
        rows: how many items there are where labels do not tell.

    Raises:
        TrainError: it returns something else.
    """
    given = call(scores, labels)
    if isinstance(given, Loss):
        return given
    if isinstance(given, tuple) and len(given) == 2:
        return Loss(*given)
    kept = labels != IGNORED_LABEL if not labels.is_floating_point() and labels.dim() == 1 else None
    count = rows if kept is None else kept.sum()
    if isinstance(given, Tensor) and given.dim() == 0:
        return Loss.mean(given, count)
    if isinstance(given, Tensor) and given.shape[:1] == labels.shape[:1]:
        each = given if given.dim() == 1 else given.flatten(1).mean(1)
        return Loss((each if kept is None else torch.where(kept, each, 0.0)).sum(), count)
    shape = f" of shape {tuple(given.shape)}" if isinstance(given, Tensor) else ""
    raise TrainError(
        f"loss: found {type(given).__name__}{shape}; expected a mean, a value for each of the {len(labels)} items, a "
        "pair (sum, count), or a flodl.train.Loss",
        found=type(given).__name__,
    )

"""A loss function of the user: its return values, and how they are summed.

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
    """Return the loss of a user's function for some items, as a sum and a count.

    A value per item is summed; a mean is over the items, or over the items of whole-number labels that are
    not -100. Both, and a pair ``(sum, count)`` or a `Loss`, give the same step for any micro-batch size.

    Args:
        call: called with scores ``(items, classes)`` and labels ``(items,)``, or ``(items, ...)`` as the task has them.
        rows: number of items, if labels do not define it.

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

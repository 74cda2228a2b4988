"""Finds the number of rows that fit into the memory of a device, by trials on the heaviest batch before the first step.

Micro-batches change memory only, so the result of the run does not depend on the size that is found.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flodl.errors import TrainError
from flodl.train.feed import RowFeed, Share
from flodl.train.loss import as_loss, batch_len
from flodl.train.saving.state import load_random, random_state

if TYPE_CHECKING:
    from flodl.train.trainer_parts import TrainerParts


def heaviest_turn(trainer: TrainerParts) -> int:
    """Return the step of this epoch with the most padded tokens; the first one if lengths are unknown."""
    feed = trainer.feed
    if not isinstance(feed, RowFeed):
        return 0
    plan = feed.loader.plan(trainer.epoch_number)
    lengths = getattr(feed.loader.batches, "lengths", None)
    if lengths is None:
        lengths = getattr(feed.loader.data, "lengths", None)
    if lengths is None or not hasattr(lengths, "__len__") or len(lengths) != feed.loader.num_rows:
        lengths = None
    given = None if lengths is None else np.asarray(lengths)
    weights = [len(plan[i]) * (1 if given is None else int(given[plan[i]].max())) for i in range(len(plan))]
    return max(range(len(weights)), key=weights.__getitem__) // feed.accumulate if weights else 0


def fit_micro_batch(trainer: TrainerParts) -> int | None:
    """Divide batches into micro-batches that fit; return their number of rows, None if whole batches fit.

    All ranks find the same number. Random states, buffers and gradients are restored.

    Raises:
        TrainError: a single row does not fit, or the feed cannot divide batches.
    """
    feed: Any = trainer.feed
    if feed is None or not hasattr(feed, "micro_batch_size"):
        raise TrainError("micro_batch_size: found 'auto' without data that the trainer divides; expected a number.")
    turn, size = heaviest_turn(trainer), None
    while True:
        feed.micro_batch_size = size
        _cut_to(feed, size)
        rows, fits = try_turn(trainer, turn)
        table = trainer.ranks.table([float(rows), float(fits)])
        if all(row[1] for row in table):
            break
        if trainer.ranks.device.type == "cuda":
            torch.cuda.empty_cache()
        most = int(max(row[0] for row in table))
        if most <= trainer.min_rows:
            raise TrainError(
                f"micro_batch_size: {most} row(s) of the heaviest batch exceed the memory of {trainer.ranks.device}. "
                "Shorten rows, train in bf16, or checkpoint activations.",
                rows=most,
            )
        size = max(trainer.min_rows, most // 2)
    if size is not None:
        trainer.warn(f"micro_batch_size: {size} rows, because twice as many exceed the memory")
    return size


def _cut_to(feed: Any, size: int | None) -> None:
    """Pass the size to a collate function that depends on it."""
    data = getattr(getattr(feed, "loader", None), "data", None)
    cut: Callable[[int | None], Any] | None = getattr(getattr(data, "collate", None), "cut_to", None)
    if cut is not None:
        data.collate = cut(size)  # type: ignore[union-attr]


def try_turn(trainer: TrainerParts, turn: int) -> tuple[int, bool]:
    """Run forward and backward of a step without an update; return rows of its largest micro-batch, and if it fits."""
    model, step, device = trainer.model, trainer.step_, trainer.ranks.device
    assert trainer.feed is not None
    assert trainer.train_step is not None
    largest, fits = 0, True
    with ExitStack() as stack:
        tensors, rest = random_state(device)
        stack.callback(load_random, device, tensors, rest)
        for buffer in model.buffers():
            stack.callback(buffer.copy_, buffer.clone())
        stack.callback(model.zero_grad, set_to_none=True)
        several = step.share_gradients
        ratios = (1.0,) * trainer.ranks.world if several else (1.0,)
        share = Share(trainer.ranks.rank if several else 0, ratios, trainer.min_rows)
        try:
            held = _reserve(trainer)
            for _, batches in trainer.feed.work(trainer.epoch_number, [turn], share):
                for batch in batches:
                    largest = max(largest, batch_len(batch))
                    with step.precision.context():
                        loss = as_loss(trainer.train_step(model, batch), batch_len(batch))
                    loss.as_mean().backward()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            del held
        except torch.OutOfMemoryError:
            fits = False
    return largest, fits


def _reserve(trainer: TrainerParts) -> list[torch.Tensor]:
    """Return memory of the size that the optimiser allocates at its first step, reserved during the trial."""
    if trainer.optimizer.state or trainer.ranks.device.type != "cuda":
        return []
    copies = 1 if isinstance(trainer.optimizer, torch.optim.SGD) else 2
    learned = [p for p in trainer.model.parameters() if p.requires_grad]
    return [torch.empty_like(p) for p in learned for _ in range(copies)]

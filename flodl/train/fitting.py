"""How many rows fit into a device's memory at once: tried on the heaviest batch before the first step.

Micro-batches change nothing but memory, so a run whose micro-batches were found here is the run that was asked for.
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

__all__ = ["fit_micro_batch", "heaviest_turn", "try_turn"]


def heaviest_turn(trainer: TrainerParts) -> int:
    """Return the turn of this epoch with the most tokens, padded, where lengths are known; else the first."""
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
    """Have batches cut into micro-batches that fit; return the rows of one, None where whole batches fit.

    All ranks come to the same number. Random states, buffers and gradients are put back to what they were.

    Raises:
        TrainError: a single row does not fit, or the feed cannot cut batches.
    """
    feed: Any = trainer.feed
    if feed is None or not hasattr(feed, "micro_batch_size"):
        raise TrainError("micro_batch_size: 'auto' needs data that the trainer cuts; found none. Give a number.")
    turn, size = heaviest_turn(trainer), None
    while True:
        feed.micro_batch_size = size
        _cut_to(feed, size)
        rows, fits = try_turn(trainer, turn)
        table = trainer.ranks.table([float(rows), float(fits)])
        if all(row[1] for row in table):
            break
        if trainer.ranks.device.type == "cuda":
            torch.cuda.empty_cache()  # what the trial held is free since it returned
        most = int(max(row[0] for row in table))
        if most <= trainer.min_rows:
            raise TrainError(
                f"micro_batch_size: {most} row(s) of the heaviest batch do not fit into the memory of "
                f"{trainer.ranks.device}. Shorten rows, train in bf16, or checkpoint activations.",
                rows=most,
            )
        size = max(trainer.min_rows, most // 2)
    if size is not None:
        trainer.warn(f"micro_batch_size: {size} rows go through the model at once, since twice as many do not fit")
    return size


def _cut_to(feed: Any, size: int | None) -> None:
    """Tell whoever makes batches how large they are, if that matters to it."""
    data = getattr(getattr(feed, "loader", None), "data", None)
    cut: Callable[[int | None], Any] | None = getattr(getattr(data, "collate", None), "cut_to", None)
    if cut is not None:
        data.collate = cut(size)  # type: ignore[union-attr]


def try_turn(trainer: TrainerParts, turn: int) -> tuple[int, bool]:
    """Send a turn forward and backward without a step; return rows of its largest micro-batch, and if it fits."""
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
    """Return memory as large as the optimiser will take at its first step, held during the trial."""
    if trainer.optimizer.state or trainer.ranks.device.type != "cuda":
        return []
    copies = 1 if isinstance(trainer.optimizer, torch.optim.SGD) else 2
    learned = [p for p in trainer.model.parameters() if p.requires_grad]
    return [torch.empty_like(p) for p in learned for _ in range(copies)]

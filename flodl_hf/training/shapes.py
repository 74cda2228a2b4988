"""Shapes to which the batches of a run are padded, chosen for its data.

A training step is recorded once for each shape, so steps are fast when batches meet few shapes, and little is wasted
when these fit closely. Rows and the order of the first epochs are known before training, so the sizes follow the
totals that batches of this run, or the shares that its ranks take of them, really have. Equal data and options give
equal sizes, whatever the number of epochs. How a batch is filled up is in `flodl_hf.training.rows`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flodl.distributed.shares import ranges, split
from flodl_hf.nn.layout.buckets import Bucket, round_up

__all__ = ["Shapes", "choose_shapes", "choose_widths"]

MOST_SHAPES = 6
MOST_RECORDINGS = 8  # of a step with several micro-batches, each of which may have any of the shapes
ENOUGH = 0.03  # filling, of all tokens, that no further shape is worth
ROUGHLY = 0.1  # filling from which a further shape has to save more than its recording costs
RECORDING = 1 << 16  # tokens that recorded steps compute in the time that recording another shape takes
RUN = 10  # number of epochs in which a shape must save more than it costs; a run may be resumed with other epochs
ENOUGH_SLOTS = 0.5  # an empty slot costs a few blocks of a kernel that finish immediately
MOST_SEEN = 512  # batches looked at,
MOST_EPOCHS = 16  # and epochs at most
TOKENS, SLOTS, WIDTHS = 16, 8, 8  # sizes are multiples of these

STEPS = 4  # of other batches: sizes per power of two; the rest of an epoch is such a batch
LEAST_TOKENS = 128
LEAST_TEXTS = 16


@dataclass(frozen=True)
class Shapes:
    """Sizes to fill batches up to.

    Attributes:
        longest: most tokens of any row of the data.
        tokens: sizes in tokens, ascending.
        texts: for each of them the numbers of slots for texts, ascending.
    """

    longest: int = 0
    tokens: tuple[int, ...] = ()
    texts: tuple[tuple[int, ...], ...] = ()

    def bucket(self, lengths: NDArray[Any], least: int = 0) -> Bucket:
        """Return the shape for rows of these lengths: a chosen one, or a rounded one if none is close.

        Args:
            lengths: tokens of each row.
            least: fewest tokens of the shape.
        """
        total, longest = max(int(lengths.sum()), least), max(self.longest, int(lengths.max()))
        for tokens, texts in zip(self.tokens, self.texts, strict=True):
            if total <= tokens:
                if 2 * total < self.tokens[0]:
                    break  # the share of a rank, or the rest of an epoch
                need = _slots(len(lengths), tokens - int(lengths.sum()), longest)
                return Bucket(tokens, next((n for n in texts if n >= need), _round_up(need)), longest)
        tokens = round_up(total, STEPS, LEAST_TOKENS)
        return Bucket(tokens, _round_up(_slots(len(lengths), tokens - int(lengths.sum()), longest)), longest)


def _slots(rows: int, missing: int, longest: int) -> int:
    return max(LEAST_TEXTS, rows + max(1, -(-missing // longest)))


def _round_up(texts: int) -> int:
    step = 1 << (texts - 1).bit_length() - 2
    return -(-texts // step) * step


def choose_shapes(
    lengths: NDArray[Any],
    batches: Any,
    longest: int,
    *,
    micro_batch_size: int | None = None,
    accumulate: int = 1,
    ranks: int = 1,
    texts_per_row: int = 1,
) -> Shapes:
    """Return shapes for the batches of a run.

    Args:
        lengths: tokens of each row of the data.
        batches: which rows form a batch, a `flodl.data.batches.BatchSource`.
        longest: upper bound of the lengths.
        micro_batch_size: rows that go through the model together at most.
        accumulate: batches of a step.
        ranks: among how many the rows of a batch are shared out.
        texts_per_row: how many texts a row of the data has, each of which is a row of the model.
    """
    passes = _passes(batches, micro_batch_size, ranks)
    totals = [int(lengths[part].sum()) for _, part in passes]
    counts = [len(part) * texts_per_row for _, part in passes]
    most = _most(passes, accumulate, ranks)
    sizes = _sizes(np.maximum(totals, LEAST_TOKENS), most, ENOUGH, TOKENS, _worth(lengths))
    slots: list[list[int]] = [[] for _ in sizes]
    for total, count, at in zip(totals, counts, np.searchsorted(sizes, totals).tolist(), strict=True):
        if 2 * total >= sizes[0]:
            slots[at].append(_slots(count, sizes[at] - total, longest))
    texts = [
        tuple(_sizes(np.asarray(found or [LEAST_TEXTS]), most // len(sizes), ENOUGH_SLOTS, SLOTS)) for found in slots
    ]
    return Shapes(longest, tuple(sizes), tuple(texts))


def choose_widths(
    lengths: NDArray[Any],
    longest: NDArray[Any],
    batches: Any,
    *,
    micro_batch_size: int | None = None,
    accumulate: int = 1,
) -> tuple[int, ...]:
    """Return widths for padded batches of a run, ascending.

    Args:
        lengths: tokens of each row of the data.
        longest: of its longest text.
        batches: which rows form a batch.
        micro_batch_size: rows that go through the model together at most.
        accumulate: batches of a step.
    """
    passes = _passes(batches, micro_batch_size)
    widths = [int(longest[part].max()) for _, part in passes]
    found = _sizes(np.asarray(widths), _most(passes, accumulate), ENOUGH, WIDTHS, _worth(lengths))
    return tuple(min(width, int(longest.max())) for width in found)


def _most(passes: list[tuple[int, NDArray[Any]]], accumulate: int, ranks: int = 1) -> int:
    """Return the most shapes of a pass, of which a step has some."""
    whole = passes[-1][0] + 1
    parts = max(1, round(len(passes) / (whole * ranks))) * accumulate
    return max(1, min(MOST_SHAPES, int(MOST_RECORDINGS ** (1 / parts) + 1e-9)))


def _passes(batches: Any, micro_batch_size: int | None = None, ranks: int = 1) -> list[tuple[int, NDArray[Any]]]:
    """Return the rows that go through the model together, behind the number of their batch, of the first epochs."""
    found: list[tuple[int, NDArray[Any]]] = []
    whole = 0
    for epoch in range(MOST_EPOCHS):
        for rows in list(batches.plan(epoch))[: MOST_SEEN - whole]:
            for begin, end in ranges(split(len(rows), [1.0] * ranks)):
                size = micro_batch_size or max(1, end - begin)
                found += [(whole, rows[start : min(start + size, end)]) for start in range(begin, end, size)]
            whole += 1
        if whole >= MOST_SEEN:
            break
    return found


def _worth(lengths: NDArray[Any]) -> float:
    """Return the least share of all tokens that a shape has to save of filling."""
    return RECORDING / (RUN * max(1, int(lengths.sum())))


def _sizes(totals: NDArray[Any], most: int, enough: float, grain: int, worth: float = 0.0) -> list[int]:
    """Return at most so many sizes that fill these totals up the least.

    Fewer where they fill up less than enough, or roughly enough and another size saves less than it is worth. Found by
    dynamic programming over the totals, rounded up to a grain.
    """
    grain = max(grain, 1 << max(8, int(totals.max()).bit_length()) - 8)
    values, weights = np.unique(-(-totals // grain) * grain, return_counts=True)
    below = np.concatenate([[0], np.cumsum(weights)])
    cost = np.full(len(values) + 1, np.inf)  # of filling up the first i values with the sizes so far
    cost[0] = 0
    choices: list[NDArray[Any]] = []
    spent = float((values * weights).sum())
    for _ in range(most):
        # one more size, the last of the first j values, contains the values i to j
        table = cost[:-1, None] + (below[None, 1:] - below[:-1, None]) * values[None, :].astype(float)
        table = np.where(np.arange(len(values))[:, None] <= np.arange(len(values))[None, :], table, np.inf)
        before, cost = cost[-1], np.concatenate([[np.inf], table.min(0)])
        if before <= (1 + ROUGHLY) * spent and before - cost[-1] < worth * spent:
            break
        choices.append(table.argmin(0))
        if cost[-1] <= (1 + enough) * spent:
            break
    found: list[int] = []
    end = len(values)
    for choice in reversed(choices):
        found.append(int(values[end - 1]))
        end = int(choice[end - 1])
        if end == 0:
            break
    return sorted(found)

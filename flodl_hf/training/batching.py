"""Batches of a run: the default batch size, which rows form a batch, their layout in memory, and the number of steps.

A new head does not converge in a few dozen steps at the default rate, whatever the batch size. The comparison
is in `docs/training-measured.md`.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from flodl.data import FixedBatches, LengthGroupedBatches, RandomSampler, TokenBudgetBatches
from flodl.files import read_regular
from flodl.train.saving.reading import list_checkpoints
from flodl_hf.training.evaluation import Own
from flodl_hf.training.options import BATCH_SIZE, Options
from flodl_hf.training.rows import CollateRows, EncodedRows, Laid, choose_shapes, choose_widths
from flodl_hf.training.task import Task, name_of
from flodl_hf.training.vectors.task import EmbeddingTask

SIZES = (BATCH_SIZE, 16, 8, 4)
ENOUGH = {
    "sequence_classification": 200,
    "multiple_choice": 200,
    "token_classification": 1200,
    "question_answering": 1200,
}
"""Number of optimiser steps from which the batch size stays 32. In these tasks, rows are independent.
Other tasks compare the rows of a batch, or train on words, of which a row has many, and their batch size is constant.
Heads for tokens need more steps than heads for whole texts."""

NEW_HEADS = (*ENOUGH, "rank", "next_sentence")
FEW_STEPS = 100
"""Optimiser steps that hardly teach a new head anything."""


def steps_of(rows: int, size: int, options: Options) -> int:
    """Return the optimiser steps of a run with batches of ``size`` rows."""
    batches = -(-rows // size)
    steps = options.epochs * -(-batches // options.accumulate)
    return steps if options.max_steps is None else min(steps, options.max_steps)


def usual_batch_size(rows: int, enough: int, options: Options, ranks: int = 1) -> int:
    """Return the largest of 32, 16, 8 and 4 with enough steps, else the smallest.

    If ``max_steps`` ends the run, this number of steps is sufficient.

    Args:
        rows: training rows, windows of long texts counted one by one.
        enough: how many steps are.
        options: the choices of the run.
        ranks: among how many a batch is shared out; each gets a row at least.
    """
    wanted = min(enough, options.max_steps or enough)
    sizes = [size for size in SIZES if size >= ranks] or [BATCH_SIZE]
    return next((size for size in sizes if steps_of(rows, size, options) >= wanted), sizes[-1])


def settle_batch_size(options: Options, task: Task, rows: EncodedRows) -> tuple[Options, str | None]:
    """Return the options with a batch size, and a note with the reason; None if it was given or is 32.

    Args:
        options: the choices of the run.
        task: the task of the run.
        rows: training data as tokens.
    """
    if options.batch_size is not None:
        return options, None
    size = BATCH_SIZE
    if (enough := ENOUGH.get(name_of(task))) is not None and options.tokens_per_batch is None:
        size = usual_batch_size(len(rows), enough, options, options.ranks)
    if size == BATCH_SIZE:
        return replace(options, batch_size=size), None
    few, many = (steps_of(len(rows), one, options) for one in (BATCH_SIZE, size))
    why = f"{len(rows):,} rows: {many:,} steps in place of {few:,}; batch_size={BATCH_SIZE} to overrule"
    return _of_size(options, size), f"batch_size: {size} ({why})"


def few_steps(steps: int, options: Options) -> str | None:
    """Return a note if a run has too few steps to train a new head; else None.

    Args:
        steps: of the whole run.
        options: the choices of the run, with task and batch size settled.
    """
    if options.task not in NEW_HEADS or options.max_steps is not None or steps >= FEW_STEPS:
        return None
    ways = ["more epochs"]
    if options.tokens_per_batch is not None:
        ways.append(f"a smaller tokens_per_batch (now {options.tokens_per_batch})")
    elif options.rows_in_batch > SIZES[-1]:
        ways.append(f"a smaller batch_size (now {options.rows_in_batch})")
    else:
        ways.append("more rows")
    counted = f"{steps:,} optimiser step{'s are' if steps != 1 else ' is'}"
    return f"{counted} few for a new head: use {' or '.join(ways)}"


def as_before(options: Options, folder: Path | None) -> Options:
    """Return the options with the batch size of the run that is resumed, unless one is given.

    Args:
        options: the choices of the run.
        folder: where the checkpoints of the run are.
    """
    if folder is None or not options.resume or options.batch_size is not None:
        return options
    for path in reversed(list_checkpoints(folder)):
        try:
            found = json.loads(read_regular(path / "run.json"))["recipe"]["data.order.batch_size"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue  # the resume reports the damage
        if isinstance(found, int) and found > 0:
            return _of_size(options, found)
    return options


def _of_size(options: Options, size: int) -> Options:
    """Return the options with a default batch size; evaluation batches keep 32 rows."""
    at_once = options.eval_batch_size
    if at_once is None and size < BATCH_SIZE and not isinstance(options.micro_batch_size, int):
        at_once = BATCH_SIZE
    return replace(options, batch_size=size, eval_batch_size=at_once)


LONG_EPOCH = 256
"""Number of batches from which rows of similar length are grouped by default. Grouping saves time in long runs;
in short runs, single batches of one length have a larger effect (`docs/training-measured.md`)."""


def batch_rows(
    task: Task, options: Options, rows: Any, *, own: Own, pad_id: int, masking: Any, max_tokens: int | None
) -> tuple[Any, CollateRows, str | None, tuple[str, ...]]:
    """Return the batches of a task, the function that makes one, and notes for the user.

    The third value is why steps on CUDA are not recorded; None where they are.

    Args:
        task: the task of the run.
        options: the choices of the run.
        rows: training data as tokens.
        own: functions of the user.
        pad_id: the padding token.
        masking: replaces tokens of a batch before it is learned from; None replaces nothing.
        max_tokens: the most that the model takes.
    """
    vectors, on_cuda = task if isinstance(task, EmbeddingTask) else None, _on_cuda(options)
    if task.kind == "spans" and not options.masks_padding:
        options = replace(options, layout="padded")  # packed rows have no padding to include in the loss
    layout, unrecorded = _layout(options), None if vectors is None else vectors.unrecorded
    if own.loss is not None and vectors is None:
        unrecorded = "a loss of your own does not know of what batches are filled up with, so they are not"
    if layout == "bucketed" and (options.cache_tokens is not None or (unrecorded and vectors is None)):
        layout = "packed"  # parts of a batch have other shapes
    batches = _batches(options, rows, layout) if vectors is None else vectors.batches(rows)
    collate = CollateRows(pad_id, layout, masking, noise=bool(options.neftune))
    laid = task.laid(rows)
    if layout == "bucketed":
        collate = _shaped(collate, options, laid, batches, max_tokens)
    # A loss that includes padding depends on the padded length of a batch, so that length is kept.
    elif layout == "padded" and unrecorded is None and on_cuda and (task.kind != "spans" or options.masks_padding):
        cut: Any = {"micro_batch_size": micro_batch_rows(options), "accumulate": options.accumulate}
        collate = replace(collate, widths=choose_widths(laid.lengths, laid.widest, batches, **cut))
    notes = () if vectors is None else batches.notes()
    if unrecorded and on_cuda:
        notes += (f"steps are launched one operation at a time, with the same numbers, because {unrecorded}",)
    return batches, collate, unrecorded, notes


def _layout(options: Options) -> Literal["padded", "packed", "bucketed"]:
    """Return the layout of rows in training: on CUDA, packed rows are padded to a few shapes."""
    cuda = _on_cuda(options)
    if options.layout == "auto":
        return "bucketed" if cuda and options.precision in ("bf16", "fp16") else "padded"
    if options.layout == "packed":
        return "bucketed" if cuda else "packed"
    return "padded"


def evaluation_layout(options: Options) -> Literal["padded", "packed"]:
    """Return the layout of rows in evaluation: that of training, without padding to shapes."""
    return "padded" if _layout(options) == "padded" else "packed"


def _on_cuda(options: Options) -> bool:
    """Return whether training is on CUDA devices."""
    devices = options.places
    named = [devices] if isinstance(devices, str) else devices if isinstance(devices, (list, tuple)) else []
    return torch.cuda.is_available() and not any(str(name).startswith("cpu") for name in named)


def _shaped(collate: CollateRows, options: Options, laid: Laid, batches: Any, most: int | None) -> CollateRows:
    """Return the collate function with the shapes that its batches are filled up to."""
    ranks = options.ranks if options.policy in (None, "sync") else 1  # others take whole batches
    widest = int(laid.widest.max())
    # Rounded up so that other data have the same; no more than the model takes.
    longest = max(widest, min(-(-widest // 16) * 16, most or widest))
    shapes = partial(
        choose_shapes, laid.lengths, batches, longest,
        accumulate=options.accumulate, texts_per_row=laid.texts, ranks=ranks,
    )  # fmt: skip
    collate = replace(collate, shapes=shapes(micro_batch_size=micro_batch_rows(options)))
    return replace(collate, shapes_for=shapes) if options.micro_batch_size == "auto" else collate


def micro_batch_rows(options: Options) -> int | None:
    """Return the micro-batch size if it is a number."""
    return None if isinstance(options.micro_batch_size, str) else options.micro_batch_size


def _batches(options: Options, rows: EncodedRows, layout: str) -> Any:
    sampler, lengths = RandomSampler(len(rows), options.seed), rows.lengths
    if options.tokens_per_batch is not None:
        return TokenBudgetBatches(
            sampler,
            lengths,
            options.tokens_per_batch,
            layout="padded" if layout == "padded" else "packed",
            seed=options.seed,
        )
    grouped = options.group_by_length
    if grouped is None:
        grouped = layout == "padded" and len(rows) >= LONG_EPOCH * options.rows_in_batch
    elif grouped and layout != "padded":
        warnings.warn(
            "group_by_length: rows are packed, without padding that grouping could save; they are mixed freely",
            UserWarning,
            stacklevel=5,
        )
    if grouped and layout == "padded":
        return LengthGroupedBatches(sampler, lengths, options.rows_in_batch, seed=options.seed)
    return FixedBatches(sampler, options.rows_in_batch)


def count_steps(options: Options, batches: Any) -> int:
    """Return the optimiser steps of a whole run."""
    if isinstance(batches, (FixedBatches, LengthGroupedBatches)):  # as many in each epoch, whatever its order
        steps = options.epochs * -(-len(batches.plan(0)) // options.accumulate)
        return steps if options.max_steps is None else min(steps, options.max_steps)
    return epoch_ends(options, batches, options.accumulate)[-1]


def epoch_ends(options: Options, batches: Any, accumulate: int) -> list[int]:
    """Return the number of optimiser steps after each epoch, until ``max_steps``, with 0 in front."""
    ends = [0]
    for epoch in range(options.epochs):
        ends.append(ends[-1] + -(-len(batches.plan(epoch)) // accumulate))
        if options.max_steps is not None and ends[-1] >= options.max_steps:
            return [*ends[:-1], options.max_steps]
    return ends

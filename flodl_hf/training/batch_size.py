"""The default batch size: 32, or less if a run would otherwise have too few steps.

A new head does not converge in a few dozen steps at the default rate, whatever the batch size. The comparison
is in `docs/training-measured.md`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from flodl.files import read_regular
from flodl.train.saving.reading import list_checkpoints
from flodl_hf.training.options import BATCH_SIZE, Options
from flodl_hf.training.rows import EncodedRows
from flodl_hf.training.task import Task, name_of

__all__ = ["as_before", "few_steps", "settle_batch_size", "usual_batch_size"]

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
FEW = 100
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
    if options.task not in NEW_HEADS or options.max_steps is not None or steps >= FEW:
        return None
    ways = ["more epochs"]
    if options.tokens_per_batch is not None:
        ways.append(f"a smaller tokens_per_batch (now {options.tokens_per_batch})")
    elif options.rows_in_batch > SIZES[-1]:
        ways.append(f"a smaller batch_size (now {options.rows_in_batch})")
    else:
        ways.append("more rows")
    counted = f"{steps:,} optimiser step{'s are' if steps != 1 else ' is'}"
    return f"{counted} few for a head that is new: {' or '.join(ways)} would make more of them"


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

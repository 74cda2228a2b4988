"""Batches of a run: which rows form a batch, their layout in memory, and the number of steps."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from flodl.data import FixedBatches, LengthGroupedBatches, RandomSampler, TokenBudgetBatches
from flodl_hf.training.options import Options
from flodl_hf.training.rows import CollateRows, EncodedRows
from flodl_hf.training.shapes import choose_shapes, choose_widths
from flodl_hf.training.task import Task
from flodl_hf.training.user_code import Own
from flodl_hf.training.vectors.rows import Laid
from flodl_hf.training.vectors.task import EmbeddingTask

__all__ = ["Batching", "batch_rows", "count_steps", "evaluation_layout", "micro_batch_rows"]

LONG_EPOCH = 256
"""Number of batches from which rows of similar length are grouped by default. Grouping saves time in long runs;
in short runs, single batches of one length have a larger effect (`docs/training-measured.md`)."""


@dataclass(frozen=True)
class Batching:
    """Batches, collate function and layout of a run.

    Attributes:
        batches: which rows form each batch.
        collate: makes a batch of some rows.
        layout: the layout of rows in memory.
        unrecorded: why steps on CUDA are not recorded; None where they are.
        notes: notes for the user.
    """

    batches: Any
    collate: CollateRows
    layout: Literal["padded", "packed", "bucketed"]
    unrecorded: str | None
    notes: tuple[str, ...] = ()


def batch_rows(
    task: Task, options: Options, rows: Any, *, own: Own, pad_id: int, masking: Any, max_tokens: int | None
) -> Batching:
    """Return the batches of a task.

    Args:
        task: the task of the run.
        options: the choices of the run.
        rows: training data as tokens.
        own: functions of the user.
        pad_id: the padding token.
        masking: replaces tokens of a batch before it is learned from; None replaces nothing.
        max_tokens: the most that the model takes.
    """
    vectors = task if isinstance(task, EmbeddingTask) else None
    if task.kind == "spans" and not options.masks_padding:
        options = replace(options, layout="padded")  # packed rows have no padding to include in the loss
    layout, unrecorded = _batch_layout(options, own, vectors)
    batches = _batches(options, rows, layout) if vectors is None else vectors.batches(rows)
    collate = CollateRows(pad_id, layout, masking, noise=bool(options.neftune))
    laid = _laid(rows, vectors)
    if layout == "bucketed":
        collate = _shaped(collate, options, laid, batches, max_tokens)
    elif layout == "padded" and unrecorded is None and _has_widths(options, task):
        cut: Any = {"micro_batch_size": micro_batch_rows(options), "accumulate": options.accumulate}
        collate = replace(collate, widths=choose_widths(laid.lengths, laid.widest, batches, **cut))
    notes = () if vectors is None else batches.notes()
    if unrecorded and _on_cuda(options):
        notes += (f"steps are launched one operation at a time, with the same numbers, because {unrecorded}",)
    return Batching(batches, collate, layout, unrecorded, notes)


def _laid(rows: Any, vectors: EmbeddingTask | None) -> Laid:
    """Return how many tokens examples have: of one row, or of several (vectors, and lists of candidates)."""
    if vectors is not None:
        return vectors.laid(rows)
    return rows.laid if hasattr(rows, "laid") else Laid(rows.lengths, rows.lengths)


def _batch_layout(options: Options, own: Own, vectors: EmbeddingTask | None) -> tuple[Any, str | None]:
    """Return the layout of batches, and why steps are not captured; None if they are."""
    layout = _layout(options)
    unrecorded = None if vectors is None else vectors.unrecorded
    if own.loss is not None and vectors is None:
        unrecorded = "a loss of your own does not know of what batches are filled up with, so they are not"
    if layout == "bucketed" and (options.cache_tokens is not None or (unrecorded and vectors is None)):
        layout = "packed"  # parts of a batch have other shapes
    return layout, unrecorded


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


def _has_widths(options: Options, task: Task) -> bool:
    """Return whether padded batches have a few fixed widths, for captured steps."""
    # A loss that includes padding depends on the padded length of a batch, so that length is kept.
    return _on_cuda(options) and (task.kind != "spans" or options.masks_padding)


def _on_cuda(options: Options) -> bool:
    """Return whether training is on CUDA devices."""
    devices = options.places
    named = [devices] if isinstance(devices, str) else devices if isinstance(devices, (list, tuple)) else []
    return torch.cuda.is_available() and not any(str(name).startswith("cpu") for name in named)


def _shaped(collate: CollateRows, options: Options, laid: Laid, batches: Any, most: int | None) -> CollateRows:
    """Return the collate function with the shapes that its batches are filled up to."""
    ranks = options.ranks if options.policy in (None, "sync") else 1  # others take whole batches
    longest = _most(int(laid.widest.max()), most)
    shapes = partial(
        choose_shapes, laid.lengths, batches, longest,
        accumulate=options.accumulate, texts_per_row=laid.texts, ranks=ranks,
    )  # fmt: skip
    collate = replace(collate, shapes=shapes(micro_batch_size=micro_batch_rows(options)))
    return replace(collate, shapes_for=shapes) if options.micro_batch_size == "auto" else collate


def micro_batch_rows(options: Options) -> int | None:
    """Return the micro-batch size if it is a number."""
    return None if isinstance(options.micro_batch_size, str) else options.micro_batch_size


def _most(longest: int, bound: int | None) -> int:
    """Return the most tokens of a row, rounded up so that other data have the same; no more than the model takes."""
    return max(longest, min(-(-longest // 16) * 16, bound or longest))


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
    steps = 0
    for epoch in range(options.epochs):
        steps += -(-len(batches.plan(epoch)) // options.accumulate)
        if options.max_steps is not None and steps >= options.max_steps:
            return options.max_steps
    return steps

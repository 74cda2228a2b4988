"""Runs on a copy of the model: required resources (`dry_run`) and a learning rate (`find_lr`)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from flodl.train import RateSearch
from flodl.train.trials import Rehearsal
from flodl_hf.checkpoints.saving.publish import check_target
from flodl_hf.inference.graph_model import GraphModel
from flodl_hf.training.evaluation import Own
from flodl_hf.training.job import Job, plan_job, read_arguments
from flodl_hf.training.options import FinetuneArguments
from flodl_hf.training.start import cast_stored
from flodl_hf.training.training import make_builder, settings_of_torch

if TYPE_CHECKING:
    from flodl_hf.models.encoder_model import EncoderModel


@dataclass(frozen=True)
class DryRun:
    """Steps, rows and resources of a fine-tune.

    Attributes:
        task: the head's name.
        labels: label names; None where the head has none.
        rows: training rows, windows of long texts counted one by one.
        tokens: tokens of all of them.
        longest: tokens of the longest.
        eval_rows: number of evaluation rows of each set.
        batch_size: rows in a batch; None where tokens are counted.
        steps: optimiser steps of the whole run.
        needs: time and memory; its ``steps`` are the steps of the first epoch times the epochs.
        metrics: metrics of some evaluation rows.
    """

    task: str
    labels: tuple[str, ...] | None
    rows: int
    tokens: int
    longest: int
    eval_rows: dict[str, int]
    batch_size: int | None
    steps: int
    needs: Rehearsal
    metrics: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        labels = "" if self.labels is None else f", {len(self.labels)} labels: {', '.join(self.labels[:8])}"
        held = ", ".join(f"{rows:,} rows{name and f' of {name}'}" for name, rows in self.eval_rows.items())
        lines = [
            f"{self.task}{labels[:100]}",
            f"{self.rows:,} training rows, {self.tokens:,} tokens, the longest {self.longest}",
            *([] if self.batch_size is None else [f"batches of {self.batch_size} rows"]),
            f"evaluation: {held}" if held else "no evaluation data",
            str(self.needs),
        ]
        return "\n".join(lines)


def dry_run(model: str | Path | EncoderModel, **arguments: Unpack[FinetuneArguments]) -> DryRun:
    """Return the steps and resources of ``finetune`` with the same arguments, after a short trial.

    All data is read and tokenized; a copy of the model runs the largest batch and three steps, evaluates some
    rows and is written to a temporary folder. Nothing else is written, and no model changes.
    ``out`` is checked and not written; ``on_event``, ``progress``, ``monitor`` and ``callbacks`` are not used.

    Raises:
        Exception: errors that `flodl_hf.training.finetune` would raise up to this point.
    """
    with ExitStack() as stack:
        job = _plan_trial(stack, "dry_run", model, arguments)
        needs = make_builder(job, lambda event: None, stack).dry_run()
        mode, figures = job.model.training, {}
        if job.evaluation is not None:  # of a few rows
            figures = {name: float(value) for name, value in job.evaluation(job.model.eval(), units=1).items()}
        job.model.train(mode)
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flodl-hf-"))) / "model"
        job.model.save_pretrained(place)
    return DryRun(
        job.task.head,
        job.task.labels,
        len(job.rows),
        int(job.rows.lengths.sum()),
        int(job.rows.lengths.max()),
        {} if job.evaluation is None else {k: len(one.prepared.rows) for k, one in job.evaluation.sets.items()},
        None if job.options.tokens_per_batch is not None else job.options.batch_size,
        job.steps,
        needs,
        figures,
    )


def _plan_trial(stack: ExitStack, caller: str, model: Any, arguments: Mapping[str, Any]) -> Job:
    """Return the job of `finetune` with the same arguments; ``stack`` restores a model in memory."""
    options = dict(arguments)
    train, held_out, out, loss, metrics = (
        options.pop(name, None) for name in ("train", "eval", "out", "loss", "metrics")
    )
    overwrite, callbacks = options.pop("overwrite", False), options.pop("callbacks", ())
    for name in ("on_event", "progress", "monitor"):
        options.pop(name, None)
    opened: Any = model
    if isinstance(opened, GraphModel):
        stack.callback(setattr, opened, "sentence_recipe", opened.sentence_recipe)
    chosen, loss, problems = read_arguments(caller, model, train, options, loss=loss)
    if out is not None and not problems.messages:
        check_target(Path(os.path.abspath(out)), overwrite)
    own = Own(loss, metrics, tuple(callbacks))
    job = plan_job(model, train, held_out, chosen, caller=caller, own=own, problems=problems)
    cast_stored(job.model)  # a trial runs on one device, without shards
    stack.enter_context(settings_of_torch())
    if not job.named and job.options.adapter is not None:
        stack.callback(job.model.remove_adapter)
    stack.callback(job.task.conclude, job.model)  # another run may attach another module to the model
    return job


def find_lr(
    model: str | Path | EncoderModel,
    *,
    low: float = 1e-7,
    high: float = 1.0,
    steps: int = 100,
    **arguments: Unpack[FinetuneArguments],
) -> RateSearch:
    """Train a copy of ``model`` at rising rates; ``suggestion`` of the result is a value for ``lr``.

    It stops where the loss is four times the lowest. Nothing is written and no model is changed.

    Args:
        low: the first rate.
        high: the last rate.
        steps: optimiser steps at most; rates rise by the same factor at each.
        **arguments: as for `flodl_hf.training.finetune`; rows that the run would split off for ``eval`` are not used
            for training. ``out`` is checked and not written; ``on_event``, ``progress``, ``monitor``, ``metrics`` and
            ``callbacks`` are not used.

    Raises:
        ConfigError, DataError: as in `finetune`; rates that do not rise.
        TrainError: the loss is not finite from the start.
    """
    with ExitStack() as stack:
        job = _plan_trial(stack, "find_lr", model, arguments)
        return make_builder(job, lambda event: None, stack).find_lr(low, high, steps)

"""Before a run: what it will need (`dry_run`) and at which rate it learns (`find_lr`), on a copy of the model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from flodl.train import Callback, RateSearch, Rehearsal
from flodl_hf.inference.graph_model.model import GraphModel
from flodl_hf.training.arguments import read_arguments
from flodl_hf.training.evaluation import Evaluation
from flodl_hf.training.factory import cast_stored
from flodl_hf.training.job import Job, plan_job
from flodl_hf.training.keywords import FinetuneWords
from flodl_hf.training.run import check_free
from flodl_hf.training.training import make_builder, settings_of_torch
from flodl_hf.training.user_code import Own

if TYPE_CHECKING:
    from flodl_hf.models.adapters.settings import Settings
    from flodl_hf.models.encoder_model import EncoderModel

__all__ = ["DryRun", "dry_run", "find_lr"]


@dataclass(frozen=True)
class DryRun:
    """What a fine-tune will do and need.

    Attributes:
        task: the head's name.
        labels: label names; None where the head has none.
        rows: training rows, windows of long texts counted one by one.
        tokens: tokens of all of them.
        longest: tokens of the longest.
        eval_rows: held-out rows by set.
        batch_size: rows in a batch; None where tokens are counted.
        steps: optimiser steps of the whole run.
        needs: time and memory; its ``steps`` are those of the first epoch times epochs.
        metrics: figures that evaluation gave for some held-out rows.
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
            f"held out: {held}" if held else "nothing is held out",
            str(self.needs),
        ]
        return "\n".join(lines)


def dry_run(
    model: str | Path | EncoderModel,
    *,
    train: Any = None,
    eval: Any = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    on_event: Callable[[Any], Any] | None = None,
    progress: bool | None = None,
    monitor: Any = None,
    loss: Callable[..., Any] | str | None = None,
    metrics: Any = None,
    callbacks: Sequence[Callback] = (),
    adapter: Settings | None = None,
    **options: Unpack[FinetuneWords],
) -> DryRun:
    """Return what ``finetune`` with the same arguments will do and need, after trying a little of all of it.

    The data is read and tokenized whole; a copy of the model does the heaviest batch and three steps, evaluates some
    held-out rows and is written to a folder that is removed again. Nothing else is written, no model is changed.
    All arguments of ``finetune`` are accepted. ``out`` is checked and not written; ``on_event``, ``progress``,
    ``monitor`` and ``callbacks`` are not used.

    Raises:
        Exception: whatever `flodl_hf.training.finetune` would raise by then.
    """
    with ExitStack() as stack:
        stack.enter_context(_vectors_kept(model))
        job = _planned("dry_run", model, train, eval, out, overwrite, loss, adapter, options, metrics, callbacks)
        cast_stored(job.model)  # tried here, on one device
        stack.enter_context(settings_of_torch())
        if not job.named and job.options.adapter is not None:
            stack.callback(job.model.remove_adapter)
        stack.callback(job.conclude, job.model)  # another run may put something else beside the model
        needs = make_builder(job, lambda event: None, stack).set(eval_start=False).dry_run()
        figures = _judge_some(job)
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flodl-hf-"))) / "model"
        job.model.save_pretrained(place)
    sets = _sets(job)
    return DryRun(
        job.task.head,
        job.task.labels,
        len(job.rows),
        int(job.rows.lengths.sum()),
        int(job.rows.lengths.max()),
        {name: len(one.prepared.rows) for name, one in sets.items()},
        None if job.options.tokens_per_batch is not None else job.options.batch_size,
        job.steps,
        needs,
        figures,
    )


def _planned(
    where: str, model: Any, train: Any, held_out: Any, out: Any, overwrite: bool, loss: Any, adapter: Any,
    given: Mapping[str, Any], metrics: Any, callbacks: Sequence[Callback],
) -> Job:  # fmt: skip
    """Return the job of `finetune` with the same arguments."""
    options, loss, problems = read_arguments(where, model, train, given, loss=loss, adapter=adapter)
    if out is not None and not problems.found:
        check_free(Path(out), overwrite)
    own = Own(loss, metrics, tuple(callbacks))
    return plan_job(model, train, held_out, options, where=where, own=own, problems=problems)


@contextmanager
def _vectors_kept(model: str | Path | EncoderModel) -> Iterator[None]:
    """Have a model in memory make vectors afterwards as it did before, whatever the options say of them."""
    if not isinstance(model, GraphModel):
        yield
        return
    before = model.sentence_recipe
    try:
        yield
    finally:
        model.sentence_recipe = before


def _sets(job: Job) -> dict[str, Evaluation]:
    return {} if job.evaluation is None else dict(job.evaluation.sets)


def _judge_some(job: Job) -> dict[str, float]:
    """Return figures of a few held-out rows of each set, to see that judging works."""
    figures: dict[str, float] = {}
    mode = job.model.training
    job.model.eval()
    try:
        for name, one in _sets(job).items():
            first = one.units()[0]
            losses, scorer = one._judge(job.model, first)
            found = one._figures(losses, scorer)
            figures |= {f"{name}/{figure}" if name else figure: float(np.float64(v)) for figure, v in found.items()}
    finally:
        job.model.train(mode)
    return figures


def find_lr(
    model: str | Path | EncoderModel,
    *,
    train: Any = None,
    eval: Any = None,
    low: float = 1e-7,
    high: float = 1.0,
    steps: int = 100,
    out: str | Path | None = None,
    overwrite: bool = False,
    on_event: Callable[[Any], Any] | None = None,
    progress: bool | None = None,
    monitor: Any = None,
    loss: Callable[..., Any] | str | None = None,
    metrics: Any = None,
    callbacks: Sequence[Callback] = (),
    adapter: Settings | None = None,
    **options: Unpack[FinetuneWords],
) -> RateSearch:
    """Return what training a copy of ``model`` at rising rates finds; its ``suggestion`` is one for ``lr``.

    It stops where the loss is four times the lowest. Nothing is written and no model is changed.

    Args:
        train: data, as for `flodl_hf.training.finetune`.
        eval: held-out data, likewise; nothing is judged, and rows that the run would hold out are not learned from.
        steps: optimiser steps at most; rates rise by the same factor at each.
        out: checked and not written; ``on_event``, ``progress``, ``monitor``, ``metrics`` and ``callbacks`` are not
            used. The other arguments are those of `flodl_hf.training.finetune`.

    Raises:
        ConfigError, DataError: as in `finetune`; rates that do not rise.
        TrainError: the loss is not finite from the start.
    """
    with ExitStack() as stack:
        stack.enter_context(_vectors_kept(model))
        job = _planned("find_lr", model, train, eval, out, overwrite, loss, adapter, options, metrics, callbacks)
        cast_stored(job.model)  # tried here, on one device
        stack.enter_context(settings_of_torch())
        if not job.named and job.options.adapter is not None:
            stack.callback(job.model.remove_adapter)
        stack.callback(job.conclude, job.model)
        return make_builder(job, lambda event: None, stack).find_lr(low, high, steps)

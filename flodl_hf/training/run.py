"""``finetune``: data and a model in, a trained model and its folder out.

It combines the task (`task_choice` and the module of the task), the training (`flodl.train`), the folder
(`flodl_hf.checkpoints.saving`) and the metadata files (`card`). All arguments are checked before
anything is computed.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from flodl.distributed.group import is_first_rank, under_torchrun
from flodl.errors import TrainError, TrainInterrupted, visible
from flodl.fork_server import prepare_ranks
from flodl.memory import available_memory
from flodl.progress import in_words, is_wanted
from flodl.train import Callback, EpochMetrics, EvalDone, RunDone, RunStarted, StepDone, Tracker, Warned
from flodl.train.events import Past
from flodl.train.saving.reading import list_checkpoints
from flodl.train.trackers import make_tracker
from flodl_hf.checkpoints.saving.publish import GENERATOR, check_space, check_target
from flodl_hf.errors import ExportError
from flodl_hf.models.adapters.write import contents_of
from flodl_hf.models.saving import write_contents
from flodl_hf.training.batching import as_before
from flodl_hf.training.data import is_several
from flodl_hf.training.evaluation import EvalPredictions, Own, collect_predictions
from flodl_hf.training.job import Job, Timing, plan_job, read_arguments
from flodl_hf.training.observation import monitor_of_job
from flodl_hf.training.options import FinetuneWords, Options
from flodl_hf.training.report.figures import tune_thresholds
from flodl_hf.training.result import FinetuneResult, figures_in, job_name, metadata_files
from flodl_hf.training.start import cast_stored
from flodl_hf.training.task import name_of
from flodl_hf.training.training import (
    CHECKPOINTS,
    Best,
    BestPredictions,
    best_row,
    settings_of_torch,
    take_best,
    train_job,
    trains_here,
)

if TYPE_CHECKING:
    from flodl_hf.models.encoder_model import EncoderModel


_LOG = logging.getLogger("flodl_hf.training")
_LOG.addHandler(logging.NullHandler())  # the lines are also printed, so logging prints them only where configured


def finetune(
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
    **options: Unpack[FinetuneWords],
) -> FinetuneResult:
    """Return ``model`` trained on ``train``, written to ``out`` as a Hugging Face folder if that is given.

    ::

        result = finetune("bert-base-uncased", train="train.csv", eval="dev.csv", out="my-classifier")
        result.metrics["accuracy"]
        result.model.predict(["I love this"])

    The columns of the data determine the task: a text and a label, words and tags, a text and spans, a question,
    a context and answers, or a text alone (masked words). Labels and their kind are inferred.

    Args:
        model: a folder or Hub name, which gets a new head where its own does not fit, or a model.
        train: a file (CSV, TSV, JSON lines, JSON, Parquet, Arrow, CoNLL, SQuAD, text), a list of dicts, a dict of
            columns, a Hugging Face data set, or a data frame; for vectors also a mapping of names to several of these.
        eval: evaluation data of the same kind, evaluated after each epoch; the best model is kept. A mapping of names
            to several sets, of which the first selects the best model; or a share (0.2) or number of the training rows.
        out: folder to write; contains the model, its tokenizer, ``README.md`` (the model card), ``recipe.yaml``
            (which reproduces the run) and ``training.json`` (every figure).
        overwrite: replace an existing model in the folder.
        on_event: called with the events of training (`flodl.train.events`) as they come.
        progress: print the task with its columns and labels, a line for each epoch and evaluation, all warnings and the
            progress of the run to standard error. None does so except where the verbosity level is quiet
            (`flodl.verbosity`); False prints nothing.
        monitor: True or a port shows the run on a page of this machine; or a `flodl.monitor.Monitor`. Its record is
            kept in ``<out>.logs`` (or ``log_dir``), with the page as one file when the run is over.
        loss: ``loss(scores, labels)`` in place of the task's loss; see `flodl_hf.training.step.own_loss`. Of
            vectors its name, one of `flodl_hf.training.losses`, or ``loss(vectors, labels)`` of the whole batch.
        metrics: ``metrics(predictions, truth)`` returns a mapping of metrics; or a mapping of names to functions.
            Predictions and truth are arrays ``(examples, ...)`` of scores and labels, lists of tags, or answers and
            lists of those accepted.
        callbacks: hooks into the training loop, see `flodl.train.Callback`. `flodl_hf.training.observation` has
            ``Watch`` (records values inside the model) and ``Rules`` (freezes, changes rates or stops on trends).
        **options: fields of `flodl_hf.training.Options`; the defaults are the defaults of transformers, whose names
            are accepted too (``learning_rate``, ``num_train_epochs``; all in
            `flodl_hf.training.training_arguments.TAKEN`). With ``adapter=`` or ``lora=`` the adapter is trained
            instead of all weights, and ``out`` contains the adapter with its head, readable by peft.

    Raises:
        ConfigError: an option does not exist or does not fit; all are listed.
        DataError: the data cannot be read or understood.
        TrainError: the training failed, or checkpoints of another run are in the way.
        ExportError: ``out`` is in use, or cannot be written.
        HubError, CheckpointError, TokenizerError: the model cannot be opened.
        TrainInterrupted: Ctrl-C ended the run after its state was saved. Its ``result`` contains the model as trained
            so far, and the losses and figures; with ``out`` the same call with ``resume=True`` continues the run.

    Torch's and Python's global random generators are seeded by this call. Under torchrun every rank calls it; the
    first one writes, and its result has the best model. With ``shard`` the others' results have none (``holds_model``).
    """
    chosen, loss, problems = read_arguments("finetune", model, train, options, loss=loss)
    if progress is None and (options.get("disable_tqdm") or is_wanted()):
        progress = not options.get("disable_tqdm")
    target = None if out is None else Path(out)
    kept = None if target is None else target.with_name(target.name + CHECKPOINTS)  # checkpoints for a resume
    trackers, is_interrupted = list[Tracker](), False
    if not problems.messages:
        kept = kept if chosen.checkpoints is None else Path(chosen.checkpoints)
        is_interrupted = kept is not None and os.path.isdir(kept) and bool(list_checkpoints(kept))
        chosen = as_before(chosen, kept)
        beside = Path("runs") if target is None else target.with_name(target.name + ".logs")
        for name in chosen.trackers if is_first_rank() else ():
            trackers.append(make_tracker(name, chosen.log_dir or beside, _settings(chosen)))
        if target is not None:
            if chosen.resume and os.path.isfile(target / "training.json") and not overwrite:
                raise ExportError(
                    f"{target}: found a finished run, expected an interrupted one. To train for more epochs, give this "
                    "folder as the model and another one as out=...; to replace the model, give overwrite=True.",
                    path=str(target),
                )
            check_target(Path(os.path.abspath(target)), overwrite)
        if is_interrupted and not chosen.resume:
            raise TrainError(
                f"finetune: {kept} contains checkpoints of an unfinished run. Resume it with resume=True, or remove "
                "the folder.",
                folder=str(kept),
            )
        if chosen.ranks > 1 and not under_torchrun():
            prepare_ranks("flodl_hf.training.run")
    tell = partial(_say, shown=bool(progress)) if is_first_rank() else None
    job = plan_job(model, train, eval, chosen, own=Own(loss, metrics, tuple(callbacks)), tell=tell, problems=problems)
    if tell is not None and chosen.resume and kept is not None and not is_interrupted:
        tell(f"resume: {kept} contains no checkpoint; the run starts from the beginning")
    if target is not None and is_first_rank():
        check_space(target, _bytes_to_write(job.model))
    for tracker in trackers:
        tracker.config.update(_settings(job.options))  # with values inferred from the data
    recipe = {"model": _named(model), "train": _named(train), "eval": _named(eval), **_recipe(job)}
    notes = _Notes(on_event, job.unrecorded, job.timing)
    try:
        return _train(
            job, notes, target, kept, recipe, progress=progress, trackers=trackers, monitor=monitor, overwrite=overwrite
        )  # fmt: skip
    except (TrainInterrupted, SystemExit) as stop:
        _stopped(stop, job, notes, kept, recipe)
        raise
    except TrainError as fault:
        if "allow_change=" not in fault.message:
            raise
        raise TrainError(fault.message.replace("allow_change=", "resume="), **fault.details) from None


def _stopped(stop: BaseException, job: Job, notes: _Notes, folder: Path | None, recipe: dict[str, Any]) -> None:
    """Report how to resume a run that a signal ended, and attach its partial result to the exception."""
    if isinstance(stop, SystemExit) and stop.code != 128 + signal.SIGTERM:
        return
    if is_first_rank():
        how = "run the same command with resume=True to continue" if folder else "there is no out= to resume from"
        print(in_words(f"stopped after step {notes.steps}; {how}"), file=sys.stderr, flush=True)
    if isinstance(stop, TrainInterrupted):
        stop.folder = None if folder is None else str(folder)
        if stop.trained is None:  # the ranks had not begun
            return
        stop.result = FinetuneResult(
            job.model.eval() if stop.trained.whole else None, None, name_of(job.task), {}, notes.history, notes.losses,
            notes.steps, notes.steps, notes.seconds, recipe, list(notes.past.changes), policy=notes.policy,
        )  # fmt: skip


def _bytes_to_write(model: EncoderModel) -> int:
    size = sum(plan.nbytes for plan in contents_of(model).plans.values())
    return size if model.dtype_in_shards is None else size * model.dtype_in_shards.itemsize // model.dtype.itemsize


def _train(
    job: Job,
    notes: _Notes,
    target: Path | None,
    folder: Path | None,
    recipe: dict[str, Any],
    *,
    progress: bool | None,
    trackers: Sequence[Tracker],
    monitor: Any,
    overwrite: bool,
) -> FinetuneResult:
    """Train a planned job, load and evaluate its best weights, and write the model; temporary settings are undone."""
    options = job.options
    with ExitStack() as stack:
        stack.enter_context(settings_of_torch())
        stack.callback(job.task.conclude, job.model)
        for tracker in trackers:
            stack.callback(tracker.end)
        metric = job.metric if options.keep_best else None  # of the best weights
        best = None
        fits_twice = 2 * _bytes_to_write(job.model) <= (available_memory() or sys.maxsize)
        # Under torchrun every rank keeps the best weights, since there may be no folder that all of them can read.
        in_memory = trains_here(options) or not options.shard
        if metric is not None and in_memory and (under_torchrun() or fits_twice):
            best = Best(metric, None if job.evaluation is None else next(iter(job.evaluation.sets.values())).seen)
        if folder is None and metric is not None and best is None and not under_torchrun():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flodl-hf-")))
        if folder is None and metric is not None and best is None:
            job.notes.append("without out= or checkpoints= the model of the last step is kept, not the best one")
        watched = None
        if monitor is not None and monitor is not False:
            watched = monitor_of_job(monitor, job, recipe, target, is_first=is_first_rank())
        began = time.perf_counter()
        trained = train_job(job, notes, stack, folder, best, progress=progress, trackers=trackers, monitor=watched)
        seconds = notes.past.seconds + time.perf_counter() - began
        # Weights that were in shards are put together on the first rank; others have the model that they began with.
        model = job.model if trained is None else trained
        best_step, metrics = notes.steps, figures_in(notes.history[-1]) if notes.history else {}
        # Other ranks do not read the folder: the first may remove it at any moment.
        read = folder if is_first_rank() else None
        if metric is not None and (read is not None or best is not None):
            new = [row for row in notes.history if row["step"] > notes.began_at] if best is not None else []
            at_hand = best_row(metric, new) or {"step": notes.steps}
            best_step, metrics = take_best(metric, read, model, notes.history, at_hand["step"]) or (best_step, metrics)
        model.eval()
        predictions = None
        wanted = options.tune_thresholds or (options.report and target is not None)
        if wanted and job.evaluation is not None and is_first_rank():
            cast_stored(model)
            predictions = collect_predictions(model, job.evaluation, metrics, notes.seen)
        generator = job.task.conclude(model)
    tuned = None
    if options.tune_thresholds and predictions is not None:
        tuned = tune_thresholds(predictions, tuple(model.config.labels))
    if tuned is not None or model.config.label_thresholds is not None:
        # Thresholds of the starting model were chosen for other weights.
        model.config = model.config.changed(label_thresholds={} if tuned is None else tuned.thresholds)
    model.training_recipe = recipe
    written = Path(os.path.abspath(target)) if target is not None and is_first_rank() else None
    result = FinetuneResult(
        trained, written, name_of(job.task), metrics, notes.history, notes.losses, notes.steps, best_step, seconds,
        recipe, list(notes.past.changes), tuned, notes.recorded, notes.summed,
        None if trained is None else generator, notes.policy, job.timing,
    )  # fmt: skip
    job.timing.mark("train")
    if written is not None:
        files = metadata_files(job, result)
        if options.report:
            from flodl_hf.training.report.page import report_page

            files["report.html"] = report_page(job_name(job), job, result, predictions).encode()
        if result.generator is None:
            model.save_pretrained(written, overwrite=overwrite, extra_files=files)
        else:
            both = {"": contents_of(model), GENERATOR: contents_of(result.generator)}
            write_contents(written, both, overwrite=overwrite, extra_files=files)
        if folder is not None and not options.keep_checkpoints and options.checkpoints is None:
            shutil.rmtree(folder, ignore_errors=True)
        job.timing.mark("save")
    return result


class _Notes:
    """Collects the values of the result, and forwards events."""

    def __init__(self, on_event: Callable[[Any], Any] | None, unrecorded: str | None, timing: Timing) -> None:
        self.on_event, self.unrecorded, self.timing = on_event, unrecorded, timing
        self.losses: list[float] = []
        self.history: list[dict[str, Any]] = []
        self.steps = 0
        self.past = Past()
        self.policy: dict[str, str] = {}
        self.recorded: Any = None
        self.summed: Any = None
        self.seen: EvalPredictions | None = None  # of the best evaluation
        self.began_at = 0  # the step from which the run resumed
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Time of the training so far, that before a resume included."""
        return self.past.seconds + time.perf_counter() - self._began

    def __call__(self, event: Any) -> None:
        if isinstance(event, RunStarted):  # repeated if ranks were restarted
            self.policy = {"name": event.policy, "reason": event.policy_reason}
            self.past, self.losses = event.past, list(event.past.losses)
            self.history = [dict(row) for row in event.past.evaluations]
            self.steps = self.began_at = event.step
        elif isinstance(event, BestPredictions):
            self.seen = event.seen
        elif isinstance(event, StepDone):
            self.timing.mark("train" if self.losses else "first step")
            self.losses.append(event.loss)
            self.steps = event.step
        elif isinstance(event, Warned):
            _LOG.warning(event.message)
        elif isinstance(event, EpochMetrics):
            _LOG.info("epoch %d: loss %.4f", event.epoch + 1, event.loss)
        elif isinstance(event, EvalDone):
            self.timing.mark("evaluate")
            _LOG.info("step %d: %s", event.step, dict(event.metrics))
            details = {"details": event.details} if event.details else {}
            self.history.append({"step": event.step, "epoch": event.epoch, **event.metrics, **details})
        elif isinstance(event, RunDone):
            self.steps, self.recorded, self.summed = event.step, event.recorded, event.summed
            if self.recorded is not None and self.unrecorded is not None:
                self.recorded = replace(self.recorded, reason=self.unrecorded)
        if self.on_event is not None:
            self.on_event(event)


# ---- checkpoints and the folder -------------------------------------------------------------------------


def _say(text: str, *, shown: bool) -> None:
    """Log a line about the run, and print it where progress is shown."""
    _LOG.info(text)
    if shown:
        print(visible(in_words(text)), file=sys.stderr, flush=True)


def _settings(options: Options) -> dict[str, Any]:
    """Return the options with a value."""
    return {name: value for name, value in options.to_dict().items() if value not in (None, (), [], {})}


def _named(source: Any) -> Any:
    """Return the name of data or a model in a recipe: paths and shares; None for objects in memory."""
    if is_several(source):
        named = {name: _named(part) for name, part in source.items()}
        return named if None not in named.values() else None
    if isinstance(source, (int, float)):
        return source
    return os.fspath(source) if isinstance(source, (str, os.PathLike)) else None


def _recipe(job: Job) -> dict[str, Any]:
    """Return the options that reproduce the run, without paths of this machine."""
    left_out = ("checkpoints", "keep_checkpoints", "resume", "local_files_only")
    left_out += ("trackers", "log_dir", "profile", "report")
    values = {k: v for k, v in job.options.to_dict().items() if k not in left_out and v is not None}
    values["schedule"] = str(values["schedule"])  # of an object, which a recipe cannot contain, its text
    commit = getattr(job.model.source, "commit", None)
    if commit:
        values["revision"] = commit
    return values

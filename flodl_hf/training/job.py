"""Plan of a run: task, rows, batches, loss and evaluation, checked and tokenized.

Options, data and model determine the task, rows, batches, loss and evaluation. Nothing is trained here, so
errors are raised before the expensive part.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from flodl.errors import ConfigError, DataError
from flodl.train.schedule import OneCycle, Plateau
from flodl.train.warmed_up import (
    CosineFloor,
    CosineRestarts,
    InverseSqrt,
    Polynomial,
    WarmedUp,
    WarmupStableDecay,
)
from flodl_hf.checkpoints.folders import lacks_tokenizer
from flodl_hf.families.schema.tasks import find_task
from flodl_hf.inference.graph_model import GraphModel
from flodl_hf.models.transformers_methods import frozen_parameters
from flodl_hf.training.batching import (
    batch_rows,
    count_steps,
    few_steps,
    micro_batch_rows,
    settle_batch_size,
)
from flodl_hf.training.data import Tables, list_multilabel_columns, read_tables
from flodl_hf.training.evaluation import EvalPredictions, Evaluation, Evaluations, Own
from flodl_hf.training.options import Options, read_options
from flodl_hf.training.ranking import note_undefined_metrics
from flodl_hf.training.rows import CollateRows, EncodedRows
from flodl_hf.training.start import ModelFactory, known_of, open_start, settle_head
from flodl_hf.training.step import Objective
from flodl_hf.training.task import (
    ONE_ROW,
    Known,
    LengthLimits,
    Prepared,
    Problems,
    Task,
    label_faults,
    name_of,
    task_faults,
)
from flodl_hf.training.task_choice import (
    LABELLED_HEADS,
    choose_task,
    doubtful_labels,
    float_classes,
    task_line,
    unused_texts,
)
from flodl_hf.training.vectors.step import VectorObjective

if TYPE_CHECKING:
    from flodl_hf.models.encoder_model import EncoderModel


def read_arguments(
    caller: str, model: Any, train: Any, arguments: Mapping[str, Any], *, loss: Callable[..., Any] | str | None
) -> tuple[Options, Callable[..., Any] | None, Problems]:
    """Return the options of a call, its loss if that is a function, and the problems of all arguments.

    Args:
        caller: the function that was called, for messages.
        model: the model to start from.
        train: the training data.
        arguments: the options.
        loss: the name of a loss, or a function.
    """
    problems, values = Problems(caller), dict(arguments)
    if isinstance(loss, str):
        values["vector_loss"], loss = loss, None
    if not isinstance(model, (str, os.PathLike, GraphModel)):
        expected = "expected a folder, a Hub name, or a model that flodl_hf.load returned"
        if isinstance(model, nn.Module):
            expected += ". Write models of other libraries with save_pretrained; flodl.train.Trainer trains any module"
        problems.add([f"model: found {type(model).__module__}.{type(model).__qualname__}; {expected}"])
    if train is None and arguments.get("train_dataset") is None:
        problems.add(["train: found None; expected a file or rows to learn from"])
    options, faults = read_options(values)
    problems.add(faults)
    if not any(fault.startswith("schedule") for fault in faults):
        try:  # the range of the curve
            make_schedule(
                options.schedule, options.lr or 1.0, options.warmup, 1_000_000, lower_is_better=True,
                options=options.schedule_options,
            )  # fmt: skip
        except ConfigError as fault:
            problems.add([f"schedule_options: {fault.message}"])
    return options, loss, problems


class Timing(dict[str, float]):
    """Seconds by phase: read, load, tokenise, first step, train, evaluate, save."""

    def __init__(self) -> None:
        super().__init__()
        self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        """Add the time since the last mark to a phase."""
        now = time.perf_counter()
        self[phase] = self.get(phase, 0.0) + now - self._last
        self._last = now


@dataclass
class Job:
    """The plan of a run, created by `plan_job`.

    Attributes:
        options: the options, with inferred values.
        task: the task.
        tables: the rows as read.
        model: the model, on the CPU, with its new head.
        factory: opens the same model again, for ranks in other processes; None for a model in memory.
        rows: training data as tokens.
        batches: which rows form each batch.
        collate: makes a batch.
        objective: the loss.
        evaluation: the evaluation; None without evaluation data.
        metric: the metric that selects the best model, with ``-`` if lower is better; None without evaluation.
        steps: optimiser steps of the whole run.
        schedule: the learning rates.
        name: name of the starting model.
        own: functions of the user.
        named: whether the model was given as a name or folder.
        notes: notes for the user.
        unrecorded: why steps on CUDA are not recorded; None where they are.
        timing: seconds of each phase.
    """

    options: Options
    task: Task
    tables: Tables
    model: EncoderModel
    factory: ModelFactory | None
    rows: EncodedRows
    batches: Any
    collate: CollateRows
    objective: Objective | VectorObjective
    evaluation: Evaluations | None
    metric: str | None
    steps: int
    schedule: Any
    name: str
    own: Own
    named: bool
    notes: list[str]
    unrecorded: str | None
    timing: Timing


def plan_job(
    model: str | Path | EncoderModel,
    train: Any,
    held_out: Any,
    options: Options,
    *,
    caller: str = "finetune",
    own: Own | None = None,
    tell: Callable[[str], Any] | None = None,
    problems: Problems | None = None,
) -> Job:
    """Return the checked and tokenized plan of a run; nothing is trained.

    Args:
        model: where training begins.
        train: training data.
        held_out: evaluation data.
        options: the choices of the run.
        caller: name of the called function, for messages.
        own: functions of the user.
        tell: called with a line that describes the task, before the model is opened, and with a warning if there
            are few steps.
        problems: problems of the arguments, raised together with the problems of the plan.

    Raises:
        DataError, ConfigError, CheckpointError, HubError, TokenizerError: as in `finetune`.
    """
    own, problems, timing, tell = own or Own(), problems or Problems(caller), Timing(), tell or (lambda text: None)
    tables: Any = None
    task: Any = None
    opened: Any = None
    factory: ModelFactory | None = None
    known, before = Known(), options
    notes: list[str] = []
    is_named = isinstance(model, (str, os.PathLike))
    no_tokenizer = ConfigError(
        f"{caller}: the model has no tokenizer; add its tokenizer files to the folder, or set model.tokenizer",
        problems=["tokenizer"],
    )
    if train is None or not (is_named or isinstance(model, GraphModel)):
        problems.check()
    with problems:
        if lacks_tokenizer(model):
            raise no_tokenizer
        known = known_of(model, options)
    with problems:
        tables, options = list_multilabel_columns(read_tables(train, held_out, options), options)
        task, options = choose_task(tables, options, known, own.loss)
    timing.mark("read")
    problems.add(_plan_faults(task, tables, before, own))
    if task is None or tables is None:
        problems.check()
    assert task is not None
    assert tables is not None
    if not problems.messages:
        tell(task_line(task, tables.train, before.task))
    # A model that would have to be fetched is not opened for further problems of a call that fails anyway.
    opens = not problems.messages or not is_named or os.path.isdir(model)
    if opens and not any(problem.startswith("adapter:") for problem in problems.messages):
        with problems:
            if is_named:
                options, notes = settle_head(known, task, options)
            torch.manual_seed(options.seed)  # a new head is drawn at random
            opened, factory = open_start(model, task, options)
            with problems:
                frozen_parameters(opened, options.freeze)
            if opened.tokenizer is None:
                raise no_tokenizer
            task.masking(opened.tokenizer, options)
            notes += task.settle(opened)
    if problems.messages and opened is model and options.adapter is not None:
        opened.remove_adapter()
    problems.check()
    assert opened is not None
    timing.mark("load")
    tokenizer: Any = opened.tokenizer
    limits = row_limits(task, opened, options)
    prepared = {"train": task.prepare(tables.train, tokenizer, limits, training=True)}
    rows = prepared["train"].rows
    options, chosen = settle_batch_size(options, task, rows)
    if chosen is not None:
        tell(chosen)
    batches, collate, unrecorded, further = batch_rows(
        task, options, rows, own=own, pad_id=tokenizer.pad_token_id or 0, masking=task.masking(tokenizer, options),
        max_tokens=opened.max_tokens,
    )  # fmt: skip
    notes += further
    objective = task.objective(options, _weights(options, task, rows), own.loss)
    collate = task.collate(collate, rows, batches, options.accumulate)
    parts = prepare_held_out(task, tables.evals, tokenizer, limits)
    timing.mark("tokenise")
    prepared |= {f"eval {name}".strip(): part for name, part in parts.items()}
    layout = "packed" if collate.layout == "bucketed" else collate.layout
    judging = replace(collate, layout=layout, noise=False, widths=())
    # Contents of the report about the first set.
    kept = task.kind != "words" and (options.report or options.tune_thresholds)
    evaluation = make_evaluation(task, options, own, parts, judging, stored=[*parts][: int(kept)])
    metric = None
    if evaluation is not None:
        first = next(iter(evaluation.sets.values()))
        metric = evaluation.check_metric(options.metric or task.main_metric_of(first.prepared))
    if tables.parts and before.task is None and known.head in LABELLED_HEADS:
        notes.append(f"several tables train embeddings; to train the head, give one table and task={known.head!r}")
    notes += float_classes(task, tables.train, before.problem_type)
    notes += doubtful_labels(task, rows if tables.is_shared else None) if task.headed else []
    if not options.columns and not tables.parts and task.kind != "spans":
        notes += unused_texts(task, tables.train)
    if options.max_length and (limits.max_tokens or options.max_length) < options.max_length:
        notes.append(
            f"max_length: found {options.max_length}, and the model takes {limits.max_tokens} tokens; it is reduced to "
            f"{limits.max_tokens}"
        )
    notes += note_long_texts(prepared, limits, task, options) + note_undefined_metrics(parts, task)
    steps = count_steps(options, batches)
    schedule = make_schedule(
        options.schedule, options.lr, options.warmup, steps,
        # Without evaluation data, the plateau schedule uses the training loss.
        lower_is_better=metric is None or metric.startswith("-"), metric=(metric or "loss").lstrip("-"),
        options=options.schedule_options,
    )  # fmt: skip
    options = replace(options, task=name_of(task), labels=task.labels, problem_type=task.problem_type)
    is_new = known.head != task.head or bool(opened.untrained) or options.new_head
    if is_new and (few := few_steps(steps, options)) is not None:
        tell(few)
    name = str(getattr(opened.source, "name", None) or "a model in memory")
    return Job(
        options, task, tables, opened, factory, rows, batches, collate, objective, evaluation, metric, steps, schedule,
        name, own, is_named, notes, unrecorded, timing,
    )  # fmt: skip


def prepare_held_out(
    task: Task, sets: Mapping[str, list[dict[str, Any]]], tokenizer: Any, limits: LengthLimits
) -> dict[str, Prepared]:
    """Return each evaluation set as rows of tokens.

    Raises:
        DataError: examples do not fit the task; the message names the set.
    """
    prepared: dict[str, Prepared] = {}
    for name, examples in sets.items():
        try:
            prepared[name] = task.prepare(examples, tokenizer, limits, training=False)
        except DataError as fault:
            # Tasks do not know which set they read.
            message = f"{f'eval {name}'.strip()}: {fault.message.removeprefix('finetune: ').removeprefix('eval: ')}"
            raise DataError(message, **fault.details) from None
    return prepared


def make_evaluation(
    task: Task, options: Options, own: Own, parts: Mapping[str, Prepared], collate: CollateRows, stored: Collection[str]
) -> Evaluations | None:
    """Return the evaluation of all evaluation sets; None if there are none.

    Args:
        task: the task of the run.
        options: the options of the run.
        own: functions of the user.
        parts: each set as rows.
        collate: makes batches.
        stored: names of sets whose predictions and gold labels are stored.
    """
    size = options.eval_batch_size or micro_batch_rows(options) or options.rows_in_batch
    sets = {
        name: Evaluation(
            task, part, task.collate_held_out(collate, part.rows), task.of_held_out(part, options, own.loss), size,
            options.precision, options.seed, own.metrics, EvalPredictions(name) if name in stored else None,
        )
        for name, part in parts.items()
    }  # fmt: skip
    return Evaluations(sets) if sets else None


def row_limits(task: Task, opened: EncoderModel, options: Options) -> LengthLimits:
    """Return the length limits of rows."""
    tokenizer: Any = opened.tokenizer
    usual = 384 if task.kind == "spans" else None
    bounds = [n for n in (opened.max_tokens, options.max_length or usual, *task.bounds(opened)) if n]
    types = opened.config.uses_token_types and tokenizer.settings.type_ids
    return LengthLimits(min(bounds, default=None), options.stride, types, options.long_texts == "windows")


def note_long_texts(prepared: Mapping[str, Prepared], limits: LengthLimits, task: Task, options: Options) -> list[str]:
    """Return notes about texts that are longer than a row.

    Raises:
        DataError: there are such texts, and ``long_texts`` is "error".
    """
    counts = [
        f"{part.cut:,} of {len(part.rows):,} texts{name and f' of {name}'}"
        for name, part in prepared.items()
        if part.cut
    ]
    if not counts:
        return []
    if options.long_texts == "error":
        raise DataError(
            f"long_texts='error': found {' and '.join(counts)} longer than {limits.max_tokens} tokens, expected none. "
            "Pass long_texts='windows' or 'truncate'."
        )
    advice = "a greater max_length keeps more" if name_of(task) in ONE_ROW else "long_texts='windows' reads them whole"
    return [f"{' and '.join(counts)} are longer than {limits.max_tokens} tokens and are truncated; {advice}"]


def _weights(options: Options, task: Task, rows: EncodedRows) -> tuple[float, ...] | None:
    """Return a weight for each label; ``"balanced"`` is ``rows / (labels x count)``, as in King and Zeng 2001."""
    given, names = options.class_weights, task.labels or ()
    if given is None:
        return None
    if isinstance(given, str):
        counts = task.label_counts(rows) or []
        return tuple(sum(counts) / (len(counts) * n) if n else 0.0 for n in counts)
    if isinstance(given, Mapping):
        by_name = {str(name): weight for name, weight in given.items()}
        given = [by_name.get(name, 1.0) for name in names]
    return tuple(float(w) for w in given)


def _plan_faults(task: Task | None, tables: Tables | None, options: Options, own: Own) -> list[str]:
    """Return the problems of options that depend on the task and on the data."""
    named = find_task(options.task) if options.task else None
    name = name_of(task) if task is not None else named.training if named is not None else None
    problems = [] if name is None else task_faults(name, options, getattr(task, "refused", ()))
    if task is not None:
        problems += [*label_faults(task, options), *own.faults(task, options)]
    if tables is not None and not tables.evals:
        needed = ("early_stopping", "eval_every", "metric", "tune_thresholds")
        problems += [f"{name}: found no evaluation data; set eval=" for name in needed if getattr(options, name)]
    return problems


# ---- learning rates --------------------------------------------------------------------------------------


def warmup_steps(warmup: float, total: int) -> int:
    """Return the steps of the rise: a share of all steps below 1, else a number of steps."""
    return math.ceil(total * warmup) if warmup < 1 else int(warmup)


def make_schedule(
    kind: Any,
    base: float,
    warmup: float,
    total: int,
    *,
    lower_is_better: bool,
    metric: str = "loss",
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Return the schedule of a run of ``total`` steps; an object with ``lr(step)`` is returned as it is.

    Args:
        kind: a name of `flodl_hf.training.options.SCHEDULES`.
        base: the highest rate.
        warmup: see `warmup_steps`.
        lower_is_better: whether lower values of ``metric`` are better.
        metric: the figure that a plateau reads.
        options: further options of the schedule.

    Raises:
        ConfigError: values that the curve cannot have.
    """
    if not isinstance(kind, str):
        return kind
    given, rise = dict(options or {}), warmup_steps(warmup, total)
    if kind == "one_cycle":
        return OneCycle(base, total, warmup_fraction=rise / total if warmup else 0.3, **given)
    if kind == "plateau":
        return Plateau(base, **{"patience": 1, **given}, mode="min" if lower_is_better else "max", metric=metric)
    if kind == "cosine" and given:
        if "end" in given:
            given["floor"] = given.pop("end") / base
        return CosineFloor(base, total, rise, **given)
    if kind in ("cosine_with_restarts", "polynomial"):
        return (Polynomial if kind == "polynomial" else CosineRestarts)(base, total, rise, **given)
    if kind == "inverse_sqrt":
        return InverseSqrt(base, rise, **given)
    if kind == "warmup_stable_decay":
        decay, stable = warmup_steps(given.pop("decay", 0.1), total), given.pop("stable", None)
        if stable is None and rise + decay > total:
            raise ConfigError(
                f"schedule: {rise} steps of warmup and {decay} of decay are more than the {total} steps of the run; "
                "expected fewer. Lower warmup, or decay in schedule_options",
                problems=["schedule_options"],
            )
        return WarmupStableDecay(base, rise, total - rise - decay if stable is None else stable, decay, **given)
    # A constant rate does not depend on the length of a run, which may change when the run is resumed.
    return WarmedUp(kind, base, rise, rise if kind == "constant" else total)

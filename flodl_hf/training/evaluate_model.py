"""``evaluate``: metrics of a model on labelled data, computed by the evaluation code of fine-tuning."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch

from flodl.devices import best_device, find_device, training_devices
from flodl.distributed import Ranks, join_ranks, launch
from flodl.distributed.group import under_torchrun
from flodl.errors import ConfigError, DataError, capped, nearest
from flodl.train.evaluate import split_figures
from flodl_hf.families.schema.tasks import task_named
from flodl_hf.inference.evaluation_result import EvaluationResult
from flodl_hf.training.batching import evaluation_layout
from flodl_hf.training.data import Tables, classes_used, list_multilabel_columns, numbered_as, read_tables
from flodl_hf.training.evaluation import EvalPredictions, Evaluations, Own
from flodl_hf.training.job import (
    make_evaluation,
    note_long_texts,
    prepare_held_out,
    row_limits,
)
from flodl_hf.training.losses import is_named
from flodl_hf.training.options import EvaluateOptions, Options, make_options
from flodl_hf.training.ranking import list_columns, note_undefined_metrics
from flodl_hf.training.report.figures import LabelTable, label_table
from flodl_hf.training.rows import CollateRows
from flodl_hf.training.sequence import SequenceTask
from flodl_hf.training.start import known_of
from flodl_hf.training.task import Problems, Task, name_of
from flodl_hf.training.task_choice import choose_task
from flodl_hf.training.tokens import TokenTask
from flodl_hf.training.training_arguments import translated
from flodl_hf.training.vectors.auxiliary import AuxiliaryTask, needs_layer
from flodl_hf.training.vectors.tables import are_pairs
from flodl_hf.training.vectors.task import EmbeddingTask
from flodl_hf.training.vectors.tsdae import DENOISES

if TYPE_CHECKING:
    from flodl_hf.models.encoder_model import EncoderModel

Devices = int | str | list[str]
"""Heads of the tasks that are not named after their head."""


def evaluate(
    model: str | Path | EncoderModel,
    data: Any,
    *,
    device: str | torch.device | None = None,
    devices: Devices | None = None,
    metrics: Any = None,
    untrained: bool = False,
    **options: Unpack[EvaluateOptions],
) -> EvaluationResult:
    """Return the metrics of a model on labelled data, without training and without writing files.

    ::

        result = evaluate("my-classifier", "test.csv")
        result.metrics["accuracy"]
        print(result)

    The metrics are the same as in `flodl_hf.finetune` with ``eval=data``. A folder that `flodl_hf.finetune` wrote is
    evaluated with the task and the options of its ``recipe.yaml`` (such as ``max_length``), unless they are given here.

    Args:
        model: a folder or Hub name, or a model.
        data: labelled data, as ``eval`` of `flodl_hf.finetune`: a file, rows in memory, a Hugging Face data set, a data
            frame, or a mapping of names to several of these.
        device: where to compute. By default the device of a model in memory, else the best device.
        devices: several devices, as a number or names: each evaluates a share of the data, with the same result.
        metrics: ``metrics(predictions, truth)`` returns further metrics, as in `flodl_hf.finetune`.
        untrained: evaluate although parts of the model contain random values.
        **options: options of `flodl_hf.finetune` that concern data and evaluation: ``task``, ``columns``,
            ``problem_type``, ``max_length``, ``stride``, ``long_texts``, ``batch_size``, ``layout``, ``precision``,
            ``attention``, ``seed``, ``concatenate``, ``whole_words``, ``mask_probability``, ``loss``, ``loss_options``,
            ``pooling``, ``normalize``, ``revision``, ``local_files_only``.

    Raises:
        ConfigError: an option does not exist or does not fit; all are listed.
        DataError: the data cannot be read, or has labels that the model does not have.
        PredictError: the head of the model is not trained.
        HubError, CheckpointError, TokenizerError: the model cannot be opened.
    """
    if data is None or isinstance(data, (int, float)):
        raise ConfigError(f"evaluate: found {data!r}, expected a file or rows with labels", problems=["data"])
    if device is not None and devices is not None:
        raise ConfigError("evaluate: found device and devices, expected one of them", problems=["device", "devices"])
    places = training_devices(devices)
    if isinstance(places, str):
        device, places = places, None
    recipe = _recipe_of(model)
    chosen = _options(options, recipe)
    opened = _open(model, chosen)
    opened._ready("evaluate", untrained=untrained)
    with _as_before(opened):
        evaluation, task, notes = _plan(
            opened, data, chosen, Own(metrics=metrics), is_loss_inherited="loss" not in options
        )
        started = time.perf_counter()
        if places is None:
            figures, found = _alone(opened, evaluation, device or (opened.device if model is opened else best_device()))
        else:
            names, ranks = (None, places) if isinstance(places, int) else (places, len(places))
            figures, found = launch(_on_rank, (opened.cpu(), evaluation), ranks=ranks, device=names).wait()[0]
        figures, details = split_figures(figures)
        seconds = time.perf_counter() - started
    results = {}
    for name, one in evaluation.sets.items():
        seen, table = found[name], None
        if seen.predictions is not None and len(seen.predictions):
            table = label_table(task.kind, seen.predictions, seen.truth, tuple(task.names or task.labels or ()))
        table = table or LabelTable([], [], {})
        start = f"{name}/" if name else ""
        own, rest = (
            {key.removeprefix(start): value for key, value in part.items() if key.startswith(start)}
            for part in (figures, details)
        )
        results[name] = EvaluationResult(
            name_of(task), own, len(set(one.prepared.rows.owners.tolist())), seconds, table.labels or None,
            table.confusion or None, table.rows or None, seen.predictions, seen.truth, details=rest, notes=notes,
        )  # fmt: skip
    if "" in results:
        return results[""]
    return EvaluationResult(
        name_of(task), figures, sum(one.examples for one in results.values()), seconds, sets=results, notes=notes
    )


# ---- options ---------------------------------------------------------------------------------------------

FROM_RECIPE = (
    *("task", "columns", "max_length", "stride", "long_texts", "layout", "precision", "attention", "seed"),
    *("concatenate", "whole_words", "mask_probability", "vector_loss", "loss_options", "matryoshka", "prompts"),
    *("batch_size", "micro_batch_size", "eval_batch_size"),
)
"""Options of a fine-tune that change its evaluation."""


def _options(options: Mapping[str, Any], recipe: Mapping[str, Any]) -> Options:
    """Return the options of an evaluation: the given ones, else the options of the fine-tune that trained the model.

    Raises:
        ConfigError: names that do not concern evaluation, or values that are not possible; ``problems`` lists them.
    """
    known = EvaluateOptions.__annotations__
    values, problems = translated(options, known)
    renamed = {"per_device_eval_batch_size": "batch_size", "eval_batch_size": "batch_size"}
    values = {renamed.get(name, name): value for name, value in values.items()}
    problems += [f"{name}: evaluate has no such option{nearest(name, known)}" for name in values if name not in known]
    if problems:
        raise ConfigError(
            f"evaluate: found options that do not exist:\n{capped(problems)}\nexpected {', '.join(known)}",
            problems=problems,
            where="evaluate",
        )
    trained = {name: recipe[name] for name in FROM_RECIPE if recipe.get(name) is not None}
    task = values.get("task")
    if task is not None and trained.get("task") is not None:
        trained = trained if task_named(task, "task").training == task_named(trained["task"]).training else {}
    loss = recipe.get("vector_loss")
    # Several tables, a layer or a second model: only training has them.
    only_trained = (
        is_named(loss, *DENOISES) or needs_layer(loss, recipe.get("loss_options")) or recipe.get("guide") is not None
    )
    if loss is not None and (only_trained or not isinstance(loss, str)):
        trained = {name: value for name, value in trained.items() if name not in ("vector_loss", "loss_options")}
    if "batch_size" in values:
        values["eval_batch_size"] = values.pop("batch_size")
    if "loss" in values:
        values["vector_loss"] = values.pop("loss")
    return make_options({**trained, **values}, "evaluate")


# ---- the model -------------------------------------------------------------------------------------------


def _recipe_of(model: str | Path | EncoderModel) -> Mapping[str, Any]:
    """Return the options that a model was fine-tuned with; none where that is not known."""
    from flodl_hf.training.recipe import load_recipe

    if isinstance(model, (str, os.PathLike)):
        file = Path(model) / "recipe.yaml"
        return load_recipe(file).values if file.is_file() else {}
    recipe = model.training_recipe
    if recipe is None and model.source is not None and model.active_adapter is None:
        recipe = _recipe_of(model.source.folder)
    task = (recipe or {}).get("task")
    # A folder may have been loaded for another task than the task of its recipe.
    return recipe if recipe and task is not None and task_named(task).head == model.head else {}


def _open(model: str | Path | EncoderModel, options: Options) -> EncoderModel:
    """Return the model with the head of the requested task, else with its own."""
    head = None if options.task is None else task_named(options.task, "task").head
    if not isinstance(model, (str, os.PathLike)):
        if head is not None and model.head != head:
            raise ConfigError(
                f"evaluate: found a model with the head {model.head}, expected the head {head} for task "
                f"{options.task}. Load the folder for this task, or leave task= out.",
                problems=["task"],
            )
        return model
    from flodl_hf.heads.auto import load

    given: Any = {"revision": options.revision, "local_files_only": options.local_files_only}
    return load(
        os.fspath(model), head=head or "auto", dtype=torch.float32, attention=options.attention, **given
    )  # fmt: skip


@contextmanager
def _as_before(model: EncoderModel) -> Iterator[None]:
    """Restore the model's recipe of embeddings, its training modes and its device at the end."""
    recipe, device = model.sentence_recipe, model.device
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        model.beside, model.sentence_recipe = None, recipe
        for module, mode in modes:
            module.training = mode
        model.to(device)


def _task_of(model: EncoderModel, rows: list[dict[str, Any]], options: Options) -> str:
    """Return the task that a model was made for."""
    if options.task is not None:
        return task_named(options.task, "task").training
    recipe = model.sentence_recipe
    if model.head == "base":
        return "multivector" if recipe is not None and recipe.late is not None else "embedding"
    if model.head == "masked_lm" and recipe is not None and recipe.splade is not None:
        return "sparse"
    if model.head == "sequence_classification" and len(model.config.labels) == 1:
        lists = are_pairs(list(rows[0])) or list_columns(rows, options.columns)
        return "rank" if lists or "sentence_transformers" in model.config.source else model.head
    return model.head


# ---- the data --------------------------------------------------------------------------------------------


def _plan(
    model: EncoderModel, data: Any, options: Options, own: Own, *, is_loss_inherited: bool
) -> tuple[Evaluations, Task, list[str]]:
    """Return what evaluates the model, the task, and remarks."""
    tables = read_tables(None, data, options)
    name, labels = _task_of(model, tables.train, options), tuple(model.config.labels)
    has_names = any(label != f"LABEL_{i}" for i, label in enumerate(labels))
    if name in ("sequence_classification", "token_classification"):
        if name == "sequence_classification":  # the kind that transformers takes the labels for
            single = "regression" if len(labels) == 1 else None
            options = replace(options, problem_type=options.problem_type or model.config.problem_type or single)
        options = replace(options, labels=None if options.problem_type == "regression" else labels)
        if has_names:
            # Declared classes are compared by their names: the model may number them in another order.
            sets = {name: numbered_as(rows, model.config.labels) for name, rows in tables.evals.items()}
            tables = replace(tables, train=next(iter(sets.values())), evals=sets)
    tables, options = list_multilabel_columns(tables, replace(options, task=name))
    try:
        task, options = choose_task(tables, options, known_of(model, options))
    except ConfigError as fault:
        if fault.message.startswith("labels: the data has"):
            raise _other_labels(labels, fault.details.get("problems", [])) from None
        if not is_loss_inherited:
            raise
        # Data of another form than the training data: the default loss of this form.
        options = replace(options, vector_loss=None, loss_options=None)
        task, options = choose_task(tables, options, known_of(model, options))
    _check_labels(labels, task, tables, has_names=has_names)
    if isinstance(task, AuxiliaryTask):
        raise DataError(
            "evaluate: found pairs with classes, which are predicted by a layer that only training has. Give pairs "
            "with numbers that measure their similarity, or pairs or triplets without labels."
        )
    Problems("evaluate", own.faults(task, options)).check()
    notes = []
    if isinstance(task, EmbeddingTask):
        task.trains = False
        notes = task.settle(model)
    limits = row_limits(task, model, options)
    prepared = prepare_held_out(task, tables.evals, model.tokenizer, limits)
    tokenizer: Any = model.tokenizer
    collate = CollateRows(tokenizer.pad_token_id or 0, evaluation_layout(options), task.masking(tokenizer, options))
    evaluation = make_evaluation(task, options, own, prepared, collate, stored=prepared)
    assert evaluation is not None
    notes += note_long_texts(prepared, limits, task, options) + note_undefined_metrics(prepared, task)
    return evaluation, task, notes


def _other_labels(known: tuple[str, ...], strange: list[str]) -> DataError:
    return DataError(
        f"evaluate: found labels in the data that the model does not have:\n{capped(strange, 8)}\nexpected some of "
        f"{', '.join(known[:20])}. Rename the labels in the data, or evaluate a model that was trained with them.",
        labels=strange,
        expected=list(known),
    )


def _check_labels(known: tuple[str, ...], task: Task, tables: Tables, *, has_names: bool) -> None:
    """Raise if the data have other labels than the model, or labels of another kind."""
    column = task.columns.label or task.columns.tags if isinstance(task, (SequenceTask, TokenTask)) else None
    if column is not None and task.kind != "regression" and has_names:
        used = {name for rows in tables.evals.values() for name in classes_used(rows, column)}
        if strange := sorted(used - set(known)):
            raise _other_labels(known, strange)
    if task.labels is None or name_of(task) == "rank" or task.labels == known:
        return
    if task.kind == "regression" and len(known) == len(task.labels):
        return
    raise DataError(
        f"evaluate: found {task.kind.replace('_', ' ')} labels in the data, expected labels of the model: "
        f"{', '.join(known[:20])}. problem_type= defines how labels are read.",
        labels=list(task.labels),
        expected=list(known),
    )


# ---- devices ---------------------------------------------------------------------------------------------


Found = tuple[dict[str, float], dict[str, EvalPredictions]]


def _alone(model: EncoderModel, evaluation: Evaluations, device: str | torch.device) -> Found:
    if under_torchrun():
        ranks = join_ranks(device=None)
        try:
            return _on_rank(ranks, model, evaluation)
        finally:
            ranks.leave()
    model.to(find_device(device))
    return evaluation(model), {name: one.seen or EvalPredictions(name) for name, one in evaluation.sets.items()}


def _on_rank(ranks: Ranks, model: EncoderModel, evaluation: Evaluations) -> Found:
    """Return the metrics of all ranks, with predictions on the first."""
    figures = evaluation.on_ranks(model.to(ranks.device).eval(), ranks, (1.0,) * ranks.world)
    kept = evaluation.sets if ranks.rank == 0 or under_torchrun() else {}
    return figures, {name: one.seen or EvalPredictions(name) for name, one in kept.items()}

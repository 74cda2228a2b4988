"""Task and rows of a run from the arguments of the caller: files, the inferred task, and labels.

This module decides the task and the label names. `flodl_hf.readers` reads files and infers columns; the module of a
task converts rows to tokens.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from flodl.errors import ConfigError, DataError, nearest
from flodl_hf.families.schema.tasks import task_named
from flodl_hf.readers import Table, Targets, infer_targets, load_rows
from flodl_hf.readers.arrow import is_saved_dataset, names_of_classes, saved_files
from flodl_hf.readers.columns import NAMES, Columns, column_names, infer_columns
from flodl_hf.training.answers import AnswerTask
from flodl_hf.training.choices import choice_columns, plan_choices
from flodl_hf.training.declared import aligned, drop_unlabelled, with_named_records
from flodl_hf.training.generator import GeneratorTask, plan_generator
from flodl_hf.training.losses.auxiliary import classifies, needs_layer
from flodl_hf.training.losses.tsdae import denoises
from flodl_hf.training.masked import MaskedTask
from flodl_hf.training.options import Options
from flodl_hf.training.pairs import plan_pairs
from flodl_hf.training.ranking import plan_ranking
from flodl_hf.training.replaced import plan_replaced
from flodl_hf.training.sequence import SequenceTask
from flodl_hf.training.streams import stream_part
from flodl_hf.training.task import Task
from flodl_hf.training.task_inference import LOOKED_AT, refuse_lost_labels
from flodl_hf.training.tokens import TokenTask, tag_names
from flodl_hf.training.vectors.auxiliary import AuxiliaryTask
from flodl_hf.training.vectors.multivector import MultiVectorTask
from flodl_hf.training.vectors.sparse import SparseTask
from flodl_hf.training.vectors.tables import are_pairs, read_table, table_columns
from flodl_hf.training.vectors.task import EmbeddingTask, plan_embedding
from flodl_hf.training.vectors.tsdae import DenoisingTask

__all__ = ["HEADED", "Known", "Tables", "choose_task", "is_several", "read_tables"]

HEADED = (SequenceTask, TokenTask, AnswerTask, MaskedTask)
"""Tasks of models with a head; their columns may be inferred from the values."""
SPLITS = frozenset(("train", "validation", "valid", "dev", "test", "eval"))
"""Usual names of splits; a mapping of splits is not a mapping of training tables."""

OTHER_VECTORS: dict[str, type[EmbeddingTask]] = {"sparse": SparseTask, "multivector": MultiVectorTask}

_KINDS = {
    "single_label_classification": "single_label",
    "multi_label_classification": "multi_label",
    "regression": "regression",
}


@dataclass(frozen=True)
class Known:
    """The starting model: its head, its label names if it was trained with any, and whether
    its family predicts the order of two texts (ALBERT) or whether one follows the other.
    """

    head: str | None = None
    labels: tuple[str, ...] = ()
    ordered: bool = False


@dataclass(frozen=True)
class Tables:
    """The rows of a run.

    Attributes:
        train: training rows.
        evals: evaluation sets; the name is empty if there is only one.
        facts: for each table the values of the model card: name, rows, and the hash of a file.
        parts: training tables, if there are several.
        is_shared: whether the evaluation rows were split off the training data.
    """

    train: Table
    evals: dict[str, Table]
    facts: dict[str, dict[str, Any]]
    parts: dict[str, Table] = field(default_factory=dict)
    is_shared: bool = False

    @property
    def labelled(self) -> list[dict[str, Any]]:
        """All rows with labels: the training rows and the evaluation rows that were split off them."""
        return [*self.train, *self.evals[""]] if self.is_shared else self.train

    def drop_unlabelled(self, column: str | None, labels: Sequence[str] | None = None) -> None:
        """Remove rows with the label -1, which marks a missing label.

        Raises:
            DataError: no row of a table has a label.
        """
        evals = {f"eval {name}".strip(): rows for name, rows in self.evals.items()}
        parts = self.parts or {"train": self.train}
        drop_unlabelled({**parts, **evals}, column, labels)
        if self.parts:
            self.train[:] = [row for part in parts.values() for row in part]
        for name, rows in {
            **{f"train {name}": part for name, part in self.parts.items()},
            "train": self.train,
            **evals,
        }.items():
            if name in self.facts:
                self.facts[name]["rows"] = len(rows)


def read_tables(train: Any, held_out: Any, options: Options | None = None) -> Tables:
    """Return the rows of the given files or objects; from a stream only the rows that the run uses.

    Args:
        train: training data; None if a model is evaluated only: then the first evaluation set is used.
        held_out: evaluation data; a mapping for several sets; or a share (below 1) or number of training rows.
        options: the choices of the run.

    Raises:
        DataError: a file is absent or invalid, or has no rows; all files are read before it is raised.
        ConfigError: a share that leaves no rows, or an option with which the required length of a stream is unknown.
    """
    options = options or Options()
    share = None if isinstance(held_out, bool) or not isinstance(held_out, (int, float)) else held_out
    whole: dict[str, Any] = {} if held_out is None or share is not None else {"": held_out}
    named = dict(held_out) if is_several(held_out) else whole
    rows: dict[str, Table] = {}
    facts: dict[str, dict[str, Any]] = {}
    faults: list[DataError] = []
    several = dict(train) if is_several(train) else {}
    if several and {str(name).lower() for name in several} <= SPLITS:
        raise ConfigError(
            f"train: found the splits {', '.join(map(str, several))} of a data set; expected one of them, and another "
            "one for the evaluation: train=data['train'], eval=data['validation']",
            problems=["train"],
        )
    learned = {f"train {name}": source for name, source in several.items()} if several else {"train": train}
    learned = {} if train is None else learned
    for name, source in {**learned, **{f"eval {k}".strip(): source for k, source in named.items()}}.items():
        try:
            rows[name] = load_rows(stream_part(source, options, share) if name == "train" else source)
            rows[name].classes |= names_of_classes(getattr(source, "features", None))
            rows[name] = with_named_records(rows[name])
        except DataError as fault:
            faults.append(DataError(fault.message.replace(", or set format=", ""), **fault.details))
            continue
        facts[name] = {"rows": len(rows[name]), **_facts(source)}
    if len(faults) == 1:
        raise faults[0]
    if faults:
        raise DataError("\n".join(str(fault) for fault in faults), problems=[str(fault) for fault in faults])
    evals = {name: rows[f"eval {name}".strip()] for name in named}
    if train is None:
        first = next(iter(named))
        return Tables(evals[first], {name: aligned(part, evals[first]) for name, part in evals.items()}, facts)
    if several:
        if share is not None:
            raise ConfigError("eval: found a share of several training tables; expected data", problems=["eval"])
        parts = {name: rows[f"train {name}"] for name in several}
        return Tables(Table(row for part in parts.values() for row in part), evals, facts, parts)
    if share is not None:
        rows["train"], evals[""] = _held_out(rows["train"], share, options.seed)
        name = f"{facts['train']['name']}, {len(evals['']):,} rows split off"
        facts["eval"] = {**facts["train"], "name": name, "rows": len(evals[""])}
        facts["train"]["rows"] = len(rows["train"])
        return Tables(rows["train"], evals, facts, is_shared=True)
    return Tables(rows["train"], {name: aligned(part, rows["train"]) for name, part in evals.items()}, facts)


def is_several(source: Any) -> TypeGuard[Mapping[str, Any]]:
    """Return whether evaluation data are a mapping of names to sets, not of names to columns."""
    if not isinstance(source, Mapping) or not source:
        return False
    return all(_is_table(value) for value in source.values())


def _is_table(value: Any) -> bool:
    if isinstance(value, (str, os.PathLike, Mapping)) or hasattr(value, "features") or hasattr(value, "columns"):
        return True
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def _held_out(rows: Table, share: float, seed: int) -> tuple[Table, Table]:
    """Return training rows and evaluation rows, each in order; the split depends only on the seed."""
    count = round(share * len(rows)) if share < 1 else int(share)
    if share <= 0 or not 0 < count < len(rows) or (share >= 1 and share != count):
        raise ConfigError(
            f"eval: found {share!r} of {len(rows)} training rows; expected a share between 0 and 1, or an integer "
            "of rows, that leaves some of both",
            problems=["eval"],
        )
    chosen = set(np.random.default_rng(seed).permutation(len(rows))[:count].tolist())
    kept = Table((row for i, row in enumerate(rows) if i not in chosen), rows.classes)
    return kept, Table((rows[i] for i in sorted(chosen)), rows.classes)


def _facts(source: Any) -> dict[str, Any]:
    if not isinstance(source, (str, os.PathLike)):
        return {"name": f"{type(source).__name__} in memory"}
    digest, path = hashlib.sha256(), Path(source)
    for one in [path / name for name in saved_files(path)] if is_saved_dataset(path) else [path]:
        with open(one, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return {"name": path.name, "sha256": digest.hexdigest()}


def choose_task(tables: Tables, options: Options, known: Known, own: Any = None) -> tuple[Task, Options]:
    """Return the task, and the options with inferred values.

    The columns of the data decide, unless the caller named the task.

    Args:
        own: a loss of the user's own, which vectors can have.

    Raises:
        ConfigError: the task does not fit the columns, or an option does not fit the task.
        DataError: the columns or labels cannot be understood.
    """
    wanted = task_named(options.task, "task") if options.task else None
    named = wanted and wanted.training
    if wanted and wanted.problem_type and options.problem_type is None:
        options = replace(options, problem_type=wanted.problem_type)
    if options.generator is not None:
        named = named or "replaced_tokens"
        if named != "replaced_tokens":
            raise ConfigError(
                f"generator: {named} has none; expected task='replaced', or no generator", problems=["generator"]
            )
    pairs = are_pairs(list(tables.train[0])) and not options.columns
    is_ranked = named == "rank" and bool(tables.train.classes)
    if is_ranked or named in ("embedding", *OTHER_VECTORS) or (named is None and (pairs or tables.parts)):
        tables.drop_unlabelled(_class_column(tables, options))
    if denoises(options.vector_loss) and named in (None, "embedding") and not tables.parts:
        options = replace(options, vector_loss="DenoisingAutoEncoderLoss")
        return plan_embedding({"": tables.train}, options, own, DenoisingTask)
    if named == "embedding" and not tables.parts and own is None and _needs_layer(tables.train, options):
        return plan_embedding({"": tables.train}, options, own, AuxiliaryTask)
    if named == "embedding" or (named is None and (pairs or tables.parts)):
        return plan_embedding(tables.parts or {"": tables.train}, options, own)
    if named in OTHER_VECTORS:
        return plan_embedding(tables.parts or {"": tables.train}, options, own, OTHER_VECTORS[named])
    if named == "rank" and not tables.parts:
        return plan_ranking(tables.train, options), options
    if tables.parts:
        raise ConfigError(
            f"train: found {len(tables.parts)} tables for {named}; expected one, or task='embedding', which "
            "mixes several",
            problems=["train"],
        )
    task = _of_its_own(named, tables, options, known)
    if own is not None and (
        isinstance(task, GeneratorTask) or (task is not None and task.kind in ("choices", "pairs"))
    ):
        raise ConfigError(f"loss: {task.head} has no other loss than its own; leave the option out", problems=["loss"])
    return task or _with_head(tables, options, known, named), options


def _needs_layer(rows: Sequence[Mapping[str, Any]], options: Options) -> bool:
    """Return whether the loss of the embeddings has an additional layer."""
    if options.vector_loss is not None:
        return needs_layer(options.vector_loss, options.loss_options)
    return read_table(rows, options.columns).form == "pair_classes"


def _class_column(tables: Tables, options: Options) -> str | None:
    """Return the column of classes that vectors are learned from; None if there is none, or one of scores."""
    for rows in [*tables.parts.values()] or [tables.train]:
        texts, label = table_columns(rows, options.columns)
        if label in rows.classes or (label is not None and (len(texts) == 1 or classifies(options.vector_loss))):
            return label
    return None


def _of_its_own(named: str | None, tables: Tables, options: Options, known: Known) -> Task | None:
    """Return a task with its own column names; None for others."""
    if named in ("next_sentence", "pretraining"):
        return plan_pairs(named, tables.train, options, ordered=known.ordered)
    if named == "replaced_tokens":
        plan = plan_replaced if options.generator is None else plan_generator
        return plan(tables.train[:LOOKED_AT], options)
    if named == "multiple_choice" or (named is None and not options.columns and choice_columns(tables.train[0])):
        return plan_choices(tables.train, options)
    return None


def _with_head(tables: Tables, options: Options, known: Known, named: str | None) -> Task:
    """Return the task of a model with a head."""
    role_columns = dict(options.columns or {})
    columns = infer_columns(tables.train[:LOOKED_AT], named, **role_columns)
    task = columns.task.replace("-", "_")
    if named is None:
        refuse_lost_labels(columns, tables.train, known.head)
    if named is not None and named != task:
        columns = _columns_for(named, columns, tables.train[0])
        task = named
    for name, held_out in tables.evals.items():
        _same_columns(columns, held_out, f"eval {name}".strip())
    if task == "sequence_classification":
        return _sequence(tables, columns, options, known)
    if task == "token_classification":
        return _tokens(tables, columns, options, known)
    if task == "question_answering" and columns.answers is None:
        names = column_names(tables.train[:LOOKED_AT])
        raise DataError(
            f"train: found questions and no column with answers among {names}; expected the answers as in SQuAD, "
            "{'text': [...], 'answer_start': [...]}; set columns={'answers': ...}",
            names=names,
        )
    return AnswerTask(columns) if task == "question_answering" else MaskedTask(columns, options.concatenate)


def _columns_for(named: str, columns: Columns, row: Mapping[str, Any]) -> Columns:
    """Return the columns for a task other than the one they look like."""
    if named == "sequence_classification" and columns.question and columns.context:
        label = next((name for name in row if name.lower() in ("label", "labels")), None)
        if label:
            return Columns(
                task="sequence-classification", text=columns.question, text_pair=columns.context, label=label
            )
    raise ConfigError(
        f"task: found {named}, and the columns {list(row)} are for {columns.task}; expected other columns "
        "(columns={'text': ..., 'label': ...}) or leave the task out",
        problems=["task"],
    )


def _same_columns(columns: Columns, rows: Sequence[Mapping[str, Any]], where: str) -> None:
    wanted = [getattr(columns, role) for role in columns.__dataclass_fields__ if role != "task"]
    names = column_names(rows[:LOOKED_AT])
    absent = [name for name in wanted if name is not None and not any(name in row for row in rows[:LOOKED_AT])]
    if absent:
        near = nearest(absent[0], names)
        raise DataError(
            f"{where}: no column {', '.join(map(repr, absent))}{near}; it has {names}. Expected the columns of the "
            "training data",
            names=absent,
        )


# ---- labels ---------------------------------------------------------------------------------------------


def _sequence(tables: Tables, columns: Columns, options: Options, known: Known) -> SequenceTask:
    if columns.label is None:
        raise DataError(f"train: found no column of labels among {list(tables.train[0])}; set columns={{'label': ...}}")
    if options.problem_type in (None, "single_label_classification"):
        tables.drop_unlabelled(columns.label, options.labels)
    values = [row.get(columns.label) for row in tables.labelled]
    if columns.label.lower() not in NAMES["label"] and columns.label in values:
        raise DataError(
            f"train: column {columns.label!r} has its own name among its labels, so the first line of the file seems "
            "to be a row of data; expected a line of names before it, such as text,label",
            names=[columns.label],
        )
    kind = _KINDS[options.problem_type] if options.problem_type else None
    if kind == "multi_label":
        joined = next((v for v in values if isinstance(v, str) and any(sign in v for sign in ",;|")), None)
        if joined is not None:
            raise DataError(
                f"train: column {columns.label!r} contains several labels in one text, such as {joined!r}; expected "
                "lists (JSON lines or Parquet), or a column of 0 and 1 for each label",
                column=columns.label,
            )
        values = [v if isinstance(v, (list, tuple)) else [v] for v in values]
    found = _targets(values, kind)
    if found.kind == "regression":
        names = tuple(options.labels or (f"LABEL_{k}" for k in range(found.size)))
        if len(names) != found.size:
            raise ConfigError(
                f"labels: found {len(names)} names for {found.size} numbers in column {columns.label!r}; expected as "
                "many names",
                problems=["labels"],
            )
        return SequenceTask(columns, found, names)
    own = known.labels if known.head == "sequence_classification" else ()
    stored, names = _names(found.names, options.labels, tables.train.classes.get(columns.label), own)
    if len(names) == 1 and found.kind == "single_label":
        raise DataError(
            f"train: every row has the label {names[0]!r}; expected at least two labels, or problem_type='regression'",
            labels=names,
        )
    return SequenceTask(columns, replace(found, names=stored), names)


def _targets(values: Sequence[Any], kind: Any) -> Targets:
    """Return the targets; error messages use the option names of a run."""
    try:
        return infer_targets(values, kind)
    except DataError as fault:
        message = fault.message
        for word, name in (("single_label", "single_label_classification"), ("regression", "regression")):
            message = message.replace(f"kind='{word}'", f"problem_type='{name}'")
        raise DataError(message, **fault.details) from None


def _tokens(tables: Tables, columns: Columns, options: Options, known: Known) -> TokenTask:
    found = tag_names(tables.labelled, columns)
    own = known.labels if known.head == "token_classification" else ()
    stored, names = _names(found, options.labels, tables.train.classes.get(columns.tags or ""), own)
    return TokenTask(columns, names, None if stored == names else stored)


def _names(
    found: tuple[str, ...], asked: Sequence[str] | None, declared: Sequence[str] | None, own: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the labels as the data has them, and as the result names them; both by number.

    The order of precedence is: names of the caller, names that a data set declares, names of the starting model,
    and the values of the data. Numbers in the data are indices of names.

    Raises:
        ConfigError: the data has labels that the caller's names lack.
    """
    numeric = all(name.isdecimal() for name in found)
    highest = max(map(int, found)) if numeric else -1
    for given in (asked, declared, own):
        names = tuple(given or ())
        if not names:
            continue
        if given is asked and len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ConfigError(f"labels: found {twice} twice; expected each name once", problems=twice)
        if set(found) <= set(names):
            return names, names
        # a model with more labels than the data has numbers was trained for something else
        if numeric and (highest < len(names) if given is not own else highest + 1 == len(names)):
            return tuple(str(k) for k in range(len(names))), names
        if given is asked:
            missing = sorted(set(found) - set(names))
            raise ConfigError(
                f"labels: the data has {missing[:8]}, which are not among {list(names)[:20]}", problems=missing
            )
    return found, found

"""Interface of tasks, and code that all tasks share: row limits, scorers, and checks of the data.

Each task is one module of this package: it converts rows of a table to rows of tokens with labels, names its loss,
and computes metrics. `data` selects the task of a run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from flodl.data import FixedBatches, SequentialSampler
from flodl.errors import ConfigError, FlodlError, capped
from flodl.metrics import Metric
from flodl_hf.training.rows import CollateRows, EncodedRows, Laid
from flodl_hf.training.step import Kind, LossFunction, Objective

if TYPE_CHECKING:
    from flodl_hf.models.encoder_model import EncoderModel
    from flodl_hf.tokenization.tokenizer import Tokenizer
    from flodl_hf.training.data import Tables
    from flodl_hf.training.options import Options

CHUNK = 512
"""Examples that are tokenized together: enough for the tokenizer's threads, with little memory for offsets."""

Examples = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class LengthLimits:
    """How long rows may be.

    Attributes:
        max_tokens: most tokens in a row, special ones included; None for no bound.
        stride: tokens that neighbouring windows share; None as the task likes.
        types: whether the model takes token types.
        windows: whether texts with a label are read in windows where they are longer.
    """

    max_tokens: int | None
    stride: int | None
    types: bool
    windows: bool = False

    def shared(self, usual: int, part: int) -> int:
        """Return the overlap of windows: the requested or usual one, at most a part of a row."""
        wanted = usual if self.stride is None else self.stride
        return wanted if self.max_tokens is None else min(wanted, self.max_tokens // part)


@dataclass(frozen=True)
class Prepared:
    """Rows of tokens, what makes a scorer with the values that it needs for each example (None for training data), and
    how many texts were cut.
    """

    rows: EncodedRows
    scorer: Any = None
    cut: int = 0


@dataclass(frozen=True)
class Known:
    """The starting model: its head, its label names if it was trained with any, and whether
    its family predicts the order of two texts (ALBERT) or whether one follows the other.
    """

    head: str | None = None
    labels: tuple[str, ...] = ()
    ordered: bool = False


@dataclass(frozen=True)
class Source:
    """Values from which a task is planned.

    Attributes:
        tables: rows of the run.
        options: options of the run.
        known: the starting model.
        name: name of the task.
        columns: columns of a task with a head; None for others.
    """

    tables: Tables
    options: Options
    known: Known
    name: str
    columns: Any

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """The training rows."""
        return self.tables.train


class Scorer:
    """Computes metrics example by example; subclasses define ``update``.

    Args:
        *parts: the metrics, which ranks merge.
    """

    def __init__(self, *parts: Any) -> None:
        self.parts = list(parts)

    def update(self, example: int, scores: Sequence[Tensor]) -> tuple[Any, Any] | None:
        """Add the scores of all windows of one example, on the CPU.

        Returns:
            The prediction and the gold label, as JSON values, for metrics of the user; None if there are none.
        """

    def metrics(self) -> Sequence[Metric]:
        """Return the current metrics; ``compute`` uses them after other ranks were merged into them."""
        return self.parts

    def compute(self) -> dict[str, float]:
        """Return the values of all metrics, without their counts."""
        found = {name: value for part in self.metrics() for name, value in part.compute().items()}
        found.pop("count", None)
        return found


class Task:
    """One kind of thing to learn.

    Attributes:
        head: the head's name.
        kind: kind of the loss.
        name: name of the task, if it is not that of its head.
        labels: label names in order; None if the head has no labels.
        names: names of the classes that are evaluated, if they are not the labels.
        problem_type: value of ``problem_type`` in ``config.json``.
        main_metric: the metric that selects the best model; with a leading ``-`` if lower is better.
        per_row: whether scores are of whole rows rather than of tokens.
        refused: options that the task does not use.
        headed: whether the model has a head, and columns may be inferred from their values.
        attaches: whether additional modules are attached to a model for the run.
        start: attaches them, on every rank; called with the model.
    """

    head: str
    kind: Kind
    name: str = ""
    labels: Any = None
    names: ClassVar[Any] = None
    problem_type: str | None = None
    main_metric: str
    per_row: bool = False
    refused: ClassVar[tuple[str, ...]] = ()
    headed: ClassVar[bool] = False
    attaches: ClassVar[bool] = False
    start: Any = None

    @classmethod
    def plan(cls, source: Source) -> Task:
        """Return the task of some tables.

        Raises:
            ConfigError: an option does not fit the task.
            DataError: columns or labels do not fit the task.
        """
        raise NotImplementedError

    def prepare(self, examples: Examples, tokenizer: Tokenizer, limits: LengthLimits, *, training: bool) -> Prepared:
        """Return the examples as rows of tokens."""
        raise NotImplementedError

    def main_metric_of(self, held_out: Prepared) -> str:
        """Return the metric of evaluation data that selects the best model."""
        return self.main_metric

    def label_counts(self, rows: EncodedRows) -> list[int] | None:
        """Return how often each label occurs, for balanced weights; None without labels."""
        return None

    def settle(self, model: EncoderModel) -> list[str]:
        """Prepare the starting model of a run; return notes for the user."""
        return []

    def bounds(self, model: EncoderModel) -> list[int]:
        """Return limits of tokens in a row, in addition to that of the model."""
        return []

    def laid(self, rows: Any) -> Laid:
        """Return the lengths of texts in a batch."""
        return rows.laid

    def conclude(self, model: EncoderModel) -> Any:
        """Detach additional modules and store trained parts in the model; return the generator, if any."""

    def masking(self, tokenizer: Tokenizer, options: Options) -> Any:
        """Return the function that replaces tokens of a row in training; None if there is none."""

    def objective(self, options: Options, weights: tuple[float, ...] | None, own: LossFunction | None, /) -> Any:
        """Return the loss of training; ``own`` is the user's function."""
        return Objective(
            self.kind, weights, options.label_smoothing, options.masks_padding, own, options.neftune or None
        )

    def of_held_out(self, prepared: Prepared, options: Options, own: LossFunction | None, /) -> Any:
        """Return the loss of evaluation data."""
        return self.objective(replace(options, label_smoothing=0.0, neftune=None), None, own)

    def collate(self, usual: CollateRows, rows: Any, batches: Any, accumulate: int) -> CollateRows:
        """Return the collate function of steps of ``accumulate`` batches, in the same layout as ``usual``."""
        return usual

    def collate_held_out(self, usual: CollateRows, rows: Any) -> CollateRows:
        """Return the collate function of evaluation rows, which count as one step."""
        return self.collate(usual, rows, FixedBatches(SequentialSampler(len(rows)), len(rows)), sys.maxsize)


def encode_chunks(
    tokenizer: Tokenizer, texts: Sequence[Any], seconds: Sequence[str] | None = None, **how: Any
) -> Iterator[tuple[int, Sequence[Any]]]:
    """Return the number of each text with its windows, lazily; arguments as for `Tokenizer.encode_rows`."""

    def chunk(start: int) -> Iterable[tuple[int, Sequence[Any]]]:
        stop = start + CHUNK
        groups = tokenizer.encode_rows(texts[start:stop], None if seconds is None else seconds[start:stop], **how)
        return enumerate(groups, start)

    return chain.from_iterable(map(chunk, range(0, len(texts), CHUNK)))


def name_of(task: Task) -> str:
    """Return the name of a task in options and results: its own name, else the name of its head."""
    return task.name or task.head


def label_names(
    in_data: tuple[str, ...], requested: Sequence[str] | None, declared: Sequence[str] | None, own: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the labels as the data has them, and as the result names them; both by number.

    The order of precedence is: names of the caller, names that a data set declares, names of the starting model,
    and the values of the data. Numbers in the data are indices of names.

    Raises:
        ConfigError: the data has labels that the caller's names lack.
    """
    numeric = all(name.isdecimal() for name in in_data)
    highest = max(map(int, in_data)) if numeric else -1
    for given in (requested, declared, own):
        names = tuple(given or ())
        if not names:
            continue
        if given is requested and len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ConfigError(f"labels: found {twice} twice; expected each name once", problems=twice)
        if set(in_data) <= set(names):
            return names, names
        # a model with more labels than the data has numbers was trained for something else
        if numeric and (highest < len(names) if given is not own else highest + 1 == len(names)):
            return tuple(str(k) for k in range(len(names))), names
        if given is requested:
            missing = sorted(set(in_data) - set(names))
            raise ConfigError(
                f"labels: the data has {missing[:8]}, which are not among {list(names)[:20]}", problems=missing
            )
    return in_data, in_data


# ---- options that a task does not use ------------------------------------------------------------------

VECTORS = ("embedding", "sparse", "multivector")
WORDS = ("masked_lm", "replaced_tokens")
LABELLED = ("sequence_classification", "token_classification")
USED_BY: dict[str, tuple[str, ...]] = {
    "labels": LABELLED,
    "problem_type": ("sequence_classification",),
    "class_weights": LABELLED,
    "label_smoothing": (*LABELLED, "masked_lm", "next_sentence"),
    "concatenate": WORDS,
    "whole_words": (*WORDS, "pretraining"),
    "projection": ("multivector",),
    "prompts": ("embedding", "sparse"),
    "vector_loss": (*VECTORS, "rank"),
    "loss_options": (*VECTORS, "rank"),
    **dict.fromkeys(("matryoshka", "guide", "pooling", "normalize", "cache_tokens"), VECTORS),
}
"""Options that only these tasks use."""
UNUSED_BY: dict[str, tuple[str, ...]] = {
    "neftune": (*VECTORS, "multiple_choice"),
    **dict.fromkeys(("tokens_per_batch", "micro_batch_size", "group_by_length"), VECTORS),
}
"""Options that all tasks but these use."""
ONE_ROW = (*VECTORS, "rank", "multiple_choice", "next_sentence", "pretraining")
"""Tasks whose texts are one row each, whatever their length."""


def task_faults(name: str, options: Any, refused: Iterable[str] = ()) -> list[str]:
    """Return the problems of options that a task does not use.

    Args:
        name: the task.
        options: the options of the run.
        refused: further options that it does not use.
    """
    unused = [option for option, tasks in USED_BY.items() if name not in tasks]
    unused += [option for option, tasks in UNUSED_BY.items() if name in tasks]
    unused += [option for option in refused if option not in unused]
    how = ""
    if name == "replaced_tokens":
        how = " without a generator" if options.generator is None else " with a generator"
        unused += ("concatenate", "whole_words") if options.generator is None else ("neftune", "label_smoothing")
    usual = {"labels": ("LABEL_0",), "problem_type": "regression"} if name == "rank" else {}
    problems = [
        f"{option}: {name}{how} takes none; leave it out"
        for option in dict.fromkeys(unused)
        if getattr(options, option) not in (None, (), False, 0.0, usual.get(option))
    ]
    if options.long_texts == "windows" and name in ONE_ROW:
        problems.append(
            f"long_texts: found 'windows'; expected 'truncate' for {name}, where each text is one row; a greater "
            "max_length keeps more of it"
        )
    if options.long_texts == "error" and name != "sequence_classification":
        problems.append(f"long_texts: found 'error'; expected 'truncate' for {name}; only classifiers support 'error'")
    if name == "question_answering" and options.layout == "packed" and options.compat is not None:
        problems.append(
            "layout: found 'packed', whose rows have no padding to include in the loss; expected 'padded' with "
            "compat='transformers'"
        )
    if name in VECTORS and options.shard is not None:
        problems.append(
            "shard: vectors are compared over whole batches, which ranks with shards do not compute together; expected "
            "another task, or no shard"
        )
    return problems


def label_faults(task: Any, options: Any) -> list[str]:
    """Return the problems of class weights, label smoothing and thresholds for the labels of a task."""
    problems, given, names = [], options.class_weights, list(task.labels or ())
    if options.label_smoothing and task.kind in ("multi_label", "regression"):
        problems.append(
            f"label_smoothing: {task.kind} has no single right label to take a share from; expected 0, or "
            "problem_type='single_label_classification'"
        )
    if options.tune_thresholds and task.kind != "multi_label" and (task.kind, len(names)) != ("single_label", 2):
        problems.append(
            f"tune_thresholds: found {task.kind.replace('_', ' ')} with {len(names)} labels; expected several labels "
            "per text (multi_label_classification), or two labels"
        )
    if given is None or not names:
        return problems
    if task.kind == "regression":
        return [*problems, "class_weights: regression takes none; leave it out"]
    if isinstance(given, str) and given == "balanced":
        return problems
    strange = [str(name) for name in given if str(name) not in names] if isinstance(given, Mapping) else []
    if strange:
        return [*problems, f"class_weights: {strange} are no labels; expected some of {names[:20]}"]
    weights = list(given.values() if isinstance(given, Mapping) else given if hasattr(given, "__len__") else ())
    fits = isinstance(given, Mapping) or len(weights) == len(names)
    if not fits or not all(isinstance(weight, Real) and float(weight) >= 0 for weight in weights):
        problems.append(
            f"class_weights: found {given!r}; expected 'balanced', a weight for each of {names[:20]}, or a mapping of "
            "labels to weights; none below 0"
        )
    return problems


@dataclass
class Problems:
    """Collects the problems of a plan; as a context manager it collects errors that are raised inside.

    Attributes:
        caller: name of the called function, for the message.
        messages: all problems, each with the name of its option.
        first: the first error that was raised.
    """

    caller: str
    messages: list[str] = field(default_factory=list)
    first: FlodlError | None = None

    def add(self, problems: Iterable[str]) -> None:
        """Add further problems."""
        self.messages += [problem for problem in problems if problem not in self.messages]

    def __enter__(self) -> Problems:
        return self

    def __exit__(self, kind: Any, fault: BaseException | None, trace: Any) -> bool:
        if not isinstance(fault, FlodlError):
            return False
        if self.first is None and not self.messages:
            self.first = fault
        listed = list(fault.details.get("problems", ()))
        named = isinstance(fault, ConfigError) and listed and all(": " in problem for problem in listed)
        self.add(listed if named else [fault.message.removeprefix(f"{self.caller}: ").removeprefix("finetune: ")])
        return True

    def check(self) -> None:
        """Raise if there are problems.

        Raises:
            ConfigError: several problems, all of them in ``problems``; or problems of options.
            FlodlError: the only problem, as it was raised.
        """
        if not self.messages:
            return
        if self.first is not None and (len(self.messages) == 1 or self.messages == self.first.details.get("problems")):
            raise self.first
        several = f"{self.caller}: found {len(self.messages)} problems:\n{capped(self.messages)}"
        text = self.messages[0] if len(self.messages) == 1 else several
        raise ConfigError(text, problems=list(self.messages), where=self.caller)

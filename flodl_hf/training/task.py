"""Interface of tasks, and code that all tasks share: row limits, scorers, and checks of the data.

Each task is one module of this package: it converts rows of a table to rows of tokens with labels, names its loss,
and computes metrics. `data` selects the task of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from flodl.errors import DataError, capped
from flodl.metrics import Metric
from flodl_hf.training.rows import EncodedRows
from flodl_hf.training.step import Kind

if TYPE_CHECKING:
    from flodl_hf.tokenization.tokenizer import Tokenizer

__all__ = ["CHUNK", "LengthLimits", "MetricScorer", "Prepared", "Scorer", "Task", "UnweightedTask", "check_texts"]

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
    """Rows of tokens, the values that a scorer needs for each example (None for training data), and how many texts
    were cut.
    """

    rows: EncodedRows
    truth: Any = None
    cut: int = 0


class Scorer(Protocol):
    """Computes metrics example by example."""

    def update(self, example: int, scores: Sequence[Tensor]) -> tuple[Any, Any] | None:
        """Add the scores of all windows of one example, on the CPU.

        Returns:
            The prediction and the gold label, as JSON values, for metrics of the user; None if there are none.
        """
        ...

    def metrics(self) -> Sequence[Metric]:
        """Return the current metrics; ``compute`` uses them after other ranks were merged into them."""
        ...

    def compute(self) -> dict[str, float]:
        """Return the figures."""
        ...


class MetricScorer:
    """Scorer with one metric; subclasses define ``update``."""

    metric: Any

    def metrics(self) -> Sequence[Metric]:
        """Return the metric."""
        return [self.metric]

    def compute(self) -> dict[str, float]:
        """Return the values of the metric, without its count."""
        figures = self.metric.compute()
        figures.pop("count", None)
        return figures


class UnweightedTask:
    """Base class of tasks without weights of labels."""

    def label_counts(self, rows: EncodedRows) -> list[int] | None:
        """Return None: labels have no weights."""
        return None


class Task(Protocol):
    """One kind of thing to learn."""

    @property
    def head(self) -> str:
        """The head's name."""
        ...

    @property
    def kind(self) -> Kind:
        """Kind of the loss."""
        ...

    @property
    def labels(self) -> tuple[str, ...] | None:
        """Label names in order; None if the head has no labels."""
        ...

    @property
    def problem_type(self) -> str | None:
        """Value of ``problem_type`` in ``config.json``."""
        ...

    @property
    def main_metric(self) -> str:
        """The metric that selects the best model; with a leading ``-`` if lower is better."""
        ...

    @property
    def per_row(self) -> bool:
        """Whether scores are of whole rows rather than of tokens."""
        ...

    def prepare(self, examples: Examples, tokenizer: Tokenizer, limits: LengthLimits, *, training: bool) -> Prepared:
        """Return the examples as rows of tokens."""
        ...

    def scorer(self, prepared: Prepared) -> Scorer:
        """Return a new scorer."""
        ...

    def label_counts(self, rows: EncodedRows) -> list[int] | None:
        """Return how often each label occurs, for balanced weights; None without labels."""
        ...


def name_of(task: Task) -> str:
    """Return the name of a task in options and results: its own name, else the name of its head."""
    return getattr(task, "name", task.head)


def check_texts(examples: Examples, column: str, where: str) -> None:
    """Refuse a column with values that are no texts.

    Raises:
        DataError: some are not; ``problems`` lists them.
    """
    wrong = [
        f"row {i}: {type(row.get(column)).__name__}"
        for i, row in enumerate(examples)
        if not isinstance(row.get(column), str)
    ]
    if wrong:
        raise DataError(
            f"{where}: column {column!r} has values that are no texts:\n{capped(wrong, 5)}\nexpected a text in each",
            problems=wrong,
            column=column,
        )

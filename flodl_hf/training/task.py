"""Interface of tasks, and code that all tasks share: row limits, scorers, and checks of the data.

Each task is one module of this package: it converts rows of a table to rows of tokens with labels, names its loss,
and computes metrics. `data` selects the task of a run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from flodl.errors import DataError, capped
from flodl.metrics import Metric
from flodl_hf.training.rows import EncodedRows
from flodl_hf.training.step import Kind

if TYPE_CHECKING:
    from flodl_hf.tokenization.tokenizer import Tokenizer

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


class Task(ABC):
    """One kind of thing to learn.

    Attributes:
        head: the head's name.
        kind: kind of the loss.
        name: name of the task, if it is not that of its head.
        labels: label names in order; None if the head has no labels.
        problem_type: value of ``problem_type`` in ``config.json``.
        main_metric: the metric that selects the best model; with a leading ``-`` if lower is better.
        per_row: whether scores are of whole rows rather than of tokens.
        refused: options that the task does not use.
    """

    head: str
    kind: Kind
    name: str = ""
    labels: Any = None
    problem_type: str | None = None
    main_metric: str
    per_row: bool = False
    refused: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def prepare(self, examples: Examples, tokenizer: Tokenizer, limits: LengthLimits, *, training: bool) -> Prepared:
        """Return the examples as rows of tokens."""

    @abstractmethod
    def scorer(self, prepared: Prepared) -> Scorer:
        """Return a new scorer."""

    def label_counts(self, rows: EncodedRows) -> list[int] | None:
        """Return how often each label occurs, for balanced weights; None without labels."""
        return None

    def _settle(self, **values: Any) -> None:
        """Set attributes that follow from the fields of a frozen task."""
        for name, value in values.items():
            object.__setattr__(self, name, value)


def encode_chunks(
    tokenizer: Tokenizer, texts: Sequence[Any], seconds: Sequence[str] | None = None, **how: Any
) -> Iterator[tuple[int, Sequence[Any]]]:
    """Yield the number of each text with its windows; arguments as for `Tokenizer.encode_rows`."""
    for start in range(0, len(texts), CHUNK):
        stop = start + CHUNK
        groups = tokenizer.encode_rows(texts[start:stop], None if seconds is None else seconds[start:stop], **how)
        yield from enumerate(groups, start)


def name_of(task: Task) -> str:
    """Return the name of a task in options and results: its own name, else the name of its head."""
    return task.name or task.head


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

"""What a task has to state, and what all tasks share: limits of a row, scorers, and checks of the data.

A task is one file beside this one: it turns rows of a table into rows of tokens with labels, names its loss,
and judges scores. Which task a run has is decided in `data`.
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

__all__ = ["CHUNK", "LengthLimits", "Prepared", "Scorer", "Task", "check_texts"]

CHUNK = 512
"""Examples tokenized at once: enough for the tokenizer's threads, few enough to hold with their offsets."""

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
        """Return the tokens that windows share: as asked or as usual, at most a part of a row."""
        wanted = usual if self.stride is None else self.stride
        return wanted if self.max_tokens is None else min(wanted, self.max_tokens // part)


@dataclass(frozen=True)
class Prepared:
    """Rows of tokens, what a scorer needs to know of each example besides (None for training data), and how many texts
    were cut.
    """

    rows: EncodedRows
    truth: Any = None
    cut: int = 0


class Scorer(Protocol):
    """Judges a model example by example."""

    def update(self, example: int, scores: Sequence[Tensor]) -> tuple[Any, Any] | None:
        """Take in the scores of all windows of one example, on the CPU.

        Returns:
            What is predicted and what is true, as JSON values, for figures of the user's own; None where nothing is.
        """
        ...

    def metrics(self) -> Sequence[Metric]:
        """Return what was counted so far; filled from other ranks, they are what ``compute`` goes by."""
        ...

    def compute(self) -> dict[str, float]:
        """Return the figures."""
        ...


class Task(Protocol):
    """One kind of thing to learn."""

    @property
    def head(self) -> str:
        """The head's name."""
        ...

    @property
    def kind(self) -> Kind:
        """What the loss is of."""
        ...

    @property
    def labels(self) -> tuple[str, ...] | None:
        """Label names by number; None where the head has no labels."""
        ...

    @property
    def problem_type(self) -> str | None:
        """What ``config.json`` says of the labels."""
        ...

    @property
    def main_metric(self) -> str:
        """The figure that says which model is better; a leading ``-`` where less is."""
        ...

    @property
    def per_row(self) -> bool:
        """Whether scores are of whole rows rather than of tokens."""
        ...

    def prepare(self, examples: Examples, tokenizer: Tokenizer, limits: LengthLimits, *, training: bool) -> Prepared:
        """Return the examples as rows of tokens."""
        ...

    def scorer(self, prepared: Prepared) -> Scorer:
        """Return a scorer that has seen nothing."""
        ...

    def label_counts(self, rows: EncodedRows) -> list[int] | None:
        """Return how often each label occurs, for balanced weights; None where that has no meaning."""
        ...


def name_of(task: Task) -> str:
    """Return what a task is called in options and results: its own name where it has one, else its head's."""
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

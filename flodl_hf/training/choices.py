"""The right one of several choices, from data in the shapes of SWAG, RACE, ARC and their relatives.

An example is a prompt with its choices, each of which is a row of the model: the prompt, and the choice as its second
text. Examples may have different numbers of choices. The loss is transformers': the cross-entropy of their scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from flodl.errors import DataError
from flodl.metrics import Accuracy
from flodl.train import Loss
from flodl_hf.tokenization.readers.columns import refuse_rows
from flodl_hf.training.ranking import Candidates, CollateLists, ListObjective, prepare_lists
from flodl_hf.training.rows import CollateRows
from flodl_hf.training.task import Examples, LengthLimits, Prepared, Scorer, Source, Task
from flodl_hf.training.vectors.tables import asked_columns, known_column

if TYPE_CHECKING:
    from flodl_hf.tokenization.tokenizer import Tokenizer

PROMPTS = (
    *("prompt", "context", "ctx", "sent1", "premise", "article", "passage", "paragraph", "text", "sentence"),
    *("question", "query", "goal"),
)
STEMS = ("stem", "sent2", "question", "query")
LISTS = ("choices", "endings", "options", "candidates", "answers")
NUMBERED = ("ending", "choice", "option", "sol", "answer", "candidate")
LABELS = ("label", "labels", "answer", "answer_key", "answerkey", "correct", "target", "gold")
ROLES = ("prompt", "stem", "choices", "label")


@dataclass(frozen=True)
class ChoiceColumns:
    """The columns of a prompt and its choices.

    Attributes:
        prompt: the first text of every choice.
        stem: the beginning of every choice; None if there is none.
        choices: one column of lists, or a column for each choice.
        label: the right choice: its number from 0, its letter or key, or its text.
    """

    prompt: str
    stem: str | None
    choices: tuple[str, ...]
    label: str


def choice_columns(row: Mapping[str, Any], role_columns: Mapping[str, str] | None = None) -> ChoiceColumns | None:
    """Return the columns of a table of choices; None if the table has no choices.

    Args:
        row: the first row.
        role_columns: columns by role: prompt, stem, choices (several as ``a+b``), label.

    Raises:
        ConfigError: there is no such role, or a role other than choices has several columns.
        DataError: a named column is absent.
    """
    asked = asked_columns(row, role_columns, ROLES, "columns", single=("prompt", "stem", "label"))
    choices = tuple(asked.get("choices", ())) or _choices(row)
    texts = [name for name, value in row.items() if isinstance(value, str)]
    found: dict[str, str | None] = {}
    for role, names, known in (("label", list(row), LABELS), ("prompt", texts, PROMPTS), ("stem", texts, STEMS)):
        free = [name for name in names if name not in choices and name not in found.values()]
        found[role] = asked[role][0] if role in asked else known_column(free, known)
    prompt, label = found["prompt"], found["label"]
    return (
        None if not choices or prompt is None or label is None else ChoiceColumns(prompt, found["stem"], choices, label)
    )


def _choices(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the column of lists of texts, or the columns that are numbered: ``ending0``, ``ending1``, ..."""
    lowered = {name.lower(): name for name in row}
    for name in LISTS:
        value = row.get(lowered.get(name, ""))
        texts = value.get("text") if isinstance(value, Mapping) else value
        if isinstance(texts, (list, tuple)) and len(texts) > 1 and all(isinstance(text, str) for text in texts):
            return (lowered[name],)
    for name in NUMBERED:
        found = {low[len(name) :].lstrip("_"): own for low, own in lowered.items() if low.startswith(name)}
        numbered = sorted((int(k), own) for k, own in found.items() if k.isdecimal() and isinstance(row[own], str))
        if len(numbered) > 1:
            return tuple(own for _, own in numbered)
    return ()


@dataclass(frozen=True)
class ChoiceTask(Task):
    """The right one of several choices.

    Args:
        columns: the columns of prompts, choices and labels.
    """

    columns: ChoiceColumns

    head = "multiple_choice"
    kind = "choices"
    main_metric = "accuracy"
    per_row = True

    @classmethod
    def plan(cls, source: Source) -> ChoiceTask:
        """Return the task of a table of choices."""
        row = source.rows[0]
        columns = choice_columns(row, source.options.columns)
        if columns is None:
            raise DataError(
                f"train: found the columns {list(row)}, and no choices among them; expected a prompt (prompt, context, "
                "question), choices in a list (choices, endings, options) or in numbered columns (ending0, ending1), "
                "and a label; or set columns={'prompt': ..., 'choices': ..., 'label': ...}",
                names=list(row),
            )
        return cls(columns)

    def prepare(self, examples: Examples, tokenizer: Tokenizer, limits: LengthLimits, *, training: bool) -> Prepared:
        """Return a row for each prompt with all of its choices."""
        found, right, wrong = [], [], []
        for i, row in enumerate(examples):
            try:
                one, label = self._read(row)
                found.append(one)
                right.append(label)
            except DataError as fault:
                wrong.append(f"row {i}: {fault}")
        columns = self.columns
        refuse_rows(
            "train" if training else "eval", "rows that are no prompt with choices", wrong,
            f"in each a text ({columns.prompt!r}), two choices or more ({', '.join(columns.choices)}), and the right "
            f"one ({columns.label!r}): its number from 0, its letter or its text",
        )  # fmt: skip
        rows, cut = prepare_lists(found, tokenizer, limits, np.asarray(right, np.int64))
        scorer = None if training else partial(_Scorer, [len(one.texts) for one in found], right)
        return Prepared(rows, scorer, cut)  # type: ignore[arg-type]

    def _read(self, row: Mapping[str, Any]) -> tuple[Candidates, int]:
        """Return a prompt with its choices, and the number of the right one.

        Raises:
            DataError: the row is no such thing.
        """
        columns = self.columns
        keys, given = [], [row.get(name) for name in columns.choices]
        if len(given) == 1 and isinstance(given[0], Mapping):
            keys = list(map(str, given[0].get("label") or ()))
            given = [given[0].get("text")]
        texts: list[Any] = given if len(given) > 1 else list(given[0]) if isinstance(given[0], (list, tuple)) else []
        prompt, stem = row.get(columns.prompt), "" if columns.stem is None else row.get(columns.stem)
        if not isinstance(prompt, str) or not isinstance(stem, str):
            raise DataError(f"found a {type(prompt if isinstance(stem, str) else stem).__name__}, no text")
        if len(texts) < 2 or not all(isinstance(text, str) for text in texts):
            raise DataError(f"found {len(texts)} choices: {[type(text).__name__ for text in texts[:5]]}")
        label = _right(row.get(columns.label), texts, keys)
        lead = f"{stem} " if stem else ""
        return Candidates(prompt, tuple(lead + text for text in texts), ()), label

    def objective(self, *_: Any) -> ChoiceObjective:
        """Return the loss."""
        return ChoiceObjective(None)

    def collate(self, usual: CollateRows, rows: Any, batches: Any, accumulate: int) -> CollateLists:
        """Return the collate function for choices, in the same layout as ``usual``."""
        return CollateLists.like(usual)


def _right(label: Any, texts: Sequence[str], keys: Sequence[str]) -> int:
    """Return the index of the correct choice.

    Raises:
        DataError: the label is not one of the choices.
    """
    if isinstance(label, str):
        word = label.strip()
        if word in keys:
            return keys.index(word)
        if list(texts).count(label) == 1:
            return list(texts).index(label)
        letter = ord(word) - ord("A") if len(word) == 1 and word.isupper() else -1
        label = letter if letter >= 0 else int(word) if word.isdecimal() else label
    if isinstance(label, float) and label.is_integer():
        label = int(label)
    if isinstance(label, (int, np.integer)) and not isinstance(label, bool) and 0 <= label < len(texts):
        return int(label)
    raise DataError(f"found the label {label!r} for {len(texts)} choices")


@dataclass(frozen=True)
class ChoiceObjective(ListObjective):
    """The cross-entropy of the scores of a prompt's choices."""

    def of(self, scores: Tensor, batch: Any) -> Loss:
        """Return the loss of computed scores."""
        lowest = torch.finfo(scores.dtype).min
        there = scores.masked_fill(batch["slots"] < 0, lowest)  # examples may have fewer choices than others
        return Loss.mean(F.cross_entropy(there, batch["labels"]), scores.shape[0])


class _Scorer(Scorer):
    def __init__(self, counts: Sequence[int], right: Sequence[int]) -> None:
        super().__init__(Accuracy())
        self.counts, self.right = counts, right

    def update(self, example: int, scores: Sequence[Tensor]) -> tuple[Any, Any]:
        """Add the scores of the choices of one prompt; return them, and the number of the right one."""
        found = scores[0].clone()
        found[self.counts[example] :] = float("-inf")
        self.parts[0].update(found[None], torch.tensor([self.right[example]]))
        return found.tolist(), self.right[example]

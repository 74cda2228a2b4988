"""Rankers trained on a question with all its candidates: rows, losses and metrics.

An example is a question with its candidates, each of which is a row of the model; lists may be of different lengths.
Candidates come as a list in a column with their labels in another, as one candidate a row, or as a positive with
negatives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flodl.data import Where
from flodl.errors import DataError, capped
from flodl.train import Loss
from flodl_hf.readers.columns import Columns
from flodl_hf.training.rows import CollateRows, EncodedRows, RowBuilder
from flodl_hf.training.step import score
from flodl_hf.training.task import CHUNK, LengthLimits
from flodl_hf.training.vectors.rows import PARTS, CollateTexts, TextRows
from flodl_hf.training.vectors.tables import ANCHORS, LABELS, POSITIVES, read_table

if TYPE_CHECKING:
    from flodl_hf.tokenization.tokenizer import Tokenizer

__all__ = ["Candidates", "CollateLists", "ListObjective", "collate_lists", "has_lists", "prepare_lists", "read_lists"]

DOCUMENTS = (*POSITIVES, "documents", "docs", "passages", "candidates", "texts")


@dataclass(frozen=True)
class Candidates:
    """A question, its candidate texts, and their grades."""

    question: str
    texts: tuple[str, ...]
    grades: tuple[float, ...]


def _named(row: Mapping[str, Any], role_columns: Mapping[str, str] | None) -> tuple[str | None, str | None, str | None]:
    """Return the columns of questions, documents and labels."""
    asked, lowered = dict(role_columns or {}), {name.lower(): name for name in row}
    found = []
    for role, names in (("anchor", ANCHORS), ("positive", DOCUMENTS), ("label", LABELS)):
        found.append(asked.get(role) or next((lowered[name] for name in names if name in lowered), None))
    return found[0], found[1], found[2]


def has_lists(rows: Sequence[Mapping[str, Any]], role_columns: Mapping[str, str] | None = None) -> bool:
    """Return whether one column contains lists of documents and another one their labels."""
    question, documents, label = _named(rows[0], role_columns)
    several = [name for name in (documents, label) if name is not None and isinstance(rows[0].get(name), (list, tuple))]
    return question is not None and len(several) == 2


def read_lists(
    rows: Sequence[Mapping[str, Any]], role_columns: Mapping[str, str] | None = None, where: str = "train"
) -> tuple[list[Candidates], Columns]:
    """Return questions with their candidates, and the columns.

    Raises:
        DataError: columns are ambiguous, or a row has different numbers of labels and documents.
    """
    if has_lists(rows, role_columns):
        return _of_columns(rows, role_columns, where)
    table = read_table(rows, role_columns, where).as_scores
    if table.form == "triplets":
        found = [Candidates(row[0], row[1:], (1.0, *[0.0] * (len(row) - 2))) for row in table.texts]
        return found, table.columns
    if table.form == "teacher_scores" and table.labels is not None:
        scores = table.labels.reshape(len(table.texts), -1)
        if scores.shape[1] == table.width - 2:  # differences from the positive
            scores = np.concatenate([np.zeros((len(scores), 1)), -scores], 1)
        parts = zip(table.texts, scores.tolist(), strict=True)
        return [Candidates(row[0], tuple(row[1:]), tuple(own)) for row, own in parts], table.columns
    if table.form not in ("binary", "scored") or table.labels is None:
        raise DataError(
            f"{where}: rank: found {table.form}; expected a question with a list of documents and a list of labels, a "
            "question, a document and a label, or a question with a positive and negatives",
            form=table.form,
        )
    groups: dict[str, list[tuple[str, float]]] = {}
    for row, label in zip(table.texts, table.labels.tolist(), strict=True):
        groups.setdefault(row[0], []).append((row[1], float(label)))
    found = [Candidates(q, tuple(t for t, _ in own), tuple(g for _, g in own)) for q, own in groups.items()]
    return found, table.columns


def _of_columns(
    rows: Sequence[Mapping[str, Any]], role_columns: Mapping[str, str] | None, where: str
) -> tuple[list[Candidates], Columns]:
    question, documents, label = _named(rows[0], role_columns)
    assert question is not None
    assert documents is not None
    found, wrong = [], []
    for i, row in enumerate(rows):
        texts, labels = row.get(documents), row.get(label or "")
        if (
            not (isinstance(texts, (list, tuple)) and isinstance(labels, (list, tuple)) and texts)
            or not isinstance(row[question], str)
            or len(texts) != len(labels)
            or not all(isinstance(text, str) for text in texts)
        ):
            counts = [len(part) if isinstance(part, (list, tuple)) else type(part).__name__ for part in (texts, labels)]
            wrong.append(f"row {i}: {counts[0]} documents, {counts[1]} labels")
            continue
        try:
            grades = tuple(float(value) for value in labels)
        except (TypeError, ValueError):
            grades = (float("nan"),)
        if not np.isfinite(grades).all():
            wrong.append(f"row {i}: labels that are no numbers")
        found.append(Candidates(row[question], tuple(texts), grades))
    if wrong:
        raise DataError(
            f"{where}: rank: rows that are no lists:\n{capped(wrong, 5)}\nexpected in each a question, a list of "
            f"documents ({documents!r}) and as many numbers ({label!r})",
            problems=wrong,
        )
    return found, Columns(task="embedding", text=question, text_pair=documents, label=label)


def prepare_lists(
    lists: Sequence[Candidates], tokenizer: Tokenizer, limits: LengthLimits, right: NDArray[np.int64] | None = None
) -> tuple[TextRows, int]:
    """Return lists as rows of tokens, and the number of truncated texts.

    Args:
        lists: each is an example.
        tokenizer: of the model.
        limits: how long a text with its question may be.
        right: the number of the right text of each, which is its label then, in place of the grades of all.
    """
    builder, cut, lengths = RowBuilder(limits.types), 0, []
    flat = [(one.question, text) for one in lists for text in one.texts]
    for start in range(0, len(flat), CHUNK):
        part = flat[start : start + CHUNK]
        groups = tokenizer.encode_rows(
            [first for first, _ in part], [second for _, second in part], max_tokens=limits.max_tokens, offsets=False,
            cut="longest", overflow="truncate",
        )  # fmt: skip
        for group in groups:
            builder.add(group[0], len(lengths))
            lengths.append(len(group[0].ids))
            cut += group[0].truncated
    counts = np.asarray([len(one.texts) for one in lists])
    there = np.arange(counts.max()) < counts[:, None]
    parts = np.zeros(there.shape, np.int64)
    labels = np.zeros(there.shape, np.float32)
    parts[there] = lengths
    if right is None:
        labels[there] = [grade for one in lists for grade in one.grades]
    columns = builder.build().columns
    rows = EncodedRows(columns, parts.sum(1).tolist(), {PARTS: parts, "labels": labels if right is None else right})
    return TextRows([rows], [np.zeros((len(lists), 0), np.int64)]), cut


@dataclass(frozen=True)
class CollateLists(CollateTexts):
    """Collates the candidates of some questions; ``slots``, ``(questions, most)``, contains their row numbers."""

    is_ragged: bool = True

    def __call__(self, rows: Sequence[Mapping[str, Any]], where: Where) -> dict[str, Any]:
        """Return the parts of one batch."""
        batch = super().__call__(rows, where)
        there = batch.pop("there")
        slots = torch.where(there, there.flatten().cumsum(0).view(there.shape) - 1, -1)
        return {**batch, "slots": slots}


def collate_lists(usual: CollateRows) -> CollateLists:
    """Return the collate function for lists, in the same layout as ``usual``."""
    return CollateLists(
        usual.pad_id, usual.layout, shapes=usual.shapes, widths=usual.widths, shapes_for=usual.shapes_for,
    )  # fmt: skip


@dataclass(frozen=True)
class ListObjective:
    """The loss of lists of candidates; called with a model and a batch it is a training step.

    Args:
        loss: one of `flodl_hf.training.losses.lists`.
    """

    loss: Any
    weights: None = field(default=None, init=False)

    reads_num_rows = False  # counts are taken from the labels, so captured steps serve batches of any number of rows

    def __call__(self, model: Any, batch: Any) -> Loss:
        """Return the loss of a batch."""
        return self.of(self.score(model, batch), batch)

    def score(self, model: Any, batch: Any) -> Tensor:
        """Return the scores of candidates, ``(questions, most)``; scores of missing ones are arbitrary."""
        return score(model, batch).reshape(-1)[batch["slots"].clamp(min=0)]

    def of(self, scores: Tensor, batch: Any) -> Loss:
        """Return the loss of computed scores."""
        with torch.autocast(scores.device.type, enabled=False):
            return Loss(*self.loss(scores.float(), batch["labels"], batch["slots"] >= 0))

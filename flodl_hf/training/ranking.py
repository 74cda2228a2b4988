"""Rankers (cross-encoders): one relevance score for a question and a passage.

The default loss is the binary cross-entropy of the score and the label of the pair: 0 to 1. Other losses use
all candidates of a question together (`flodl_hf.training.losses.lists`). The metrics measure their order. Lists may be
of different lengths; they come as a list in a column with labels in another, as one candidate a row, or as a positive
with negatives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flodl.data import Where
from flodl.errors import ConfigError, DataError
from flodl.train import Loss
from flodl_hf.tokenization.readers.columns import Columns, refuse_rows
from flodl_hf.training.evaluation import CollectedValues
from flodl_hf.training.evaluators import average_precision, ranking_figures
from flodl_hf.training.losses import loss_named, make_loss
from flodl_hf.training.losses.lists import LIST_LOSSES, MarginMSELoss
from flodl_hf.training.options import Options
from flodl_hf.training.rows import CollateRows, RowBuilder
from flodl_hf.training.step import Kind, LossFunction, Scoring, score
from flodl_hf.training.task import (
    Examples,
    LengthLimits,
    Prepared,
    Problems,
    Scorer,
    Source,
    Task,
    encode_chunks,
    task_faults,
)
from flodl_hf.training.vectors.step import CollateTexts, TextRows, rows_of_texts
from flodl_hf.training.vectors.tables import ANCHORS, LABELS, POSITIVES, known_column, read_table

if TYPE_CHECKING:
    from flodl_hf.models.encoder_model import EncoderModel
    from flodl_hf.tokenization.tokenizer import Tokenizer

DOCUMENTS = (*POSITIVES, "documents", "docs", "passages", "candidates", "texts")


@dataclass(frozen=True)
class Candidates:
    """A question, its candidate texts, and their grades."""

    question: str
    texts: tuple[str, ...]
    grades: tuple[float, ...]


def list_columns(
    rows: Sequence[Mapping[str, Any]], role_columns: Mapping[str, str] | None = None
) -> tuple[str, str, str] | None:
    """Return the columns of questions, lists of documents and lists of labels; None if there are no such columns."""
    asked, row = dict(role_columns or {}), rows[0]
    roles = (("anchor", ANCHORS), ("positive", DOCUMENTS), ("label", LABELS))
    question, documents, label = (asked.get(role) or known_column(row, names) for role, names in roles)
    if question is None or documents is None or label is None:
        return None
    has_lists = all(isinstance(row.get(name), (list, tuple)) for name in (documents, label))
    return (question, documents, label) if has_lists else None


def read_lists(
    rows: Sequence[Mapping[str, Any]],
    role_columns: Mapping[str, str] | None = None,
    source: str = "train",
    kind: Kind | None = None,
) -> tuple[list[Candidates], Columns]:
    """Return questions with their candidates and grades, and the columns.

    Args:
        rows: the table.
        role_columns: columns by role.
        source: name of the table in messages.
        kind: kind of the loss of a pair; None for a loss of lists, where the rows of a question are one list.

    Raises:
        DataError: columns are ambiguous, a row has different numbers of labels and documents, or labels do not fit the
            loss.
    """
    if (names := list_columns(rows, role_columns)) is not None:
        found = _of_lists(rows, *names, source)
        columns = Columns(task="embedding", text=names[0], text_pair=names[1], label=names[2])
    else:
        table = read_table(rows, role_columns, source).as_scores
        columns = table.columns
        if table.form == "triplets":
            scores = np.asarray([[1.0] + [0.0] * (table.width - 2)] * len(table.texts))
        elif table.form in ("teacher_scores", "binary", "scored") and table.labels is not None:
            scores = table.labels.reshape(len(table.texts), -1)
            if scores.shape[1] == table.width - 2:  # differences from the positive
                scores = np.concatenate([np.zeros((len(scores), 1)), -scores], 1)
        else:
            raise DataError(
                f"{source}: rank: found {table.form}; expected a question, a document and a label, a question with a "
                "list of documents and a list of labels, or a question with a positive and negatives (flodl-hf mine "
                "finds some)",
                form=table.form,
            )
        found = [
            Candidates(row[0], row[1:], tuple(map(float, own[: len(row) - 1])))
            for row, own in zip(table.texts, scores.tolist(), strict=True)
        ]
        if kind is None and table.form in ("binary", "scored"):
            groups: dict[str, tuple[list[str], list[float]]] = {}
            for one in found:
                texts, grades = groups.setdefault(one.question, ([], []))
                texts += one.texts
                grades += one.grades
            found = [Candidates(question, tuple(texts), tuple(own)) for question, (texts, own) in groups.items()]
    grades = [grade for one in found for grade in one.grades]
    if kind == "multi_label" and (min(grades) < 0 or max(grades) > 1):
        raise DataError(
            f"rank: labels go from {min(grades):g} to {max(grades):g}; expected 0 (does not fit) to 1 (fits), grades "
            "between them; MSELoss and losses of lists take any",
            least=min(grades),
            most=max(grades),
        )
    return found, columns


def _of_lists(
    rows: Sequence[Mapping[str, Any]], question: str, documents: str, label: str, source: str
) -> list[Candidates]:
    found, wrong = [], []
    for i, row in enumerate(rows):
        texts, labels = row.get(documents), row.get(label)
        counts = [len(part) if isinstance(part, (list, tuple)) else type(part).__name__ for part in (texts, labels)]
        are_texts = texts and isinstance(texts, (list, tuple)) and all(isinstance(text, str) for text in texts)
        if not are_texts or counts[0] != counts[1] or not isinstance(row[question], str):
            wrong.append(f"row {i}: {counts[0]} documents, {counts[1]} labels")
            continue
        try:
            found.append(Candidates(row[question], tuple(texts or ()), tuple(map(float, labels or ()))))
        except (TypeError, ValueError):
            wrong.append(f"row {i}: labels that are no numbers")
            continue
        if not np.isfinite(found[-1].grades).all():
            wrong.append(f"row {i}: labels that are no finite numbers")
    refuse_rows(
        source, "rank: rows that are no lists", wrong,
        f"in each a question, a list of documents ({documents!r}) and as many numbers ({label!r})",
    )  # fmt: skip
    return found


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
    for _, row in _encode_lists(tokenizer, lists, limits):
        builder.add(row, len(lengths))
        lengths.append(len(row.ids))
        cut += row.truncated
    counts = [len(one.texts) for one in lists]
    labels: Any = right
    if right is None:
        there = np.arange(max(counts)) < np.asarray(counts)[:, None]
        labels = np.zeros(there.shape, np.float32)
        labels[there] = [grade for one in lists for grade in one.grades]
    rows = rows_of_texts(builder, lengths, counts, {"labels": labels})
    return TextRows([rows], [np.zeros((len(lists), 0), np.int64)]), cut


def _encode_lists(tokenizer: Tokenizer, lists: Sequence[Candidates], limits: LengthLimits) -> Iterator[tuple[int, Any]]:
    """Yield the number and the row of tokens of each question with a candidate; the longer text is truncated."""
    pairs = [(one.question, text) for one in lists for text in one.texts]
    how = {"max_tokens": limits.max_tokens, "offsets": False, "cut": "longest", "overflow": "truncate"}
    for i, group in encode_chunks(tokenizer, *map(list, zip(*pairs, strict=True)), **how):
        yield i, group[0]


@dataclass(frozen=True)
class CollateLists(CollateTexts):
    """Collates the candidates of some questions; ``slots``, ``(questions, most)``, contains their row numbers."""

    is_ragged: bool = True

    def __call__(self, rows: Sequence[Mapping[str, Any]], position: Where) -> dict[str, Any]:
        """Return the parts of one batch."""
        batch = super().__call__(rows, position)
        there = batch.pop("there")
        slots = torch.where(there, there.flatten().cumsum(0).view(there.shape) - 1, -1)
        return {**batch, "slots": slots}


@dataclass(frozen=True)
class ListObjective(Scoring):
    """The loss of lists of candidates.

    Args:
        loss: one of `flodl_hf.training.losses.lists`.
    """

    loss: Any

    def score(self, model: Any, batch: Any) -> Tensor:
        """Return the scores of candidates, ``(questions, most)``; scores of missing ones are arbitrary."""
        return score(model, batch).reshape(-1)[batch["slots"].clamp(min=0)]

    def of(self, scores: Tensor, batch: Any) -> Loss:
        """Return the loss of computed scores."""
        with torch.autocast(scores.device.type, enabled=False):
            return Loss(*self.loss(scores.float(), batch["labels"], batch["slots"] >= 0))


FIGURES = ("ap", "map", "mrr@10", "ndcg@10")
OF_PAIRS: dict[str, Kind] = {"BinaryCrossEntropyLoss": "multi_label", "MSELoss": "regression"}
"""Losses of a pair by itself, and what such a loss is of."""


@dataclass(frozen=True)
class RankTask(Task):
    """How well a passage fits a question.

    Args:
        columns: the columns of questions, passages and labels.
        role_columns: columns that the caller named, by role.
        loss: of all candidates of a question together; None where each pair has its own.
        activation: path of the activation that makes scores of the trained model's logits.
    """

    columns: Columns
    role_columns: Mapping[str, str] | None = None
    loss: Any = None
    kind: Kind = "multi_label"
    activation: str = "torch.nn.modules.activation.Sigmoid"

    name = "rank"
    head = "sequence_classification"
    labels = ("LABEL_0",)
    main_metric = "ndcg@10"
    per_row = True

    @classmethod
    def plan(cls, source: Source) -> RankTask:
        """Return the task of questions with candidates."""
        rows, options = source.rows, source.options
        problems = Problems("finetune", task_faults("rank", options))
        word, loss, kind = options.vector_loss or "BinaryCrossEntropyLoss", None, None
        with problems:
            if not isinstance(word, str):
                raise ConfigError(
                    "vector_loss: found a mapping for a ranker; expected a name", problems=["vector_loss"]
                )
            kind = OF_PAIRS.get(loss_named(word, {**OF_PAIRS, **LIST_LOSSES}))
            if kind is not None and options.loss_options:
                raise ConfigError(f"loss_options: {word} has none; leave it out", problems=["loss_options"])
            if kind is None and options.neftune:
                problems.add(["neftune: lists of candidates take none; leave it out"])
            if kind is None:
                loss = make_loss(word, options.loss_options, LIST_LOSSES)
        columns: Any = None
        with problems:
            columns = read_lists(rows, options.columns, "train", kind)[1]
        problems.check()
        if kind is None:
            return cls(columns, options.columns, loss)
        # The mean squared error applies to the logits.
        activation = "torch.nn.modules.linear.Identity" if kind == "regression" else cls.activation
        return cls(columns, options.columns, kind=kind, activation=activation)

    def settle(self, model: EncoderModel) -> list[str]:
        """Have a model store the activation of its scores: its own, or this task's if it has none.

        The problem type is removed, because transformers would apply another function than sentence-transformers.
        """
        own = model.config.score_activation or self.activation
        model.config = model.config.changed(problem_type="", score_activation=own)
        return []

    start = settle

    def prepare(self, examples: Examples, tokenizer: Tokenizer, limits: LengthLimits, *, training: bool) -> Prepared:
        """Return a row for each question with each of its candidates, or one for each question with all of them."""
        where, kind = "train" if training else "eval", self.kind if self.loss is None else None
        lists, _ = read_lists(examples, self.role_columns, where, kind)
        if kind is None:
            listed, cut = prepare_lists(lists, tokenizer, limits)
            scorer: Any = None if training else partial(_Scorer, range(len(lists)), self._worth(lists), 0.0)
            return Prepared(listed, scorer, cut)  # type: ignore[arg-type]
        pairs = [(one.question, (grade,)) for one in lists for grade in one.grades]
        builder, cut = RowBuilder(limits.types), 0
        for i, row in _encode_lists(tokenizer, lists, limits):
            builder.add(row, i, labels=np.asarray(pairs[i][1], np.float32))
            cut += row.truncated
        return Prepared(builder.build(), None if training else partial(_Scorer, *zip(*pairs, strict=True), 0.5), cut)

    def _worth(self, lists: Sequence[Candidates]) -> list[tuple[float, ...]]:
        """Return what candidates are worth: their labels, none below 0; of a teacher's scores the first is right."""
        if isinstance(self.loss, MarginMSELoss):
            return [(1.0, *[0.0] * (len(one.texts) - 1)) for one in lists]
        return [tuple(max(0.0, grade) for grade in one.grades) for one in lists]

    def objective(self, options: Options, weights: tuple[float, ...] | None, own: LossFunction | None, /) -> Any:
        """Return the loss of training."""
        return super().objective(options, weights, own) if self.loss is None else ListObjective(self.loss)

    def collate(self, usual: CollateRows, rows: Any, batches: Any, accumulate: int) -> CollateRows:
        """Return the collate function, in the same layout as ``usual``."""
        return usual if self.loss is None else CollateLists.like(usual)


def note_undefined_metrics(sets: Mapping[str, Prepared], task: Task) -> list[str]:
    """Return a note for each evaluation set of a ranker whose ranking metrics are not defined."""
    notes = []
    for name, part in sets.items() if isinstance(task, RankTask) else ():
        scorer: Any = part.scorer and part.scorer()
        pairs = zip(scorer.questions, scorer.worth, strict=True)
        if len({(question, grade) for question, own in pairs for grade in own}) == len(set(scorer.questions)):
            notes.append(
                f"{f'eval {name}'.strip()}: no query has passages of different relevance, so {', '.join(FIGURES[1:])} "
                "are not defined (nan); give each query several passages, some of which fit"
            )
    return notes


class _Scorer(Scorer):
    """Average precision of all candidates, and ranking metrics of each question.

    Args:
        questions: of each example; examples with an equal one are ranked together.
        worth: relevance grades of the candidates of each example.
        least: minimum grade of a relevant candidate; 0 for any positive grade.
    """

    def __init__(self, questions: Sequence[Any], worth: Sequence[Sequence[float]], least: float) -> None:
        super().__init__(CollectedValues())
        self.questions, self.worth, self.least = questions, worth, least

    def update(self, example: int, scores: Sequence[Tensor]) -> None:
        """Add the scores of the candidates of one example; padding is last."""
        self.parts[0].update(example, scores[0].reshape(-1)[: len(self.worth[example])].tolist())

    def compute(self) -> dict[str, float]:
        """Return the metrics; NaN if undefined."""
        groups: dict[Any, tuple[list[float], list[float]]] = {}
        for example, given in sorted(self.parts[0].items.items()):
            scores, worth = groups.setdefault(self.questions[example], ([], []))
            scores += given
            worth += self.worth[example]
        figures: dict[str, float] = dict.fromkeys(FIGURES, float("nan"))
        if not groups:
            return figures
        flat, true = (np.concatenate([group[k] for group in groups.values()]) for k in (0, 1))
        figures["ap"] = average_precision(flat, true >= self.least if self.least else true > 0)
        several = [group for group in groups.values() if len(set(group[1])) > 1]
        if several:
            figures |= ranking_figures(*zip(*several, strict=True))
        return figures

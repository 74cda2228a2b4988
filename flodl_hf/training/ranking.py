"""Rankers (cross-encoders): one relevance score for a question and a passage.

The default loss is the binary cross-entropy of the score and the label of the pair: 0 to 1. Other losses use
all candidates of a question together (`flodl_hf.training.losses.lists`). The metrics measure their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from flodl.errors import ConfigError, DataError
from flodl.metrics import Metric
from flodl_hf.readers.columns import Columns
from flodl_hf.training.eval_predictions import CollectedPredictions
from flodl_hf.training.evaluators import average_precision, ranking_figures
from flodl_hf.training.lists import (
    Candidates,
    CollateTexts,
    ListObjective,
    collate_lists,
    has_lists,
    prepare_lists,
    read_lists,
)
from flodl_hf.training.losses import loss_named, make_loss
from flodl_hf.training.losses.lists import LIST_LOSSES, MarginMSELoss
from flodl_hf.training.option_checks import Problems, task_faults
from flodl_hf.training.options import Options
from flodl_hf.training.rows import CollateRows, RowBuilder
from flodl_hf.training.step import Kind
from flodl_hf.training.task import CHUNK, Examples, LengthLimits, Prepared, UnweightedTask
from flodl_hf.training.vectors.tables import read_table

if TYPE_CHECKING:
    from flodl_hf.models.encoder_model import EncoderModel
    from flodl_hf.tokenization.tokenizer import Tokenizer

__all__ = ["RankTask", "plan_ranking"]

FIGURES = ("ap", "map", "mrr@10", "ndcg@10")
OF_PAIRS: dict[str, Kind] = {"BinaryCrossEntropyLoss": "multi_label", "MSELoss": "regression"}
"""Losses of a pair by itself, and what such a loss is of."""


@dataclass(frozen=True)
class RankTask(UnweightedTask):
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
    name: str = "rank"
    head: str = "sequence_classification"
    kind: Kind = "multi_label"
    labels: tuple[str, ...] = ("LABEL_0",)
    problem_type: None = None
    activation: str = "torch.nn.modules.activation.Sigmoid"
    main_metric: str = "ndcg@10"
    per_row: bool = True

    def start(self, model: EncoderModel) -> None:
        """Have a model store the activation of its scores: its own, or this task's if it has none.

        The problem type is removed, because transformers would apply another function than sentence-transformers.
        """
        own = model.config.score_activation or self.activation
        model.config = model.config.changed(problem_type="", score_activation=own)

    def prepare(self, examples: Examples, tokenizer: Tokenizer, limits: LengthLimits, *, training: bool) -> Prepared:
        """Return a row for each question with each of its candidates, or one for each question with all of them."""
        where = "train" if training else "eval"
        if self.loss is not None:
            lists, _ = read_lists(examples, self.role_columns, where)
            listed, cut = prepare_lists(lists, tokenizer, limits)
            return Prepared(listed, None if training else _Lists(lists, self._worth(lists)), cut)  # type: ignore[arg-type]
        pairs, grades, _ = _pairs(examples, self.role_columns, where, bounded=self.kind == "multi_label")
        builder, cut = RowBuilder(limits.types), 0
        for start in range(0, len(pairs), CHUNK):
            part = pairs[start : start + CHUNK]
            rows = tokenizer.encode_rows(
                [first for first, _ in part], [second for _, second in part], max_tokens=limits.max_tokens,
                offsets=False, cut="longest", overflow="truncate",
            )  # fmt: skip
            for i, group in enumerate(rows, start):
                builder.add(group[0], i, labels=np.asarray([grades[i]], np.float32))
                cut += group[0].truncated
        truth = None if training else ([first for first, _ in pairs], grades)
        return Prepared(builder.build(), truth, cut)

    def _worth(self, lists: Sequence[Candidates]) -> list[tuple[float, ...]]:
        """Return what candidates are worth: their labels, none below 0; of a teacher's scores the first is right."""
        if isinstance(self.loss, MarginMSELoss):
            return [(1.0, *[0.0] * (len(one.texts) - 1)) for one in lists]
        return [tuple(max(0.0, grade) for grade in one.grades) for one in lists]

    def scorer(self, prepared: Prepared) -> Any:
        """Return a new scorer."""
        return _ListScorer(prepared.truth) if self.loss is not None else _Scorer(*prepared.truth)

    def objective(self) -> ListObjective:
        """Return the loss of lists."""
        return ListObjective(self.loss)

    def of_held_out(self, prepared: Prepared) -> ListObjective:
        """Return the loss of evaluation lists."""
        return self.objective()

    def collate(self, usual: CollateRows, rows: Any) -> CollateTexts:
        """Return the collate function for lists, in the same layout as ``usual``."""
        return collate_lists(usual)


def plan_ranking(rows: Sequence[Mapping[str, Any]], options: Options) -> RankTask:
    """Return the task of learning to rank from a table.

    Raises:
        ConfigError: an option that scores have no place for.
        DataError: no columns contain relevance.
    """
    problems = Problems("finetune", task_faults("rank", options))
    word, loss, kind = options.vector_loss or "BinaryCrossEntropyLoss", None, None
    with problems:
        if not isinstance(word, str):
            raise ConfigError("vector_loss: found a mapping for a ranker; expected a name", problems=["vector_loss"])
        kind = OF_PAIRS.get(loss_named(word, {**OF_PAIRS, **LIST_LOSSES}))
        if kind is not None and options.loss_options:
            raise ConfigError(f"loss_options: {word} has none; leave it out", problems=["loss_options"])
        if kind is None and options.neftune:
            problems.add(["neftune: lists of candidates take none; leave it out"])
        if kind is None:
            loss = make_loss(word, options.loss_options, LIST_LOSSES)
    columns = None
    with problems:
        if kind is None:
            columns = read_lists(rows, options.columns)[1]
        else:
            _, _, columns = _pairs(rows, options.columns, "train", bounded=kind == "multi_label")
    problems.check()
    assert columns is not None
    if kind is None:
        return RankTask(columns, options.columns, loss)
    # The mean squared error applies to the logits.
    activation = "torch.nn.modules.linear.Identity" if kind == "regression" else RankTask.activation
    return RankTask(columns, options.columns, kind=kind, activation=activation)


def _pairs(
    rows: Sequence[Mapping[str, Any]], role_columns: Mapping[str, str] | None, where: str, *, bounded: bool
) -> tuple[list[tuple[str, str]], list[float], Columns]:
    """Return questions with candidates, their relevance, and the columns.

    Args:
        rows: the table.
        role_columns: columns by role.
        where: name of the table in messages.
        bounded: labels go from 0 to 1.
    """
    table = None if has_lists(rows, role_columns) else read_table(rows, role_columns, where).as_scores
    if table is None or table.form == "teacher_scores":
        lists, columns = read_lists(rows, role_columns, where)
        pairs = [(one.question, text) for one in lists for text in one.texts]
        grades = [grade for one in lists for grade in one.grades]
    elif table.form == "triplets":
        pairs = [(row[0], text) for row in table.texts for text in row[1:]]
        return pairs, [float(k == 0) for row in table.texts for k in range(len(row) - 1)], table.columns
    elif table.form not in ("binary", "scored") or table.labels is None:
        raise DataError(
            f"rank: found {table.form}; expected a question, a passage and a label from 0 to 1, a question with lists "
            "of passages and labels, or a question with a positive and negatives (flodl-hf mine finds some)",
            form=table.form,
        )
    else:
        columns, grades = table.columns, [float(value) for value in table.labels]
        pairs = [(row[0], row[1]) for row in table.texts]
    if bounded and (min(grades) < 0 or max(grades) > 1):
        raise DataError(
            f"rank: labels go from {min(grades):g} to {max(grades):g}; expected 0 (does not fit) to 1 (fits), grades "
            "between them; MSELoss and losses of lists take any",
            least=min(grades),
            most=max(grades),
        )
    return pairs, grades, columns


@dataclass(frozen=True)
class _Lists:
    """Evaluation lists, and the relevance of their candidates."""

    lists: Sequence[Candidates]
    worth: Sequence[tuple[float, ...]]


class _ListScorer:
    def __init__(self, truth: _Lists) -> None:
        self.truth, self.kept = truth, CollectedPredictions()

    def update(self, example: int, scores: Sequence[Tensor]) -> None:
        """Add the scores of the candidates of one question; padding is last."""
        count = len(self.truth.lists[example].texts)
        self.kept.update(example, scores[0][:count].tolist(), None)

    def metrics(self) -> Sequence[Metric]:
        """Return the metrics."""
        return [self.kept]

    def compute(self) -> dict[str, float]:
        """Return the ranking metrics."""
        found = sorted(self.kept.items)
        scores = [self.kept.items[example][0] for example in found]
        return _figures(scores, [self.truth.worth[example] for example in found], 0.0)


class _Scorer:
    def __init__(self, questions: list[str], grades: list[float]) -> None:
        self.questions, self.grades, self.kept = questions, grades, CollectedPredictions()

    def update(self, example: int, scores: Sequence[Tensor]) -> None:
        """Add the score of one pair."""
        self.kept.update(example, float(scores[0].reshape(-1)[0]), None)

    def metrics(self) -> Sequence[Metric]:
        """Return the metrics."""
        return [self.kept]

    def compute(self) -> dict[str, float]:
        """Return the average precision of all pairs, and the ranking metrics."""
        groups: dict[str, list[tuple[float, float]]] = {}
        for example in sorted(self.kept.items):
            found = (self.kept.items[example][0], self.grades[example])
            groups.setdefault(self.questions[example], []).append(found)
        scores, worth = ([[pair[k] for pair in group] for group in groups.values()] for k in (0, 1))
        return _figures(scores, worth, 0.5)


def _figures(scores: Sequence[Sequence[float]], worth: Sequence[Sequence[float]], least: float) -> dict[str, float]:
    """Return the average precision of all pairs, and how each question's candidates are ordered; NaN where neither is.

    Args:
        scores: of each question's candidates.
        worth: what these are worth.
        least: a pair is right that is worth as much, or more than nothing.
    """
    figures: dict[str, float] = dict.fromkeys(FIGURES, float("nan"))
    if not scores:
        return figures
    flat, true = np.concatenate([*map(np.asarray, scores)]), np.concatenate([*map(np.asarray, worth)])
    figures["ap"] = average_precision(flat, true >= least if least else true > 0)
    several = [(one, own) for one, own in zip(scores, worth, strict=True) if len(set(own)) > 1]
    if several:
        figures |= ranking_figures([one for one, _ in several], [own for _, own in several])
    return figures

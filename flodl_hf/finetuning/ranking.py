"""Rankers: a question and a passage read together, and one score of how well they fit, as a cross-encoder gives it.

The loss is the cross-entropy of the score with what is said of the pair: 0 or 1, or a grade between. What is judged is
how the candidates of each question are ordered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from flodl.errors import ConfigError, DataError
from flodl.metrics import Metric
from flodl_hf.columns import Columns
from flodl_hf.finetuning.options import Options
from flodl_hf.finetuning.own import Kept
from flodl_hf.finetuning.rows import EncodedRows, RowBuilder
from flodl_hf.finetuning.step import Kind
from flodl_hf.finetuning.task import CHUNK, Examples, LengthLimits, Prepared
from flodl_hf.finetuning.vectors.tables import TextTable, read_table
from flodl_hf.vectors.judging.pairs import average_precision
from flodl_hf.vectors.judging.ranked import ranking_figures

if TYPE_CHECKING:
    from flodl_hf.tokenizer import Tokenizer

__all__ = ["RankTask", "plan_ranking"]

FIGURES = ("ap", "map", "mrr@10", "ndcg@10")


@dataclass(frozen=True)
class RankTask:
    """How well a passage fits a question.

    Args:
        columns: where questions, passages and labels stand.
        said: columns as the caller named them, by role.
    """

    columns: Columns
    said: Mapping[str, str] | None = None
    name: str = "rank"
    head: str = "sequence_classification"
    kind: Kind = "multi_label"
    labels: tuple[str, ...] = ("LABEL_0",)
    problem_type: str = "regression"  # as transformers wants it of a model with one label; the loss is the pair's own
    main_metric: str = "ndcg@10"
    per_row: bool = True

    def prepare(self, examples: Examples, tokenizer: Tokenizer, limits: LengthLimits, *, training: bool) -> Prepared:
        """Return a row for each question with each of its candidates."""
        pairs, grades = _pairs(read_table(examples, self.said, "train" if training else "eval"))
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

    def scorer(self, prepared: Prepared) -> _Scorer:
        """Return a scorer that has seen nothing."""
        return _Scorer(*prepared.truth)

    def label_counts(self, rows: EncodedRows) -> None:
        """Return None: grades are not weighed."""
        return


def plan_ranking(rows: Sequence[Mapping[str, Any]], options: Options) -> RankTask:
    """Return the task of learning to rank from a table.

    Raises:
        ConfigError: an option that scores have no place for.
        DataError: columns that do not say how well passages fit.
    """
    wrong = [name for name in ("class_weights", "label_smoothing") if getattr(options, name)]
    wrong += ["labels"] if options.labels not in (None, (), RankTask.labels) else []
    wrong += ["problem_type"] if options.problem_type not in (None, RankTask.problem_type) else []
    if wrong:
        raise ConfigError(f"{', '.join(wrong)}: a ranker has one score and no classes; expected none", problems=wrong)
    table = read_table(rows, options.columns)
    _pairs(table)
    return RankTask(table.columns, options.columns)


def _pairs(table: TextTable) -> tuple[list[tuple[str, str]], list[float]]:
    """Return questions with candidates, and how well each fits, from 0 to 1."""
    if table.form == "triplets":
        pairs = [(row[0], text) for row in table.texts for text in row[1:]]
        return pairs, [float(k == 0) for row in table.texts for k in range(len(row) - 1)]
    if table.form not in ("binary", "scored") or table.labels is None:
        raise DataError(
            f"rank: found {table.form}; expected a question, a passage and a label from 0 to 1, or a question with a "
            "positive and negatives (flodl-hf mine finds some)",
            form=table.form,
        )
    grades = [float(value) for value in table.labels]
    if min(grades) < 0 or max(grades) > 1:
        raise DataError(
            f"rank: labels go from {min(grades):g} to {max(grades):g}; expected 0 (does not fit) to 1 (fits), grades "
            "between them",
            least=min(grades),
            most=max(grades),
        )
    return [(row[0], row[1]) for row in table.texts], grades


class _Scorer:
    def __init__(self, questions: list[str], grades: list[float]) -> None:
        self.questions, self.grades, self.kept = questions, grades, Kept()

    def update(self, example: int, scores: Sequence[Tensor]) -> None:
        """Take in the score of one pair."""
        self.kept.update(example, float(scores[0].reshape(-1)[0]), None)

    def metrics(self) -> Sequence[Metric]:
        """Return what is kept."""
        return [self.kept]

    def compute(self) -> dict[str, float]:
        """Return the average precision of all pairs, and how the candidates of each question are ordered."""
        figures: dict[str, float] = dict.fromkeys(FIGURES, float("nan"))
        if not self.kept.items:
            return figures
        groups: dict[str, list[tuple[float, float]]] = {}
        for example in sorted(self.kept.items):
            found = (self.kept.items[example][0], self.grades[example])
            groups.setdefault(self.questions[example], []).append(found)
        pairs = np.asarray([pair for group in groups.values() for pair in group])
        figures["ap"] = average_precision(pairs[:, 0], pairs[:, 1] >= 0.5)
        several = [np.asarray(group) for group in groups.values() if len({grade for _, grade in group}) > 1]
        if several:
            figures |= ranking_figures([group[:, 0] for group in several], [group[:, 1] for group in several])
        return figures

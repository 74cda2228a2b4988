"""Classification and regression of texts and pairs of texts.

A text that is longer than a row is cut at its end, as transformers' scripts do; of a pair the longer one gives way.
Alternatively it is read in windows, each with the label; the evaluation uses their mean, as `predict` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from flodl.errors import ConfigError, DataError
from flodl.metrics import Classification, Metric, MultiLabel, Pearson, Spearman, SquaredError
from flodl_hf.inference.classes import activation_for, class_scores, mean_over_windows
from flodl_hf.tokenization.readers import Targets, infer_targets
from flodl_hf.tokenization.readers.columns import NAMES, Columns, check_texts, refuse_rows
from flodl_hf.training.rows import EncodedRows, RowBuilder
from flodl_hf.training.step import PROBLEM_TYPES
from flodl_hf.training.task import Examples, LengthLimits, Prepared, Scorer, Source, Task, encode_chunks, label_names

if TYPE_CHECKING:
    from flodl_hf.tokenization.tokenizer import Tokenizer

_KINDS = {problem: kind for kind, problem in PROBLEM_TYPES.items()}
BUFFER = 1024


@dataclass
class SequenceTask(Task):
    """A label for each text.

    Args:
        columns: the columns of texts and labels.
        targets: what labels are, and their names.
        labels: names of the labels in the result, by number.
    """

    columns: Columns
    targets: Targets
    labels: tuple[str, ...]

    headed = True
    head = "sequence_classification"
    per_row = True

    def __post_init__(self) -> None:
        self.kind = self.targets.kind
        self.problem_type = PROBLEM_TYPES[self.kind]
        self.main_metric = {"single_label": "accuracy", "multi_label": "f1", "regression": "-mse"}[self.kind]

    @classmethod
    def plan(cls, source: Source) -> SequenceTask:
        """Return the task of texts with labels."""
        tables, columns, options, known = source.tables, source.columns, source.options, source.known
        if columns.label is None:
            raise DataError(
                f"train: found no column of labels among {list(tables.train[0])}; set columns={{'label': ...}}"
            )
        if options.problem_type in (None, "single_label_classification"):
            tables.drop_unlabelled(columns.label, options.labels)
        values = [row.get(columns.label) for row in tables.labelled]
        if columns.label.lower() not in NAMES["label"] and columns.label in values:
            raise DataError(
                f"train: column {columns.label!r} has its own name among its labels, so the first line of the file "
                "seems to be a row of data; expected a line of names before it, such as text,label",
                names=[columns.label],
            )
        kind: Any = _KINDS[options.problem_type] if options.problem_type else None
        if kind == "multi_label":
            joined = next((v for v in values if isinstance(v, str) and any(sign in v for sign in ",;|")), None)
            if joined is not None:
                raise DataError(
                    f"train: column {columns.label!r} contains several labels in one text, such as {joined!r}; "
                    "expected lists (JSON lines or Parquet), or a column of 0 and 1 for each label",
                    column=columns.label,
                )
            values = [v if isinstance(v, (list, tuple)) else [v] for v in values]
        found = infer_targets(values, kind)
        if found.kind == "regression":
            names = tuple(options.labels or (f"LABEL_{k}" for k in range(found.size)))
            if len(names) != found.size:
                raise ConfigError(
                    f"labels: found {len(names)} names for {found.size} numbers in column {columns.label!r}; "
                    "expected as many names",
                    problems=["labels"],
                )
            return cls(columns, found, names)
        own = known.labels if known.head == "sequence_classification" else ()
        stored, names = label_names(found.names, options.labels, tables.train.classes.get(columns.label), own)
        if len(names) == 1 and found.kind == "single_label":
            raise DataError(
                f"train: every row has the label {names[0]!r}; expected at least two labels, or "
                "problem_type='regression'",
                labels=names,
            )
        return cls(columns, replace(found, names=stored), names)

    def prepare(self, examples: Examples, tokenizer: Tokenizer, limits: LengthLimits, *, training: bool) -> Prepared:
        """Return one row for each text, or one for each window of it."""
        columns: Any = self.columns
        text, pair = columns.text, columns.text_pair
        for column in (text, pair):
            if column is not None:
                check_texts(examples, column, "finetune")
        values = self._values([row.get(columns.label) for row in examples])
        builder, weights, cut = RowBuilder(limits.types), [], 0
        how: Any = {"cut": None if pair is None else "longest", "overflow": "truncate"}
        if limits.windows:
            how = {"stride": limits.shared(0, 3), "overflow": "windows"}
        texts, seconds = [row[text] for row in examples], None if pair is None else [row[pair] for row in examples]
        for i, group in encode_chunks(tokenizer, texts, seconds, max_tokens=limits.max_tokens, offsets=False, **how):
            for window in group:
                builder.add(window, i, labels=values[i])
            cut += group[0].truncated
            if not training:
                weights.append([sum(not special for special in window.special) for window in group])
        rows = builder.build()
        if training:
            return Prepared(rows, cut=cut)
        labels = rows.values["labels"][np.flatnonzero(np.diff(rows.owners, prepend=-1))]
        scorer = partial(_Scorer, self.kind, len(self.labels), torch.as_tensor(labels), weights)
        return Prepared(rows, scorer, cut)

    def _values(self, labels: Sequence[Any]) -> list[Any]:
        """Return labels as the loss takes them."""
        found, problems = [], []
        for i, label in enumerate(labels):
            try:
                value = self.targets.encode(label)
            except (DataError, TypeError, ValueError) as fault:
                problems.append(f"row {i}: {fault}")
                continue
            narrow = np.int64 if self.kind == "single_label" else np.float32
            found.append(np.asarray(value, dtype=narrow)[()])
        what = f"labels in column {self.columns.label!r} that cannot be"
        refuse_rows("finetune", what, problems, "labels as in the training data")
        return found

    def label_counts(self, rows: EncodedRows) -> list[int] | None:
        """Return how many rows have each label."""
        labels = rows.values["labels"]
        if self.kind == "regression":
            return None
        if self.kind == "multi_label":
            return [int(n) for n in labels.sum(0)]
        return np.bincount(labels, minlength=len(self.labels)).tolist()


class _Scorer(Scorer):
    """Metrics of the labels of texts; ``weights`` are for each text the content tokens of its windows."""

    def __init__(self, kind: str, size: int, truth: Tensor, weights: list[list[int]]) -> None:
        self.kind, self.truth, self.weights = kind, truth, weights
        if kind == "single_label":
            super().__init__(Classification(size, "binary" if size == 2 else "macro"))
        elif kind == "multi_label":
            super().__init__(MultiLabel(size, "micro"))
        else:  # correlations are of one number; several numbers of a text may have different scales
            super().__init__(SquaredError(), *([Pearson(), Spearman()] if size == 1 else []))
        self._examples: list[int] = []
        self._scores: list[Tensor] = []

    def update(self, example: int, scores: Sequence[Tensor]) -> tuple[Any, Any]:
        """Add the scores of one text; return them and its label, a number or numbers."""
        score = scores[0] if len(scores) == 1 else self._of_windows(torch.stack(list(scores)), self.weights[example])
        self._examples.append(example)
        self._scores.append(score)
        if len(self._examples) >= BUFFER:
            self._flush()
        return score.tolist(), self.truth[example].tolist()

    def _of_windows(self, scores: Tensor, weights: Sequence[int]) -> Tensor:
        """Return scores with the mean probabilities of the windows, as `predict` computes them."""
        activation = activation_for(PROBLEM_TYPES[self.kind], scores.shape[-1])
        owners = np.zeros(len(scores), np.int64)
        mean = mean_over_windows(class_scores(scores, activation), owners, 1, weights)[0].double()
        if activation == "sigmoid":
            mean = torch.logit(mean)
        elif activation == "softmax":
            mean = mean.log()
        return mean.to(scores.dtype)

    def _flush(self) -> None:
        if not self._examples:
            return
        scores, truth = torch.stack(self._scores), self.truth[self._examples]
        if self.kind == "regression":
            scores = scores.view(truth.shape)
        for metric in self.parts:
            metric.update(scores, truth)
        self._examples, self._scores = [], []

    def metrics(self) -> Sequence[Metric]:
        """Return the metrics."""
        self._flush()
        return self.parts

"""The result of an evaluation: metrics, confusion matrix and a table of labels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flodl_hf.inference.results import plain


@dataclass(frozen=True)
class EvaluationResult:
    """Metrics of a model on labelled data.

    Attributes:
        task: the task that was evaluated.
        metrics: value of each metric, ``eval_loss`` first. With several data sets the names are ``<set>/<metric>``.
        examples: number of examples.
        seconds: duration of the evaluation, without reading data and model.
        labels: label of each row and column of ``confusion``; None for tasks without labels.
        confusion: confusion matrix, one row for each true label and one column for each predicted label. With several
            labels per text: for each label ``[[true negatives, false positives], [false negatives, true positives]]``.
            None for tasks without labels.
        per_label: precision, recall, F1 and number of examples (``support``) of each label; None for tasks without
            labels.
        predictions: scores ``(examples, labels)``, lists of tags, or answers; None for masked words and embeddings.
        truth: the gold labels, in the same form.
        sets: result of each data set by name, if several were given; then the fields above from ``labels`` on are None.
        notes: remarks about how data and options were interpreted.
        details: results of the user's metrics that are not numbers, by name, as JSON types.
    """

    task: str
    metrics: dict[str, float]
    examples: int
    seconds: float
    labels: list[str] | None = None
    confusion: list[Any] | None = None
    per_label: dict[str, dict[str, float]] | None = None
    predictions: Any = field(default=None, repr=False)
    truth: Any = field(default=None, repr=False)
    sets: dict[str, EvaluationResult] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list, repr=False)
    details: dict[str, Any] = field(default_factory=dict, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return everything but predictions and gold labels as JSON types."""
        found = {
            "task": self.task, "metrics": plain(self.metrics),
            "examples": self.examples, "seconds": round(self.seconds, 3), "labels": self.labels,
            "confusion": self.confusion, "per_label": self.per_label, "notes": self.notes,
        }  # fmt: skip
        found |= {"details": self.details} if self.details else {}
        return found | ({"sets": {name: one.to_dict() for name, one in self.sets.items()}} if self.sets else {})

    def __str__(self) -> str:
        if self.sets:
            return "\n\n".join(f"{name}: {one}" for name, one in self.sets.items())
        width = max((len(name) for name in self.metrics), default=0) + 2
        lines = [f"{self.task}, {self.examples:,} examples, {self.seconds:.1f} s"]
        lines += [f"{name:<{width}}{value:.4f}" for name, value in self.metrics.items() if "/" not in name]
        if self.per_label:
            table: list[tuple[str, ...]] = [("label", *COLUMNS)]
            for name, row in self.per_label.items():
                table.append((name, *(f"{row[column]:.4f}" for column in COLUMNS[:-1]), f"{int(row['support']):,}"))
            lines += ["", *_aligned(table)]
        if self.labels and self.confusion and len(self.labels) <= MOST_SHOWN:
            head, matrix = ("true \\ predicted", *self.labels), self.confusion
            if isinstance(matrix[0][0], list):  # a 2 x 2 matrix for each label
                head, matrix = ("label", *OUTCOMES), [[*absent, *present] for absent, present in matrix]
            rows = [(name, *map(str, row)) for name, row in zip(self.labels, matrix, strict=True)]
            lines += ["", *_aligned([head, *rows])]
        return "\n".join(lines)


OUTCOMES = ("true negatives", "false positives", "false negatives", "true positives")
COLUMNS = ("precision", "recall", "f1", "support")
MOST_SHOWN = 12
"""Maximum number of labels with a printed confusion matrix."""


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]

"""Decision thresholds of labels, chosen on evaluation data for the best F1.

Each of several labels has a threshold; for two labels, only the second one. On the examples it was chosen on,
a threshold is optimal, and may be worse on others; the card states this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flodl_hf.training.eval_predictions import EvalPredictions
from flodl_hf.training.report.figures import best_thresholds

if TYPE_CHECKING:
    from flodl_hf.training.task import Task

__all__ = ["Tuned", "threshold_faults", "tune_thresholds"]


@dataclass(frozen=True)
class Tuned:
    """Thresholds, and their F1 on the examples they were chosen on.

    Attributes:
        thresholds: by label.
        usual: F1 of each label with 0.5; for two labels the F1 of the second, under its name.
        tuned: F1 of each label with its threshold.
        examples: how many there were.
        where: name of the set; empty where there is one.
    """

    thresholds: dict[str, float]
    usual: dict[str, float]
    tuned: dict[str, float]
    examples: int
    where: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON types."""
        return {
            "thresholds": self.thresholds, "f1_at_0.5": self.usual, "f1_tuned": self.tuned, "examples": self.examples,
            "set": self.where,
        }  # fmt: skip


def threshold_faults(task: Task) -> list[str]:
    """Return the problem of a task without thresholds: neither several labels per text nor two labels."""
    if task.kind == "multi_label" or (task.kind == "single_label" and len(task.labels or ()) == 2):
        return []
    return [
        f"tune_thresholds: found {task.kind.replace('_', ' ')} with {len(task.labels or ())} labels; expected several "
        "labels per text (multi_label_classification), or two labels"
    ]


def tune_thresholds(predictions: EvalPredictions, labels: tuple[str, ...]) -> Tuned:
    """Return the thresholds of the best F1.

    Args:
        predictions: scores and gold labels of the evaluation examples.
        labels: label names by number.
    """
    logits, truth = np.asarray(predictions.predictions, np.float64), np.asarray(predictions.truth)
    is_binary = truth.ndim == 1
    if is_binary:
        # The probability of the second of two, as a softmax has it.
        scores, there = _sigmoid(logits[:, 1:] - logits[:, :1]), (truth == 1)[:, None]
    else:
        scores, there = _sigmoid(logits), truth > 0.5
    found = [round(float(value), 6) for value in best_thresholds(scores, there)]
    named = labels[1:] if is_binary else labels
    usual, tuned = (
        {name: _f1(scores[:, i] >= at[i], there[:, i]) for i, name in enumerate(named)}
        for at in ([0.5] * len(named), found)
    )
    thresholds = dict(zip(named, found, strict=True))
    if is_binary:
        thresholds = {labels[0]: round(1 - found[0], 6), **thresholds}
    return Tuned(thresholds, usual, tuned, len(scores), predictions.name)


def _sigmoid(logits: Any) -> Any:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-logits))


def _f1(said: Any, there: Any) -> float:
    total = int(said.sum()) + int(there.sum())
    return 2 * int((said & there).sum()) / total if total else 0.0
